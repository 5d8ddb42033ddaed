"""Names in the environment that look like options and are none."""

import pytest

import launcher.cli  # noqa: F401 -- every option is made by then
from runtime.settings import environment
from runtime.settings.environment import SUPERVISED, known_names, notes
from runtime.settings.options import SettingsError, load
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings
from runtime.settings.types import Options
from runtime.settings.workers import WorkerSettings


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
    (line,) = notes({name: "x", "PATH": "/bin"}, known_names() - {"CROSSDOCK_API_KEY"})
    assert line.startswith(f"note: {name} in the environment is no option")
    assert line.endswith(f"did you mean {guess}?" if guess else "is ignored")


def test_every_option_of_every_role_is_known_to_each() -> None:
    known = known_names()
    assert {"CROSSDOCK_STEP_TOKENS", "CROSSDOCK_TOKENS_BIND", "CROSSDOCK_KV_GIB", "CROSSDOCK_ONCE"} <= known
    names = [*known, *environment.NO_OPTIONS - {SUPERVISED}, "CROSSDOCK_TEST_MODEL", "crossdock_port"]
    assert notes(dict.fromkeys(names, "8000"), known) == []


def test_what_the_launcher_has_said_its_processes_do_not_repeat() -> None:
    assert notes({"CROSSDOCK_XYZZY": "", SUPERVISED: "1"}, known_names()) == []


LINKS = {
    "CROSSDOCK_SERVICE_HOST": "10.0.0.1",
    "CROSSDOCK_SERVICE_PORT": "8000",
    "CROSSDOCK_SERVICE_PORT_HTTP": "8000",
    "CROSSDOCK_PORT": "tcp://10.0.0.1:8000",
    "CROSSDOCK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "CROSSDOCK_PORT_8000_TCP_PROTO": "tcp",
    "CROSSDOCK_PORT_8000_TCP_PORT": "8000",
    "CROSSDOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
    "CROSSDOCK_COORDINATOR_SERVICE_HOST": "10.0.0.2",
    "CROSSDOCK_COORDINATOR_PORT": "tcp://[fd00::2]:7070",
    "CROSSDOCK_COORDINATOR_PORT_7070_TCP": "tcp://[fd00::2]:7070",
}
"""As Kubernetes makes them for Services named crossdock and crossdock-coordinator."""
ROLES: list[tuple[type[Options], dict[str, str]]] = [
    (CoordinatorSettings, {}),
    (GatewaySettings, {"model": "m"}),
    (WorkerSettings, {"model": "m", "role": "prefill"}),
    (WorkerSettings, {"model": "m", "role": "decode"}),
    (ServeSettings, {}),
]


@pytest.mark.parametrize(("cls", "flags"), ROLES)
def test_what_kubernetes_sets_for_a_service_is_ignored(
    monkeypatch: pytest.MonkeyPatch, cls: type[Options], flags: dict[str, str]
) -> None:
    expected = load(cls, flags)
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert load(cls, flags) == expected


def test_it_is_said_in_one_line_with_every_name() -> None:
    (line,) = notes(LINKS, known_names())
    assert all(name in line for name in LINKS) and "enableServiceLinks: false" in line


@pytest.mark.parametrize("value", ["tcp://10.0.0.1", "eighty", "tcp://a:1/x"])
def test_other_values_of_a_port_are_still_mistakes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CROSSDOCK_PORT", value)
    with pytest.raises(SettingsError, match="CROSSDOCK_PORT"):
        load(GatewaySettings, {"model": "m"})


def test_addresses_of_options_that_are_addresses_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSDOCK_COORDINATOR", "tcp://10.0.0.1:7070")
    assert load(GatewaySettings, {"model": "m"}).coordinator == "tcp://10.0.0.1:7070"
