"""A whole cluster on this machine: its processes, their options and their cores."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from launcher.local.core_plan import CoreAssignment, CpuPlan, plan_cpu
from launcher.local.ports import ReservedPorts, http_ports, metrics_addresses
from launcher.local.registry import default_db
from launcher.local.supervisor import ProcessSpec
from launcher.local.watchdog import WATCHDOG_S
from launcher.models.resolve import ReadyModel
from launcher.process import WORKER_MODULES, child_environment, python_command
from runtime.settings import machine
from runtime.settings.addresses import METRICS_OFF
from runtime.settings.autopilot import AutopilotSettings
from runtime.settings.cores import cores_text
from runtime.settings.environment import SUPERVISED
from runtime.settings.options import SettingsError, checked, load, to_arguments
from runtime.settings.roles import BATCHES_OFF, CoordinatorSettings, GatewaySettings
from runtime.settings.serve import ServeSettings, options_for
from runtime.settings.types import ENV_PREFIX
from runtime.settings.workers import WorkerSettings, gpu_share_of
from runtime.tenancy.file import read
from runtime.tenancy.tenants import TenantsError

_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class LocalAddresses:
    base_urls: tuple[str, ...]  # one for each gateway, for a client on this machine
    coordinator: str
    plan: CpuPlan
    processes: tuple[ProcessSpec, ...]
    key: str = field(default="", repr=False)  # for a client on this machine; empty where none is needed
    metrics: str = METRICS_OFF  # of the launcher itself, on how the processes fare
    notes: tuple[str, ...] = ()  # for the user, on the choice of cores and ports
    certificate: str = ""  # of the gateways, for a client on this machine; empty without TLS

    @property
    def base_url(self) -> str:
        return self.base_urls[0]


def sees_gpu(device: str) -> bool:
    """Whether workers will compute on a GPU. Imports torch only if a driver is there, and a torch build for it."""
    if device != "auto":
        return device == "cuda"
    return Path("/dev/nvidiactl").exists() and machine.gpu_memory_bytes() > 0


def build(settings: ServeSettings, model: ReadyModel, ports: ReservedPorts) -> LocalAddresses:
    """Plans the cluster. Raises `SettingsError`. Each role's own options may still come from the environment and the file.
    `ports` reserves the cluster's ports, and is closed after the cluster has stopped."""
    on_gpu = sees_gpu(settings.device)
    plan = plan_cpu(
        tuple(os.sched_getaffinity(0)),
        prefill=settings.prefill,
        decode=settings.decode,
        mixed=settings.mixed,
        on_gpu=on_gpu,
        threads=settings.threads,
    )
    http = http_ports(settings, ports)
    coordinator = f"tcp://127.0.0.1:{ports.draw('127.0.0.1')}"
    metrics = metrics_addresses(settings, ports)
    tenants = {"tenants": str(Path(settings.tenants).expanduser().resolve())} if settings.tenants else {}
    in_postgres = getattr(settings, "database", "")
    usage_db = settings.usage_db or (default_db() if settings.tenants and not in_postgres else "")
    event_log = {"usage_db": str(Path(usage_db).expanduser().resolve())} if usage_db else {}
    batch_db = settings.batch_db
    batches = {} if batch_db in BATCHES_OFF else {"batch_db": str(Path(batch_db).expanduser().resolve())}
    common = {"log_format": "json"} | ({"keys": keys_folder(settings)} if settings.keys else {})
    shared = common | {"coordinator": coordinator, "model": str(model.path), "model_id": model.model_id}
    gateway = options_for(settings, GatewaySettings) | shared | tenants
    key = _own_key(settings, tokens_taken=bool(load(GatewaySettings, gateway).jwt_issuer))
    fronts = [
        checked(
            GatewaySettings,
            gateway
            | {"name": f"gateway-{index}", "host": settings.host, "port": port, "metrics": metrics[1 + index]}
            | batches,
        )
        for index, port in enumerate(http)
    ]
    # API keys are passed in the environment, because ps shows flags.
    api_keys = {ENV_PREFIX + "API_KEYS": ",".join(settings.api_keys or [key])} if key else {}
    control = child_environment(1)
    own = {"name": "coordinator", "bind": coordinator, "metrics": metrics[0]}
    asked = options_for(settings, CoordinatorSettings)
    core = checked(CoordinatorSettings, asked | common | own | tenants | event_log | _decisions(settings))
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
    notes = [plan.note] if plan.note else []
    if settings.port not in (0, http[0]):
        notes.append(f"port {settings.port} is taken by another program; serving on {http[0]} (--port chooses one)")
    if fronts[0].tls_client_ca:
        raise SettingsError("--tls-client-ca: crossdock serve asks its gateway without a certificate; use crossdock up")
    urls, certificate = tuple(_base_url(one) for one in fronts), fronts[0].tls_certificate
    return LocalAddresses(urls, coordinator, plan, tuple(processes), key, metrics[-1], tuple(notes), certificate)


