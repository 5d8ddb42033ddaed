"""Settings: precedence of the sources, errors which name option and source, and command lines made from the fields."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.scenarios import scenario
from launcher.cluster import file as cluster_file
from runtime.process.exits import INTERRUPTED_EXIT
from runtime.settings.command_line import add_command, invoke, new_app, parse
from runtime.settings.cores import parse_cores
from runtime.settings.options import SettingsError, aliases_of, load, option_name, to_arguments
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import EveryServeOption, ServeSettings
from runtime.settings.types import model_id_of
from runtime.settings.workers import WorkerSettings
from runtime.tenancy import file as tenants_file


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CROSSDOCK_")]:
        monkeypatch.delenv(name)


def test_option_sources_have_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags win over the environment, which wins over the file, which wins over defaults."""
    file = tmp_path / "crossdock.toml"
    file.write_text(
        '[gateway]\nmodel = "file"\nport = 1\nhost = "file"\nbody_bytes_max = 4096\n[worker]\nthreads = 3\n'
    )
    monkeypatch.setenv("CROSSDOCK_PORT", "2")
    monkeypatch.setenv("CROSSDOCK_HOST", "environment")
    settings = load(GatewaySettings, {"host": "flag"}, str(file))
    assert (settings.host, settings.port, settings.model, settings.body_bytes_max) == ("flag", 2, "file", 4096)
    assert settings.drain_timeout_s == 20.0
    monkeypatch.setenv("CROSSDOCK_CONFIG", str(file))
    assert load(WorkerSettings, {"role": "decode", "model": "x"}).threads == 3


CLUSTER = 'insecure = true\n[hosts.a]\naddress = "10.0.0.1"\ncoordinator = true\n'
SCENARIO = "duration_s = 9.0\n[[workers]]\nrole = 'prefill'\n[[traffic]]\n"


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda path: load(GatewaySettings, {}, str(path)), '[gateway]\nmodel = "x"\n'),
        (tenants_file.read_tables, "[tenants.default]\nweight = 2.0\n"),
        (lambda path: cluster_file.parse(path.read_text(encoding="utf-8"), path.parent), CLUSTER),
        (lambda path: cluster_file.travels(path.read_text(encoding="utf-8")), CLUSTER),
        (lambda path: scenario.parse(path.read_bytes()), SCENARIO),
    ],
    ids=["--config", "--tenants", "cluster.toml", "cluster launch", "scenario"],
)
def test_byte_order_mark_is_skipped(tmp_path: Path, read: Callable[[Path], object], text: str) -> None:
    """A TOML file that an editor saved with a byte-order mark is read like one without."""
    plain, marked = tmp_path / "plain.toml", tmp_path / "marked.toml"
    plain.write_text(text)
    marked.write_text(text, encoding="utf-8-sig")
    assert read(marked) == read(plain)


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
    """A bad value is refused in one line with its option, value and source."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load(GatewaySettings, {"model": "m", **flags})
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_every_error_has_its_own_line() -> None:
    """Several bad options give one line each."""
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
def test_unknown_file_keys_are_refused(tmp_path: Path, content: str, expected: str) -> None:
    """An unknown key in any section of the file is refused."""
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"^--config: ") as caught:
        load(GatewaySettings, {"model": "m"}, str(file))
    assert expected in str(caught.value)


def test_bad_file_value_names_the_file(tmp_path: Path) -> None:
    """A bad value in the file is refused with the section and the file's path."""
    file = tmp_path / "c.toml"
    file.write_text("[gateway]\nport = 8000.5\n")
    with pytest.raises(SettingsError) as caught:
        load(GatewaySettings, {"model": "m"}, str(file))
    assert str(caught.value) == f"--port: 8000.5 is not a whole number (from [gateway] in {file})"
    with pytest.raises(SettingsError, match="--config: cannot read"):
        load(GatewaySettings, {}, str(tmp_path / "absent.toml"))


def test_api_keys_are_split_at_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """API keys are split at commas in flags and the environment, and may be a list in the file."""
    assert load(GatewaySettings, {"model": "m", "api_keys": "a, b,"}).api_keys == ["a", "b"]
    monkeypatch.setenv("CROSSDOCK_API_KEYS", "c,d")
    assert load(GatewaySettings, {"model": "m"}).api_keys == ["c", "d"]
    monkeypatch.delenv("CROSSDOCK_API_KEYS")
    file = tmp_path / "c.toml"
    file.write_text('[gateway]\napi_keys = ["e", "f"]\n')
    assert load(GatewaySettings, {"model": "m"}, str(file)).api_keys == ["e", "f"]


