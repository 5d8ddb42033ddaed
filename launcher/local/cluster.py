"""A whole cluster on this machine: which processes, with which options, on which cores."""

import errno
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from launcher.local.core_plan import CpuPlan, Seat, plan_cpu
from launcher.local.registry import default_db
from launcher.local.supervisor import ProcessSpec
from launcher.local.watchdog import WATCHDOG_S
from launcher.models.resolve import ReadyModel
from launcher.process import WORKER_MODULES, child_environment, python_command
from runtime.settings import machine
from runtime.settings.addresses import METRICS_OFF, split_metrics
from runtime.settings.autopilot import AutopilotSettings
from runtime.settings.cores import cores_text
from runtime.settings.environment import SUPERVISED
from runtime.settings.options import SettingsError, load, to_arguments
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings
from runtime.settings.types import ENV_PREFIX
from runtime.settings.workers import WorkerSettings, gpu_share_of
from runtime.tenancy.file import read as read_tenants
from runtime.tenancy.tenants import TenantsError

_PORT_MIN = 20_000
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Cluster:
    base_urls: tuple[str, ...]
    """One for each gateway, for a client on this machine."""
    coordinator: str
    plan: CpuPlan
    processes: tuple[ProcessSpec, ...]
    key: str = field(default="", repr=False)
    """For a client on this machine; empty where none is needed."""
    metrics: str = METRICS_OFF
    """Where the launcher itself shows metrics, of how the processes fare."""

    @property
    def base_url(self) -> str:
        return self.base_urls[0]


def sees_gpu(device: str) -> bool:
    """Whether workers will compute on a GPU. torch is imported only where a driver and a build for it are there."""
    if device != "auto":
        return device == "cuda"
    return Path("/dev/nvidiactl").exists() and machine.gpu_memory_bytes() > 0


def free_port(host: str) -> int:
    """A port that was free a moment ago: the coordinator's address must be known to all before any of them starts. It is
    drawn below those that the kernel hands out, so that no other program gets it by chance in between. Raises `OSError`."""
    first_given_out = int(_GIVEN_OUT.read_text().split()[0]) if _GIVEN_OUT.exists() else 0
    tries = (
        [secrets.choice(range(_PORT_MIN, first_given_out)) for _ in range(20)] if first_given_out > _PORT_MIN else []
    )
    for wanted in (*tries, 0):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, wanted))
            except OSError as error:
                if wanted == 0 or error.errno != errno.EADDRINUSE:
                    raise
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("0 is never in use")


def http_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `SettingsError` where it cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port == 0:
            return free_port(host)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except socket.gaierror:
        raise SettingsError(f"--host: {host} is not an address of this machine") from None
    except PermissionError:
        raise SettingsError(f"--port: {port} is for programs with more rights; take one over 1023") from None
    except OSError as error:
        if error.errno == 98:
            raise SettingsError(f"--port: {port} on {host} is taken by another program; choose another, or 0") from None
        raise SettingsError(f"--host: cannot listen on {host}: {error.strerror}") from None
    return port


def http_ports(host: str, port: int, count: int) -> tuple[int, ...]:
    """So many from `port` on, or free ones for 0. Raises `SettingsError` where one cannot be listened on."""
    if port + count > 65_536:
        raise SettingsError(f"--gateways: there are no {count} ports from {port} on")
    return tuple(http_port(host, port + index if port else 0) for index in range(count))


def build(settings: ServeSettings, model: ReadyModel) -> Cluster:
    """Raises `SettingsError`. Every role's own options may still come from the environment and the file."""
    on_gpu = sees_gpu(settings.device)
    plan = plan_cpu(
        tuple(os.sched_getaffinity(0)),
        prefill=settings.prefill,
        decode=settings.decode,
        mixed=settings.mixed,
        on_gpu=on_gpu,
        threads=settings.threads,
    )
    ports = http_ports(settings.host, settings.port, settings.gateways)
    coordinator = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    key = _own_key(settings)
    metrics = _metrics_addresses(settings)
    tenants = {"tenants": str(Path(settings.tenants).expanduser().resolve())} if settings.tenants else {}
    usage_db = settings.usage_db or (default_db() if settings.tenants else "")
    event_log = {"usage_db": str(Path(usage_db).expanduser().resolve())} if usage_db else {}
    common = {"log_format": "json"} | ({"keys": keys_folder(settings)} if settings.keys else {})
    shared = common | {"coordinator": coordinator, "model": str(model.path), "model_id": model.model_id}
    fronts = [
        GatewaySettings.model_validate(
            shared
            | {"name": f"gateway-{index}", "host": settings.host, "port": port, "metrics": metrics[1 + index]}
            | tenants
        )
        for index, port in enumerate(ports)
    ]
    # API keys go by the environment: flags can be seen in ps.
    api_keys = {ENV_PREFIX + "API_KEYS": ",".join(settings.api_keys or [key])} if key else {}
    control = child_environment(1)
    own = {"name": "coordinator", "bind": coordinator, "metrics": metrics[0]}
    core = CoordinatorSettings.model_validate(common | own | tenants | event_log | _decisions(settings))
    processes = [
        _spec("coordinator", "coordinator", core, control, plan.control),
        *(_spec("gateway", "gateway", front, control | api_keys, plan.control) for front in fronts),
    ]
    of_workers = shared | (_gpu_share(settings, shared) if on_gpu else {})
    for role, seats in (("prefill", plan.prefill), ("decode", plan.decode), ("mixed", plan.mixed)):
        for index, seat in enumerate(seats):
            observed = {"metrics": metrics[len(processes)]}
            processes.append(worker_spec(role, index, seat, settings, of_workers | observed, plan.control))
    if settings.autopilot != "off":
        processes.append(_autopilot_spec(settings, common | {"coordinator": coordinator, "model_id": model.model_id}))
    client_host = _EVERY_INTERFACE.get(settings.host, settings.host)
    shown_host = f"[{client_host}]" if ":" in client_host else client_host
    urls = tuple(f"http://{shown_host}:{port}" for port in ports)
    return Cluster(urls, coordinator, plan, tuple(processes), key, metrics[-1])


