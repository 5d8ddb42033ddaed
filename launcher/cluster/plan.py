"""The plan of one host of a `cluster.toml`: every process, with its options, environment and cores. Pure."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from pydantic import ValidationError

from launcher.cluster.file import EVERYWHERE, ClusterError, ClusterFile, Host, is_ip, is_loopback
from launcher.local.core_plan import CoreAssignment, CpuPlan, plan_cpu
from launcher.local.watchdog import WATCHDOG_S
from launcher.process import WORKER_MODULES
from runtime.settings.addresses import METRICS_OFF
from runtime.settings.autopilot import AutopilotSettings
from runtime.settings.cores import cores_text, parse_cores
from runtime.settings.options import to_arguments, what_is_wrong
from runtime.settings.roles import CoordinatorSettings, GatewaySettings
from runtime.settings.types import Options
from runtime.settings.workers import WorkerSettings, gpu_share_of

ROLES: Final = ("coordinator", "gateway", *WORKER_MODULES, "autopilot")
SETTINGS: Final[dict[str, type[Options]]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    **dict.fromkeys(WORKER_MODULES, WorkerSettings),
    "autopilot": AutopilotSettings,
}
MODULES: Final = {
    "coordinator": "coordinator",
    "gateway": "gateway",
    **WORKER_MODULES,
    "autopilot": "lab.commands.autopilot",
}
_DECIDED: Final = frozenset(
    "name bind coordinator model model_id port tokens_bind kv_bind transfer_host advertise role keys insecure".split()
)
"""Options that follow from the rest of the file."""
SECRETS: Final = frozenset({"api_keys"})  # passed in the environment, since all users of a host see flags
_PORT_MAX: Final = 65_535
_RANKS: Final = re.compile(r"(?:--tensor[-_]parallel[-_]size|-tp)[ =]+(\d+)")


@dataclass(frozen=True)
class PlannedProcess:
    """One process of a host."""

    role: str
    index: int  # among those of its role on its host
    settings: Options
    environment: Mapping[str, str] = field(default_factory=dict)  # pins it to a GPU
    cores: tuple[int, ...] = ()  # to start on; empty: any
    threads: int = 1

    @property
    def name(self) -> str:
        return str(getattr(self.settings, "name"))  # noqa: B009 (of every role, but not of `Options`)

    @property
    def module(self) -> str:
        return MODULES[self.role]

    def arguments(self) -> list[str]:
        """The process's flags, without secrets."""
        return to_arguments(self.settings, fixed={"role", *SECRETS})

    def secrets(self) -> dict[str, str]:
        """Options for its environment."""
        wanted = SECRETS & self.settings.model_fields_set
        return {key: ",".join(getattr(self.settings, key)) for key in sorted(wanted) if getattr(self.settings, key)}


@dataclass(frozen=True)
class HostPlan:
    processes: tuple[PlannedProcess, ...]
    base_urls: tuple[str, ...]
    note: str = ""
    metrics: str = METRICS_OFF  # address for metrics of `crossdock up` itself


def watchdog_s_of(role: str) -> float:
    """Returns the watchdog's time for a role. An autopilot that hangs is as urgent as a gateway."""
    return WATCHDOG_S["gateway" if role == "autopilot" else role]


def coordinator_address(file: ClusterFile) -> str:
    """The address of the coordinator, or those of all, separated by commas."""
    return ",".join(_tcp(host.address, file.ports.coordinator) for host in file.coordinator_hosts)


def base_urls(file: ClusterFile) -> list[str]:
    """The base URLs of all gateways."""
    return [url for name in file.hosts for url in plan_host(file, name, "any").base_urls]


def check(file: ClusterFile) -> dict[str, HostPlan]:
    """Returns the plan of every host. Raises `ClusterError` where a host's options are wrong or two processes use the same
    port."""
    plans: dict[str, HostPlan] = {}
    problems: list[str] = []
    for name, host in file.hosts.items():
        try:
            plans[name] = plan_host(file, name, host.model or file.model or "the embedded model")
        except ClusterError as error:
            problems += str(error).splitlines()
    problems = list(dict.fromkeys(problems)) or _collisions(file, plans)
    if problems:
        raise ClusterError("\n".join(problems))
    return plans


