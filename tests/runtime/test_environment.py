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
def test_unknown_variable_gets_a_suggestion(name: str, guess: str) -> None:
    """An unknown variable is noted together with the nearest known name."""
    (line,) = notes({name: "x", "PATH": "/bin"}, known_names() - {"CROSSDOCK_API_KEY"})
    assert line.startswith(f"note: {name} in the environment is no option")
    assert line.endswith(f"did you mean {guess}?" if guess else "is ignored")


def test_all_roles_know_all_options() -> None:
    """Variables for options of any role are noted by none."""
    known = known_names()
    assert {"CROSSDOCK_STEP_TOKENS", "CROSSDOCK_TOKENS_BIND", "CROSSDOCK_KV_GIB", "CROSSDOCK_ONCE"} <= known
    names = [*known, *environment.NO_OPTIONS - {SUPERVISED}, "CROSSDOCK_TEST_MODEL", "crossdock_port"]
    assert notes(dict.fromkeys(names, "8000"), known) == []


def test_launched_processes_repeat_no_notes() -> None:
    """Processes that a launcher supervises do not repeat its notes on variables."""
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
def test_kubernetes_service_variables_are_ignored(
    monkeypatch: pytest.MonkeyPatch, cls: type[Options], flags: dict[str, str]
) -> None:
    """Variables that Kubernetes sets for a service change no option."""
    expected = load(cls, flags)
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert load(cls, flags) == expected


def test_service_variables_share_one_note() -> None:
    """One line names all ignored Kubernetes variables and the setting that avoids them."""
    (line,) = notes(LINKS, known_names())
    assert all(name in line for name in LINKS) and "enableServiceLinks: false" in line


@pytest.mark.parametrize("value", ["tcp://10.0.0.1", "eighty", "tcp://a:1/x"])
def test_invalid_port_is_still_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A CROSSDOCK_PORT that is neither a number nor a Kubernetes address is refused."""
    monkeypatch.setenv("CROSSDOCK_PORT", value)
    with pytest.raises(SettingsError, match="CROSSDOCK_PORT"):
        load(GatewaySettings, {"model": "m"})


def test_address_options_accept_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in the variable of an option for an address is taken as that option."""
    monkeypatch.setenv("CROSSDOCK_COORDINATOR", "tcp://10.0.0.1:7070")
    assert load(GatewaySettings, {"model": "m"}).coordinator == "tcp://10.0.0.1:7070"