def _gpu_share(settings: ServeSettings, shared: dict[str, str]) -> dict[str, str]:
    """All workers are on one GPU, and share its memory unless the environment or the file says how. Raises `SettingsError`."""
    if "gpu_memory_share" in load(WorkerSettings, shared | {"role": "decode"}).model_fields_set:
        return {}
    return {"gpu_memory_share": str(gpu_share_of(settings.prefill + settings.decode + settings.mixed))}


def _autopilot_spec(settings: ServeSettings, shared: dict[str, str]) -> ProcessSpec:
    autopilot = AutopilotSettings.model_validate(
        shared
        | {
            "name": "autopilot",
            "mode": settings.autopilot,
            "profile": str(Path(settings.profile).expanduser().absolute()),
            "slo_ttft_ms": settings.slo_ttft_ms,
            "slo_tpot_ms": settings.slo_tpot_ms,
        }
    )
    arguments = python_command("launcher.cli", "autopilot", *to_arguments(autopilot, fixed=set()))
    return ProcessSpec(
        "autopilot", arguments, child_environment(1) | {SUPERVISED: "1"}, watchdog_s=WATCHDOG_S["gateway"]
    )


def keys_folder(settings: ServeSettings) -> str:
    """In full, for processes and for who asks in another terminal."""
    return str(Path(settings.keys).expanduser().resolve())


def _own_key(settings: ServeSettings) -> str:
    """What the launcher's own requests are sent with. The tenants file has no key in plain, so one is made for this run, of the
    tenant `default`. Raises `SettingsError` where the file cannot be used."""
    if settings.tenants:
        try:
            tenants = read_tenants(Path(settings.tenants).expanduser())
        except TenantsError as error:
            raise SettingsError("\n".join(f"--tenants: {line}" for line in str(error).splitlines())) from None
        if tenants.keys and not settings.api_keys:
            return secrets.token_hex(32)
    return settings.api_keys[0] if settings.api_keys else ""


def _metrics_addresses(settings: ServeSettings) -> list[str]:
    """For each process, in the order in which they start, and last the launcher's own; one that starts again has the same.
    Raises `SettingsError`."""
    processes = 1 + settings.gateways + settings.prefill + settings.decode + settings.mixed + 1
    if settings.metrics == METRICS_OFF:
        return [METRICS_OFF] * processes
    host, first = split_metrics(settings.metrics)
    if first and first + processes - 1 > 65_535:
        raise SettingsError(
            f"--metrics: {processes} processes need as many ports from {first} on, and the last one is 65535"
        )
    shown = f"[{host}]" if ":" in host else host
    try:
        ports = list(range(first, first + processes)) if first else [free_port(host) for _ in range(processes)]
    except OSError as error:
        raise SettingsError(f"--metrics: cannot listen on {host}: {error.strerror}") from None
    return [f"{shown}:{port}" for port in ports]


def _decisions(settings: ServeSettings) -> dict[str, str]:
    """Raises `SettingsError` where no file can be made there: a coordinator that does not start says less."""
    if not settings.event_log:
        return {}
    path = Path(settings.event_log).expanduser().absolute()
    if not path.parent.is_dir():
        raise SettingsError(f"--event-log: there is no folder {path.parent}")
    if path.is_dir():
        raise SettingsError(f"--event-log: {path} is a folder")
    return {"event_log": str(path)}


def worker_spec(
    role: str, index: int, seat: Seat, settings: ServeSettings, shared: dict[str, str], control: tuple[int, ...]
) -> ProcessSpec:
    """Only the thread that computes sits on the seat's cores; the event loop and the KV transfers of a decode worker would
    hold up its steps there, so they move to where the control processes run once the model is loaded; until then the worker may
    use both, so that a start is not one core's work."""
    options = {
        "role": role,
        "name": f"{role}-{index}",
        "threads": seat.threads,
        "nice": seat.nice,
        "cpu_cores": cores_text(seat.cores),
    }
    # What the user left open here, the [worker] section or the environment may still say.
    open_keys = ("device", "dtype", "weights", "kv_gib")
    asked = {key: getattr(settings, key) for key in open_keys if key in settings.model_fields_set}
    worker = WorkerSettings.model_validate(options | asked | shared)
    return _spec(
        role,
        WORKER_MODULES[role],
        worker,
        child_environment(seat.threads, sends_kv=role != "decode"),
        tuple(sorted({*control, *seat.cores})) if control else (),
        name=worker.name,
    )


def _spec(
    role: str,
    module: str,
    settings: CoordinatorSettings | GatewaySettings | WorkerSettings,
    environment: dict[str, str],
    cores: tuple[int, ...],
    name: str = "",
) -> ProcessSpec:
    # The module knows its role.
    arguments = python_command(module, *to_arguments(settings, fixed={"role"}))
    environment = environment | {SUPERVISED: "1"}
    return ProcessSpec(name or settings.name, arguments, environment, cores, watchdog_s=WATCHDOG_S[role])