def plan_host(file: ClusterFile, name: str, model: str, model_id: str = "") -> HostPlan:
    """`model` is the folder, or ORG/NAME, that its roles get. Raises `ClusterError`."""
    host = file.hosts[name]
    shared = {"coordinator": coordinator_address(file), "model": model} | _security(file)
    if model_id or file.model_id:
        shared["model_id"] = model_id or file.model_id
    cpu = _cpu_plan(host)
    found: list[PlannedProcess] = []
    if host.coordinator:
        found += _coordinators(file, name, cpu.control)
    for index in range(host.gateways):
        decided = shared | {"name": f"{name}.gateway-{index}", "port": file.ports.http + index}
        decided |= _bound(host, "tokens_bind", file.ports.tokens, index)
        settings = _settings(file, name, "gateway", decided, {"host": host.listens_on})
        found.append(PlannedProcess("gateway", index, settings, cores=cpu.control))
    gpus = iter(host.gpus)
    kv_ports = count()
    for role, seats in (("prefill", cpu.prefill), ("decode", cpu.decode), ("mixed", cpu.mixed)):
        for index, seat in enumerate(seats):
            decided = shared | {"name": f"{name}.{role}-{index}", "role": role} | _data_plane(host)
            if role != "prefill":
                decided |= _bound(host, "kv_bind", file.ports.kv, next(kv_ports))
            found.append(_worker(file, name, role, index, seat, cpu.control, decided, next(gpus, "")))
    if host is file.coordinator_hosts[0] and file.autopilot:
        decided = {key: value for key, value in shared.items() if key != "model"} | {"name": "autopilot"}
        found.append(PlannedProcess("autopilot", 0, _settings(file, name, "autopilot", decided), cores=cpu.control))
    # Hosts that share a machine each have their own address on its loopback.
    where = host.listens_on if is_loopback(host.listens_on) and is_ip(host.listens_on) else "127.0.0.1"
    if file.ports.metrics:
        found = [
            _with_metrics(process, f"{_shown(where)}:{file.ports.metrics + index}")
            for index, process in enumerate(found)
        ]
    metrics = METRICS_OFF if file.common.get("metrics") == METRICS_OFF else _own_metrics(file, where, len(found))
    return HostPlan(tuple(found), tuple(_url(host, one) for one in found if one.role == "gateway"), cpu.note, metrics)


def _own_metrics(file: ClusterFile, where: str, processes: int) -> str:
    """Returns the metrics address of `crossdock up` itself: the port after those of its processes."""
    port = file.ports.metrics + processes if file.ports.metrics else 0
    return f"{_shown(where)}:{port if port <= _PORT_MAX else 0}"


def _coordinators(file: ClusterFile, host: str, cores: tuple[int, ...]) -> list[PlannedProcess]:
    """Plans one coordinator, or two that listen at the same address one after the other."""
    decided = {"bind": _tcp(file.hosts[host].listens_on, file.ports.coordinator)} | _security(file)
    first = _settings(file, host, "coordinator", decided | {"name": "coordinator"})
    found = [PlannedProcess("coordinator", 0, first, cores=cores)]
    if isinstance(first, CoordinatorSettings) and first.standby:
        found.append(replace(found[0], index=1, settings=first.model_copy(update={"name": "coordinator-1"})))
    return found


def _with_metrics(process: PlannedProcess, address: str) -> PlannedProcess:
    """Sets the metrics address, unless the role's table names another one."""
    if "metrics" in process.settings.model_fields_set:
        return process
    return replace(process, settings=process.settings.model_copy(update={"metrics": address}))


def _worker(
    file: ClusterFile, host: str, role: str, index: int, seat: CoreAssignment, control: tuple[int, ...],
    decided: dict[str, Any], gpu: str,
) -> PlannedProcess:  # fmt: skip
    defaults: dict[str, Any] = {"threads": seat.threads, "device": "cuda" if gpu else "cpu"}
    if gpu:
        defaults["gpu_memory_share"] = gpu_share_of(file.hosts[host].gpus.count(gpu))
    if seat.nice:
        defaults["nice"] = seat.nice
    if seat.cores:
        defaults["cpu_cores"] = cores_text(seat.cores)
    settings = _settings(file, host, role, decided, defaults)
    pinned = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    assert isinstance(settings, WorkerSettings)
    asked = _RANKS.findall(settings.vllm_args) if settings.engine == "vllm" else []
    has, uses = gpu.count(",") + 1, int(asked[-1]) if asked else 1
    if gpu and has != uses:
        raise ClusterError(
            f'[hosts.{host}] gpus: {role}-{index} has {has} and uses {uses}; with engine = "vllm",'
            " --tensor-parallel-size in vllm_args says how many"
        )
    cores = tuple(sorted({*control, *seat.cores})) if seat.cores else ()
    return PlannedProcess(role, index, settings, pinned, cores, settings.threads)


def _cpu_plan(host: Host) -> CpuPlan:
    workers = host.workers
    if host.cores and workers.total:
        return plan_cpu(
            parse_cores(host.cores), prefill=workers.prefill, decode=workers.decode, mixed=workers.mixed, on_gpu=False,
            threads=host.threads,
        )  # fmt: skip
    seat = CoreAssignment((), host.threads or 1, 0)
    return CpuPlan((), (seat,) * workers.prefill, (seat,) * workers.decode, (seat,) * workers.mixed)