def _base_url(gateway: GatewaySettings) -> str:
    client_host = _EVERY_INTERFACE.get(gateway.host, gateway.host)
    shown_host = f"[{client_host}]" if ":" in client_host else client_host
    return f"{'https' if gateway.tls_certificate else 'http'}://{shown_host}:{gateway.port}"


def _gpu_share(settings: ServeSettings, shared: dict[str, str]) -> dict[str, str]:
    """Returns each worker's share of the GPU. All workers are on one GPU and share its memory equally, unless the environment
    or the file says otherwise. Raises `SettingsError`."""
    given = options_for(settings, WorkerSettings) | shared | {"role": "decode"}
    if "gpu_memory_share" in load(WorkerSettings, given).model_fields_set:
        return {}
    return {"gpu_memory_share": str(gpu_share_of(settings.prefill + settings.decode + settings.mixed))}


def _autopilot_spec(settings: ServeSettings, shared: dict[str, str]) -> ProcessSpec:
    asked = options_for(settings, AutopilotSettings)
    autopilot = checked(
        AutopilotSettings,
        asked
        | shared
        | {
            "name": "autopilot",
            "mode": settings.autopilot,
            "profile": str(Path(settings.profile).expanduser().absolute()),
            "slo_ttft_ms": settings.slo_ttft_ms,
            "slo_tpot_ms": settings.slo_tpot_ms,
        },
    )
    arguments = python_command("launcher.cli", "autopilot", *to_arguments(autopilot, fixed=set()))
    return ProcessSpec(
        "autopilot", arguments, child_environment(1) | {SUPERVISED: "1"}, watchdog_s=WATCHDOG_S["gateway"]
    )


def keys_folder(settings: ServeSettings) -> str:
    """Returns the absolute path, for processes and for commands in another terminal."""
    return str(Path(settings.keys).expanduser().resolve())


def _own_key(settings: ServeSettings, tokens_taken: bool) -> str:
    """The key with which the launcher sends requests of its own. The tenants file has no plain keys, so a key of the tenant
    `default` is made for this run. Raises `SettingsError` where the file cannot be used."""
    if settings.tenants:
        try:
            tenants = read(Path(settings.tenants).expanduser())
        except TenantsError as error:
            raise SettingsError("\n".join(f"--tenants: {line}" for line in str(error).splitlines())) from None
        if (tenants.keys or tokens_taken) and not settings.api_keys:
            return secrets.token_hex(32)
    return settings.api_keys[0] if settings.api_keys else ""


def _decisions(settings: ServeSettings) -> dict[str, str]:
    """Returns the option for the event log. Raises `SettingsError` if no file can be made there, because a coordinator that
    does not start reports less."""
    if not settings.event_log:
        return {}
    path = Path(settings.event_log).expanduser().absolute()
    if not path.parent.is_dir():
        raise SettingsError(f"--event-log: there is no folder {path.parent}")
    if path.is_dir():
        raise SettingsError(f"--event-log: {path} is a folder")
    return {"event_log": str(path)}


def worker_spec(
    role: str,
    index: int,
    seat: CoreAssignment,
    settings: ServeSettings,
    shared: dict[str, str],
    control: tuple[int, ...],
) -> ProcessSpec:
    """Returns the start of a worker. Only its computing thread runs on the seat's cores. Its event loop and KV transfers would
    hold up decode steps there, so they move to the control processes' cores once the model is loaded. Until then the worker
    may use both, so that its start is not limited to one core."""
    options = {
        "role": role,
        "name": f"{role}-{index}",
        "threads": seat.threads,
        "nice": seat.nice,
        "cpu_cores": cores_text(seat.cores),
    }
    # The [worker] section or the environment may still set options that the user left open here.
    open_keys = ("device", "dtype", "weights", "kv_gib")
    asked = {key: getattr(settings, key) for key in open_keys if key in settings.model_fields_set}
    worker = checked(WorkerSettings, options_for(settings, WorkerSettings) | options | asked | shared)
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
