"""Settings: precedence of the sources, errors which name option and source, and command lines made from the fields."""

import os
from pathlib import Path

import pytest

from runtime.process.exits import INTERRUPTED_EXIT
from runtime.settings.command_line import add_command, invoke, new_app, parse
from runtime.settings.cores import parse_cores
from runtime.settings.options import SECTIONS, SettingsError, load, option_name, to_arguments
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings
from runtime.settings.types import model_id_of
from runtime.settings.workers import WorkerSettings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CROSSDOCK_")]:
        monkeypatch.delenv(name)


def test_flags_before_environment_before_file_before_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "crossdock.toml"
    file.write_text(
        '[gateway]\nmodel = "file"\nport = 1\nhost = "file"\nbody_bytes_max = 4096\n[worker]\nthreads = 3\n'
    )
    monkeypatch.setenv("CROSSDOCK_PORT", "2")
    monkeypatch.setenv("CROSSDOCK_HOST", "environment")
    settings = load(GatewaySettings, {"host": "flag"}, str(file))
    assert (settings.host, settings.port, settings.model, settings.body_bytes_max) == ("flag", 2, "file", 4096)
    assert settings.queue_wait_s == 10.0
    monkeypatch.setenv("CROSSDOCK_CONFIG", str(file))
    assert load(WorkerSettings, {"role": "decode", "model": "x"}).threads == 3


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ({"port": "99999"}, {}, "--port: 99999 is over 65535"),
        ({}, {"CROSSDOCK_PORT": "99999"}, "--port: 99999 is over 65535 (from environment CROSSDOCK_PORT)"),
        ({"port": "many"}, {}, "--port: many is not a whole number"),
        ({"heartbeat_ms": "1"}, {}, "--heartbeat-ms: 1 is under 10"),
        ({"log_level": "loud"}, {}, "--log-level: loud is not one of 'debug', 'info', 'warning' or 'error'"),
        ({"tokens_bind": "8000"}, {}, "--tokens-bind: 8000 is not an address like tcp://127.0.0.1:7070"),
        ({"tokens_bind": "tcp://h:70000"}, {}, "--tokens-bind: tcp://h:70000 is not an address"),
        ({"tokens_bind": "tcp://0.0.0.0:1"}, {}, "--advertise: needed, since --tokens-bind tcp://0.0.0.0:1"),
    ],
)
def test_errors_name_option_value_and_source(
    flags: dict[str, str], environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load(GatewaySettings, {"model": "m", **flags})
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_every_error_gets_a_line_of_its_own() -> None:
    with pytest.raises(SettingsError) as caught:
        load(WorkerSettings, {"role": "both", "kv_gib": "0"})
    lines = str(caught.value).splitlines()
    assert lines[0] == "--model: needed (or environment CROSSDOCK_MODEL or model in [worker] of the file)"
    assert lines[1] == "--role: both is not one of 'prefill', 'decode' or 'mixed'"
    assert lines[2] == "--kv-gib: 0 is not over 0.0"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[gateway]\nprot = 1\n", "has an unknown key 'prot' in [gateway]"),
        ("[gatway]\nport = 1\n", "has 'gatway' at its top"),
        ("port = 1\n", "has 'port' at its top"),
        ("[worker]\ncolour = 1\n", "has an unknown key 'colour' in [worker]"),
        ("[gateway\n", "is not TOML"),
    ],
)
def test_unknown_keys_in_the_file_are_errors_whosever_section(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"^--config: ") as caught:
        load(GatewaySettings, {"model": "m"}, str(file))
    assert expected in str(caught.value)


def test_a_bad_value_in_the_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[gateway]\nport = 8000.5\n")
    with pytest.raises(SettingsError) as caught:
        load(GatewaySettings, {"model": "m"}, str(file))
    assert str(caught.value) == f"--port: 8000.5 is not a whole number (from [gateway] in {file})"
    with pytest.raises(SettingsError, match="--config: cannot read"):
        load(GatewaySettings, {}, str(tmp_path / "absent.toml"))


def test_keys_are_split_at_commas_whatever_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(GatewaySettings, {"model": "m", "api_keys": "a, b,"}).api_keys == ["a", "b"]
    monkeypatch.setenv("CROSSDOCK_API_KEYS", "c,d")
    assert load(GatewaySettings, {"model": "m"}).api_keys == ["c", "d"]
    monkeypatch.delenv("CROSSDOCK_API_KEYS")
    file = tmp_path / "c.toml"
    file.write_text('[gateway]\napi_keys = ["e", "f"]\n')
    assert load(GatewaySettings, {"model": "m"}, str(file)).api_keys == ["e", "f"]


def test_instances_made_directly_read_nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSDOCK_PORT", "1")
    assert GatewaySettings(model="m").port == 8000


def test_arguments_make_the_same_settings_again() -> None:
    worker = WorkerSettings(role="decode", model="m", kv_gib=0.5, cpu_cores="0-1", nice=-3)
    assert parse(WorkerSettings, to_arguments(worker)) == worker
    serve = ServeSettings(once=True, verbose=False, api_keys=["a", "b"])
    assert parse(ServeSettings, to_arguments(serve)) == serve
    assert to_arguments(CoordinatorSettings()) == []


@pytest.mark.parametrize("cls", SECTIONS.values(), ids=lambda cls: cls.__name__)
def test_help_teaches_every_option(cls: type[CoordinatorSettings], capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    add_command(app, "role", cls, lambda settings: 0)
    assert invoke(app, ["--help"], "role") == 0
    shown = capsys.readouterr().out
    for name, field in cls.model_fields.items():
        assert field.description
        assert field.description.endswith((".", "?"))
        assert option_name(name, field) in shown
    assert "--config" in shown


def test_mistakes_on_the_command_line_are_one_line_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    app = new_app()
    add_command(app, "gateway", GatewaySettings, lambda settings: 0)
    for arguments, expected in (
        (["--prot", "1"], "No such option: --prot"),
        (["--model", "m", "--port", "x"], "--port: x is not a whole number"),
        (["--port"], "--port"),
    ):
        assert invoke(app, arguments, "crossdock gateway") == 2
        said = capsys.readouterr().err
        assert said.startswith("crossdock gateway: ")
        assert expected in said
        assert said.count("\n") == 1


def test_the_status_of_the_command_is_what_it_returned() -> None:
    app = new_app()
    add_command(app, "gateway", GatewaySettings, lambda settings: settings.port)
    assert invoke(app, ["--model", "m", "--port", "7"], "x") == 7


def test_ctrl_c_is_no_traceback() -> None:
    def interrupted(_settings: GatewaySettings) -> int:
        raise KeyboardInterrupt

    app = new_app()
    add_command(app, "gateway", GatewaySettings, interrupted)
    assert invoke(app, ["--model", "m"], "x") == INTERRUPTED_EXIT


@pytest.mark.parametrize(("text", "cores"), [("", ()), ("1", (1,)), ("0-2,5", (0, 1, 2, 5)), ("3,1", (1, 3))])
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["a", "2-1", "1-", ",", "1 2", "-1"])
def test_bad_lists_of_cores(text: str) -> None:
    with pytest.raises(SettingsError, match="--cpu-cores"):
        load(WorkerSettings, {"role": "decode", "model": "m", "cpu_cores": text})


def test_model_ids(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert model_id_of(str(folder), "") == "My-Model"
    assert model_id_of("org/name", "") == "org/name"
    assert model_id_of("org/name", "other") == "other"