def _settings(
    file: ClusterFile, host: str, role: str, decided: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Options:
    """Merges the settings of a process. Each source overrides those before it: what follows from the host, the tables of the
    file, the host's own tables. Options that are decided may not be in any table."""
    cls = SETTINGS[role]
    tables = [("common", file.common)]
    if role in WORKER_MODULES:
        tables += [("worker", file.worker), (role, getattr(file, role))]
        tables += [(f"hosts.{host}.{key}", getattr(file.hosts[host], key)) for key in ("worker", role)]
    else:
        tables.append((role, getattr(file, role)))
        if role == "gateway":
            tables.append((f"hosts.{host}.gateway", file.hosts[host].gateway))
    a_role = f"an {role}" if role == "autopilot" else f"a {role}"
    merged, sources, problems = dict(defaults or {}), dict.fromkeys(defaults or {}, f"hosts.{host}"), list[str]()
    for table, values in tables:
        for key, value in values.items():
            if key in _DECIDED:
                problems.append(f"[{table}] {key}: follows from hosts, ports and the keys at the top; take it out")
            elif key not in cls.model_fields:
                problems.append(f"[{table}] {key}: no such option of {a_role}; see crossdock {_command(role)} --help")
            else:
                merged[key], sources[key] = value, table
    if problems:
        raise ClusterError("\n".join(problems))
    try:
        return cls(**{**merged, **decided})
    except ValidationError as error:
        table = role if role == "autopilot" else f"hosts.{host}"
        raise ClusterError(
            "\n".join(_explain(details, sources, table) for details in error.errors(include_url=False))
        ) from None


def as_keys(text: str) -> str:
    """Returns an error text with keys of cluster.toml in place of options."""
    return re.sub(r"--(?:no-)?([a-z][a-z0-9-]*)", lambda found: found[1].replace("-", "_"), text)


def _explain(details: Any, sources: Mapping[str, str], other: str) -> str:
    """Returns one line about an error; `other` is the table of a key that is not in `sources`."""
    message = as_keys(details["msg"].removeprefix("Value error, "))
    if not details["loc"]:
        return f"[{other}] {message}"
    key = str(details["loc"][0])
    return f"[{sources.get(key, other)}] {key}: {what_is_wrong(details, message)}"


def _command(role: str) -> str:
    return role if role in ("coordinator", "gateway", "autopilot") else "worker"


def _security(file: ClusterFile) -> dict[str, Any]:
    if file.keys:
        return {"keys": file.keys}
    return {"insecure": True} if file.insecure else {}


def _bound(host: Host, option: str, first_port: int, index: int) -> dict[str, str]:
    bound = {option: _tcp(host.listens_on, first_port + index if first_port else 0)}
    return bound | ({"advertise": _shown(host.address)} if host.bind else {})


def _data_plane(host: Host) -> dict[str, str]:
    """Returns the option for the address or interface at which KV arrives."""
    return {"transfer_host": host.interface or host.kv_address}


def _collisions(file: ClusterFile, plans: Mapping[str, HostPlan]) -> list[str]:
    seen: dict[tuple[str, int], str] = {}
    found = []
    for host_name, plan in plans.items():
        host = file.hosts[host_name]
        if host.netns:
            continue  # a network namespace has ports of its own
        for process in plan.processes:
            for what, port in _listens(process.settings):
                # Coordinators listen in turn.
                name = process.role if process.role == "coordinator" else process.name
                where = f"{name} on {host_name} ({what})"
                first = seen.setdefault((host.address, port), where)
                if first != where:
                    found.append(f"[ports]: {first} and {where} both listen on {host.address} port {port}")
    return found


def _listens(settings: Options) -> list[tuple[str, int]]:
    """Returns option and port of each known port that the process listens on."""
    options = {
        key: getattr(settings, key) for key in ("bind", "tokens_bind", "kv_bind") if key in settings.model_fields_set
    }
    found: list[tuple[str, int]] = [(key, int(value.rpartition(":")[2])) for key, value in options.items()]
    if isinstance(settings, GatewaySettings):
        found.append(("port", settings.port))
    return [(what, port) for what, port in found if port]


def _url(host: Host, gateway: PlannedProcess) -> str:
    assert isinstance(gateway.settings, GatewaySettings)
    listens_on = gateway.settings.host
    reached = host.address if listens_on in EVERYWHERE or listens_on == host.bind else listens_on
    scheme = "https" if gateway.settings.tls_certificate else "http"
    return f"{scheme}://{_shown(reached)}:{gateway.settings.port}"


def _tcp(address: str, port: int) -> str:
    return f"tcp://{_shown(address)}:{port}"


def _shown(address: str) -> str:
    return f"[{address}]" if is_ip(address) and ipaddress.ip_address(address).version == 6 else address
