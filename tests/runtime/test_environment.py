"""Names in the environment that look like options and are none."""

import pytest

import launcher.cli  # noqa: F401 -- every option is made by then
from runtime import environment
from runtime.environment import SUPERVISED, known_names, notes


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("CROSSDOCK_KV_GB", "CROSSDOCK_KV_GIB"),
        ("CROSSDOCK_API_KEY", "CROSSDOCK_API_KEYS"),
        ("crossdock_prot", "CROSSDOCK_PORT"),
        ("CROSSDOCK_CONFG", "CROSSDOCK_CONFIG"),
        ("CROSSDOCK_XYZZY", ""),
    ],
)
def test_an_unknown_name_is_noted_with_the_nearest_known_one(name: str, guess: str) -> None:
    (line,) = notes([name, "PATH"], known_names() - {"CROSSDOCK_API_KEY"})
    assert line.startswith(f"note: {name} in the environment is no option")
    assert line.endswith(f"did you mean {guess}?" if guess else "is ignored")


def test_every_option_of_every_role_is_known_to_each() -> None:
    known = known_names()
    assert {"CROSSDOCK_STEP_TOKENS", "CROSSDOCK_TOKENS_BIND", "CROSSDOCK_KV_GIB", "CROSSDOCK_ONCE"} <= known
    assert (
        notes([*known, *environment.NO_OPTIONS - {SUPERVISED}, "CROSSDOCK_TEST_MODEL", "crossdock_port"], known) == []
    )


def test_what_the_launcher_has_said_its_processes_do_not_repeat() -> None:
    assert notes(["CROSSDOCK_XYZZY", SUPERVISED], known_names()) == []