def test_direct_instances_ignore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings constructed directly ignore the environment."""
    monkeypatch.setenv("CROSSDOCK_PORT", "1")
    assert GatewaySettings(model="m").port == 8000


def test_vllm_names_are_understood() -> None:
    """Options that users of vLLM type have vLLM's names, too, and processes get our own."""
    words = ["--role", "decode", "--model", "m", "--max-num-seqs", "7", "--max-model-len", "99"]
    settings = parse(WorkerSettings, words)
    assert (settings.max_seqs, settings.max_model_len) == (7, 99)
    assert vars(parse(EveryServeOption, words[4:]))["max_seqs"] == 7
    serve = vars(parse(EveryServeOption, ["--api-key", "k1,k2", "--served-model-name", "a"]))
    assert (serve["api_keys"], serve["served_model_name"]) == (["k1", "k2"], ["a"])
    assert "--max-seqs" in to_arguments(settings) and "--max-num-seqs" not in to_arguments(settings)


@pytest.mark.parametrize(
    ("option", "own"),
    [("--kv-cache-memory", "--kv-gib"), ("--quantization", "--vllm-args"), ("--max-seqs", "max_seqs in")],
)
def test_foreign_option_error_names_ours(option: str, own: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option of vLLM that means something else, or one of another command, is refused with the one to give."""
    app = new_app()
    add_command(app, "gateway", GatewaySettings, lambda settings: 0)
    assert invoke(app, [option, "1"], prog="crossdock gateway") == 2
    assert own in capsys.readouterr().err


def test_arguments_restore_the_settings() -> None:
    """Settings written as arguments parse back to the same settings."""
    worker = WorkerSettings(role="decode", model="m", kv_gib=0.5, cpu_cores="0-1", nice=-3)
    assert parse(WorkerSettings, to_arguments(worker)) == worker
    serve = ServeSettings(once=True, verbose=False, api_keys=["a", "b"])
    assert parse(ServeSettings, to_arguments(serve)) == serve
    assert to_arguments(CoordinatorSettings()) == []


@pytest.mark.parametrize("cls", [CoordinatorSettings, GatewaySettings, WorkerSettings, ServeSettings])
def test_help_lists_every_option(cls: type[CoordinatorSettings], capsys: pytest.CaptureFixture[str]) -> None:
    """Every option has a description and is shown in the help."""
    app = new_app()
    add_command(app, "role", cls, lambda settings: 0)
    assert invoke(app, ["--help"], "role") == 0
    shown = capsys.readouterr().out
    for name, field in cls.model_fields.items():
        assert field.description
        assert field.description.endswith((".", "?"))
        assert all(option in shown for option in (option_name(name, field), *aliases_of(field)))
    assert "--config" in shown


def test_usage_mistakes_exit_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake on the command line gives one line and status 2."""
    app = new_app()
    add_command(app, "gateway", GatewaySettings, lambda settings: 0)
    for arguments, expected in (
        (["--prot", "1"], "No such option: --prot"),
        (["--model", "m", "--port", "x"], "--port: x is not a whole number"),
        (["--port"], "--port"),
        (
            ["--stall-share", "1"],
            "crossdock worker; in cluster.toml, stall_share in [worker]; in the environment, CROSSDOCK_",
        ),
        (["--role", "decode"], "crossdock worker; crossdock serve and up choose it themselves."),
    ):
        assert invoke(app, arguments, "crossdock gateway") == 2
        said = capsys.readouterr().err
        assert said.startswith("crossdock gateway: ")
        assert expected in said
        assert said.count("\n") == 1


def test_command_result_is_the_exit_status() -> None:
    """The command's exit status is the value that its function returned."""
    app = new_app()
    add_command(app, "gateway", GatewaySettings, lambda settings: settings.port)
    assert invoke(app, ["--model", "m", "--port", "7"], "x") == 7


def test_ctrl_c_exits_without_traceback() -> None:
    """Ctrl-C gives the status for interruption and no traceback."""

    def interrupted(_settings: GatewaySettings) -> int:
        raise KeyboardInterrupt

    app = new_app()
    add_command(app, "gateway", GatewaySettings, interrupted)
    assert invoke(app, ["--model", "m"], "x") == INTERRUPTED_EXIT


@pytest.mark.parametrize(("text", "cores"), [("", ()), ("1", (1,)), ("0-2,5", (0, 1, 2, 5)), ("3,1", (1, 3))])
def test_core_lists_are_parsed(text: str, cores: tuple[int, ...]) -> None:
    """Lists of cores with ranges are parsed in rising order."""
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["a", "2-1", "1-", ",", "1 2", "-1"])
def test_bad_core_lists_are_refused(text: str) -> None:
    """A malformed --cpu-cores is refused."""
    with pytest.raises(SettingsError, match="--cpu-cores"):
        load(WorkerSettings, {"role": "decode", "model": "m", "cpu_cores": text})


def test_model_id_follows_path_or_option(tmp_path: Path) -> None:
    """The model id is the folder's or hub's name, unless one is given."""
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert model_id_of(str(folder), "") == "My-Model"
    assert model_id_of("org/name", "") == "org/name"
    assert model_id_of("org/name", "other") == "other"
