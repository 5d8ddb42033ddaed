"""What a cluster is made of, and the errors before anything is started."""

from pathlib import Path

import pytest

from launcher.local.core_plan import plan_cpu
from launcher.local.ports import free_port
from launcher.process import STREAMED_COPIES
from runtime.settings.command_line import parse
from runtime.settings.options import SettingsError, load
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import EveryServeOption, ServeSettings
from runtime.settings.workers import WorkerSettings
from tests.launcher.built import build


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})


def _options(arguments: tuple[str, ...]) -> list[str]:
    return list(arguments[arguments.index("-m") + 2 :])


def test_every_role_process_has_valid_options() -> None:
    """Each role becomes a process whose arguments parse back to its settings."""
    cluster = build(ServeSettings(prefill=2, decode=1, port=0, device="cpu", dtype="float32"))
    assert [spec.name for spec in cluster.processes] == [
        "coordinator",
        "gateway-0",
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    plan = plan_cpu((0, 1), prefill=2, decode=1, on_gpu=False)
    assert cluster.plan == plan
    gateway = parse(GatewaySettings, _options(cluster.processes[1].arguments))
    assert (gateway.coordinator, gateway.model_id) == (cluster.coordinator, "tiny")
    assert cluster.base_url == f"http://127.0.0.1:{gateway.port}"
    decode = parse(WorkerSettings, [*_options(cluster.processes[4].arguments), "--role", "decode"])
    assert (decode.name, decode.cores, decode.threads, decode.nice) == ("decode-0", (1,), 1, 0)
    assert (decode.device, decode.dtype) == ("cpu", "float32")
    assert cluster.processes[2].cores == plan.prefill[0].cores == (0,)


def shares_of(settings: ServeSettings) -> list[float]:
    workers = build(settings).processes[2:]
    return [parse(WorkerSettings, [*_options(spec.arguments), "--role", "decode"]).gpu_memory_share for spec in workers]


def test_workers_share_one_gpus_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on one GPU split its memory, unless the file or the environment sets the share."""
    on_gpu = ServeSettings(prefill=1, decode=2, port=0, device="cuda")
    assert shares_of(on_gpu) == [0.3] * 3
    assert shares_of(ServeSettings(port=0, device="cpu")) == [0.9] * 2
    (tmp_path / "crossdock.toml").write_text("[worker]\ngpu_memory_share = 0.2\n")
    monkeypatch.setenv("CROSSDOCK_CONFIG", str(tmp_path / "crossdock.toml"))
    assert shares_of(on_gpu) == [0.2] * 3
    monkeypatch.setenv("CROSSDOCK_GPU_MEMORY_SHARE", "0.25")
    assert shares_of(on_gpu) == [0.25] * 3


def test_every_process_has_a_watchdog() -> None:
    """Every process has a watchdog time, and the launcher has a metrics port of its own."""
    first = free_port("127.0.0.1")
    cluster = build(ServeSettings(port=0, device="cpu", metrics=f"127.0.0.1:{first}"))
    found = {spec.name: spec.watchdog_s for spec in cluster.processes}
    assert found == {"coordinator": 10.0, "gateway-0": 10.0, "prefill-0": 30.0, "decode-0": 30.0}
    assert cluster.metrics == f"127.0.0.1:{first + 4}"
    off = build(ServeSettings(port=0, device="cpu", metrics="off"))
    assert off.metrics == "off"


def test_each_gateway_has_its_own_port() -> None:
    """Several gateways get names and ports in turn; too many for the port range are refused."""
    cluster = build(ServeSettings(port=0, gateways=3))
    fronts = [parse(GatewaySettings, _options(spec.arguments)) for spec in cluster.processes[1:4]]
    assert [front.name for front in fronts] == ["gateway-0", "gateway-1", "gateway-2"]
    assert cluster.base_urls == tuple(f"http://127.0.0.1:{front.port}" for front in fronts)
    assert cluster.base_url == cluster.base_urls[0]
    with pytest.raises(SettingsError, match="--gateways"):
        build(ServeSettings(port=65_535, gateways=2))


def test_every_role_gets_the_key_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process is given the absolute path of the folder of keys."""
    monkeypatch.chdir(tmp_path)
    cluster = build(ServeSettings(port=0, keys="keys"))
    for spec in cluster.processes:
        options = _options(spec.arguments)
        assert options[options.index("--keys") + 1] == str(tmp_path / "keys"), spec.name


def test_api_keys_stay_off_command_lines() -> None:
    """API keys reach the gateway in its environment and are on no command line."""
    cluster = build(ServeSettings(port=0, api_keys=["sesame"]))
    assert not any("sesame" in text for spec in cluster.processes for text in spec.arguments)
    assert cluster.processes[1].environment["CROSSDOCK_API_KEYS"] == "sesame"


def test_only_kv_senders_bypass_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prefill workers get the setting for copies past the caches; a present GLIBC_TUNABLES is kept."""
    cluster = build(ServeSettings(port=0))
    streamed = [spec.name for spec in cluster.processes if STREAMED_COPIES.items() <= spec.environment.items()]
    assert streamed == ["prefill-0"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")  # somebody knows better
    for spec in build(ServeSettings(port=0)).processes:
        assert spec.environment["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


def test_wildcard_host_gives_a_loopback_url() -> None:
    """The base URL names loopback if the gateway is bound to all interfaces."""
    cluster = build(ServeSettings(host="0.0.0.0", port=0))
    assert cluster.base_url.startswith("http://127.0.0.1:")


def test_options_reach_the_processes() -> None:
    """Options of a process that `crossdock serve` is given reach every process that has them, and are checked first."""
    given = {"allowed_hosts": "a.example", "max_seqs": "3", "step_tokens": "100", "heartbeat_ms": "900", "kv_gib": "1"}
    cluster = build(load(EveryServeOption, given | {"port": "0", "access_log": False}))
    shown = {spec.name: " ".join(spec.arguments) for spec in cluster.processes}
    assert "--allowed-hosts a.example" in shown["gateway-0"] and "--no-access-log" in shown["gateway-0"]
    assert "--step-tokens 100" in shown["coordinator"] and "--max-seqs" not in shown["coordinator"]
    assert all("--max-seqs 3" in shown[name] and "--kv-gib 1" in shown[name] for name in ("prefill-0", "decode-0"))
    assert all("--heartbeat-ms 900" in one for one in shown.values())
    with pytest.raises(SettingsError, match="--served-model-name"):
        build(load(EveryServeOption, {"port": "0", "served_model_name": "tiny"}))


def test_launcher_has_a_key_beside_tokens(tmp_path: Path) -> None:
    """Where gateways take tokens, `crossdock serve` makes a key for its own question, even if the tenants file has none."""
    (tmp_path / "tenants.toml").write_text("[tenants.acme]")
    options = {"port": "0", "tenants": str(tmp_path / "tenants.toml")}
    assert not build(load(EveryServeOption, options)).key
    options |= {"jwt_issuer": "https://login", "jwt_audience": "crossdock", "jwt_jwks": "https://login/keys"}
    assert build(load(EveryServeOption, options)).key
    with pytest.raises(SettingsError, match="--jwt-issuer"):
        build(load(EveryServeOption, options | {"tenants": ""}))


def test_event_log_goes_to_the_coordinator(tmp_path: Path) -> None:
    """The coordinator gets the event log's path; a folder or a missing parent folder is refused."""
    cluster = build(ServeSettings(port=0, event_log=str(tmp_path / "event_log")))
    coordinator = parse(CoordinatorSettings, _options(cluster.processes[0].arguments))
    assert coordinator.event_log == str(tmp_path / "event_log")
    for wrong, why in ((str(tmp_path), "is a folder"), (str(tmp_path / "no" / "event_log"), "there is no folder")):
        with pytest.raises(SettingsError, match=f"--event-log: .*{why}"):
            build(ServeSettings(port=0, event_log=wrong))
