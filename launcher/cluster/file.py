"""`cluster.toml`: hosts, what runs on each, and with which options. Pure: text in, a checked `ClusterFile` out.

    model = "/srv/models/llama"     # a folder on every host, or ORG/NAME; none: the embedded one
    keys = "keys"                   # made by `crossdock keys new keys`; a relative path is beside this file

    [hosts.alpha]
    address = "10.0.0.1"
    coordinator = true
    gateways = 1
    workers = "1P2D"                # one prefill worker, two decode workers; "2M" would be two that do both phases
    gpus = [0, 1, 2]                # one for each worker, prefill first, mixed last; [2, 3] in place of one: both

    [decode]                        # options of a role, everywhere; of one host in [hosts.NAME.decode]
    kv_gib = 40.0

`launcher.cluster.plan` works out the processes of each host.
"""

import ipaddress
import re
import tomllib
from collections import Counter
from pathlib import PurePath
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from launcher.load.tenants import Ratio
from proto.errors import CrossdockError
from runtime.settings.cores import parse_cores

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]*\z"
EVERYWHERE: Final = ("0.0.0.0", "::")
WORKERS_MAX: Final = 64
PATH_OPTIONS: Final = ("tenants", "usage_db", "event_log", "profile", "batch_db")
_HOST_NAME: Final = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\Z")
_WORKERS: Final = re.compile(r"^(?:(\d{1,2})P(\d{1,2})D)?(?:(?:^|\+)(\d{1,2})M)?\Z", re.IGNORECASE)
_GPU: Final = re.compile(r"^(\d{1,3}|(GPU|MIG)-[A-Za-z0-9/-]{1,80})\Z")


class ClusterError(CrossdockError):
    """A mistake in `cluster.toml`; `str()` has one line for each, naming table and key."""


def is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback if is_ip(address) else address == "localhost"


def _check_ip(value: str) -> str:
    if value and not is_ip(value):
        raise ValueError("is not an IP address")
    return value


def _check_address(value: str) -> str:
    if value in EVERYWHERE:
        raise ValueError("is every address; name the one that others connect to (bind says what is listened on)")
    if not is_ip(value) and not _HOST_NAME.match(value):
        raise ValueError("is neither an IP address nor the name of a host")
    return value


def _check_cores(value: str) -> str:
    parse_cores(value)
    return value


def _parse_ratio(value: Any) -> Ratio:
    found = _WORKERS.match(str(value))
    counts = [int(count or 0) for count in found.groups()] if found else []
    if not str(value) or found is None or max(counts) > WORKERS_MAX:
        raise ValueError(f"is not a ratio like 2P1D, 3M or 1P1D+1M, of at most {WORKERS_MAX} each")
    return Ratio(*counts)


def _parse_gpus(value: Any) -> str:
    """Returns the GPUs of one worker in the form of CUDA_VISIBLE_DEVICES."""
    each = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if wrong := [one for one in each or [""] if not _GPU.match(one)]:
        raise ValueError(f"has {wrong[0]!r}, which is not the number of a GPU, nor a name like GPU-… or MIG-…")
    return ",".join(each)


Gpus = Annotated[str, BeforeValidator(_parse_gpus)]
Name = Annotated[str, Field(pattern=NAME, max_length=32)]
Text = Annotated[str, Field(max_length=512)]
Port = Annotated[int, Field(ge=0, le=65_000)]
RoleOptions = dict[str, Any]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class FirstPorts(_Table):
    """The first port of each kind on a host; the second process has the next port, and so on. 0: any free one."""

    coordinator: Annotated[int, Field(ge=1, le=65_535)] = 7070
    http: Annotated[int, Field(ge=1, le=65_000)] = 8000
    tokens: Port = 7100
    kv: Port = 7200
    metrics: Port = 0  # of all processes in turn, on loopback


class Host(_Table):
    """One machine."""

    address: Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_check_address)]
    bind: Annotated[str, AfterValidator(_check_ip)] = ""  # to listen on, if others connect to a different one
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]*\z", max_length=64)] = ""
    ssh: Annotated[str, Field(pattern=r"^([^\s-]\S*)?\z", max_length=253)] = ""
    """Where `crossdock cluster launch` connects to, like user@host; empty: the address."""
    netns: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*\z", max_length=64)] = ""
    """A network namespace of the machine that `crossdock cluster launch` runs on, instead of ssh."""
    coordinator: bool = False
    model: Text = (
        ""  # another revision's folder or ORG/NAME, for workers with `revision`; empty: that of the whole file
    )
    gateways: Annotated[int, Field(ge=0, le=64)] = 0
    workers: Annotated[Ratio, BeforeValidator(_parse_ratio)] = Ratio(0, 0)
    gpus: list[Gpus] = []  # those of each worker, prefill first and mixed last; empty: CPU
    cores: Annotated[str, AfterValidator(_check_cores)] = ""  # for workers on the CPU; empty: nothing is pinned
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # of each worker; 0: as many as its cores, or 1
    gateway: RoleOptions = {}
    worker: RoleOptions = {}
    prefill: RoleOptions = {}
    decode: RoleOptions = {}
    mixed: RoleOptions = {}

    @property
    def listens_on(self) -> str:
        return self.bind or self.address

    @property
    def kv_address(self) -> str:
        """Returns the address at which KV arrives if no interface is named; empty: neither address is one of this host."""
        own = "127.0.0.1" if self.address == "localhost" else ""
        return next((one for one in (self.address, self.bind) if is_ip(one) and one not in EVERYWHERE), own)


class ClusterFile(_Table):
    """The whole file, its relative paths made absolute."""

    name: Name = "crossdock"  # distinguishes clusters that share hosts
    model: Text = ""
    model_id: Text = ""
    keys: Text = ""
    insecure: bool = False
    command: Text = "crossdock"  # how `crossdock cluster launch` calls it on a host
    ports: FirstPorts = FirstPorts()
    common: RoleOptions = {}
    coordinator: RoleOptions = {}
    gateway: RoleOptions = {}
    worker: RoleOptions = {}
    prefill: RoleOptions = {}
    decode: RoleOptions = {}
    mixed: RoleOptions = {}
    autopilot: RoleOptions = {}  # empty: there is none; else one runs beside the coordinator
    hosts: Annotated[dict[Name, Host], Field(min_length=1, max_length=1024)]

    @property
    def coordinator_hosts(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.coordinator]


def parse(text: str, folder: PurePath) -> ClusterFile:
    """Returns the checked content of a file in `folder`, where its relative paths begin. Raises `ClusterError`."""
    try:
        content = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"not TOML: {error}") from None
    try:
        file = ClusterFile.model_validate(_absolute(content, folder))
    except ValidationError as error:
        raise ClusterError("\n".join(_explain(one["loc"], one) for one in error.errors(include_url=False))) from None
    if problems := [*_coordinators(file), *_hosts(file), *_security(file)]:
        raise ClusterError("\n".join(problems))
    return file


def travels(text: str) -> list[str]:
    """Returns the relative paths in a text that `parse` accepts: `crossdock cluster launch` copies them with the file."""
    content = tomllib.loads(text.removeprefix("\ufeff"))
    found = [content.get("keys", "")]
    tables = [content.get(role, {}) for role in ("coordinator", "gateway")]
    tables += [host.get("gateway", {}) for host in content["hosts"].values()]
    found += [table.get("tenants", "") for table in tables]
    found.append(content.get("autopilot", {}).get("profile", ""))
    return sorted({path for path in found if path and _is_relative(path)})


def incomplete(file: ClusterFile) -> list[str]:
    """Returns the entries that are missing before the cluster can serve. A part of a cluster is not an error in itself."""
    hosts = file.hosts.values()
    found = {
        "gateways": sum(host.gateways for host in hosts),
        'prefill workers (workers = "1P…")': sum(host.workers.prefill + host.workers.mixed for host in hosts),
        'decode workers (workers = "…1D")': sum(host.workers.decode + host.workers.mixed for host in hosts),
    }
    return [f"hosts: there are no {what}" for what, count in found.items() if not count]


def _is_relative(path: str) -> bool:
    return not path.startswith(("/", "~"))


def _absolute(content: dict[str, Any], folder: PurePath) -> dict[str, Any]:
    """Makes relative paths absolute, from the file's folder. A model counts as a path only with a leading dot, since ORG/NAME
    looks like one."""

    def of(table: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        wanted = {key: table[key] for key in keys if isinstance(table.get(key), str) and table[key]}
        return table | {key: str(folder / value) for key, value in wanted.items() if _is_relative(value)}

    def of_roles(table: dict[str, Any]) -> dict[str, Any]:
        there = [role for role in ("coordinator", "gateway", "autopilot") if isinstance(table.get(role), dict)]
        return table | {role: of(table[role], PATH_OPTIONS) for role in there}

    def with_model(table: dict[str, Any]) -> dict[str, Any]:
        return of(table, ("model",)) if str(table.get("model", "")).startswith(("./", "../")) else table

    content = of_roles(with_model(of(content, ("keys",))))
    if isinstance(content.get("hosts"), dict):
        hosts = content["hosts"].items()
        content["hosts"] = {
            name: of_roles(with_model(host)) if isinstance(host, dict) else host for name, host in hosts
        }
    return content


def _explain(loc: tuple[int | str, ...], details: Any) -> str:
    """Puts one of pydantic's errors into a line: `[hosts.alpha] gpus: …`."""
    path = [str(part) for part in loc if part != "[key]"]
    message = details["msg"].removeprefix("Value error, ")
    value = details["input"]
    shown = f"{value!r} " if isinstance(value, str | int | float) else ""
    table, key = ".".join(path[:-1]), path[-1] if path else ""
    if path and path[-1].isdigit() and len(path) > 2:
        table, key = ".".join(path[:-2]), f"{path[-2]}[{path[-1]}]"
    where = f"[{table}] {key}" if table else key
    match details["type"]:
        case "extra_forbidden":
            return f"{where}: no such key"
        case "missing":
            return f"{where}: needed"
        case "value_error":
            return f"{where}: {message if message.startswith('has ') else shown + message}"
        case _:
            return f"{where}: {shown}{message[0].lower()}{message[1:]}"


def _coordinators(file: ClusterFile) -> list[str]:
    names = [name for name, host in file.hosts.items() if host.coordinator]
    if len(names) == 1 or (names and file.coordinator.get("database")):
        return []
    if not names:
        return ["hosts: none has coordinator = true; one must"]
    return [
        f"[hosts.{name}] coordinator: there is one already, on {names[0]}; several need database in [coordinator]"
        for name in names[1:]
    ]


def _hosts(file: ClusterFile) -> list[str]:
    found = []
    apart = not all(is_loopback(host.address) for host in file.hosts.values())
    for name, host in file.hosts.items():
        workers = host.workers.total
        if host.model and not file.model_id:
            found.append(f"[hosts.{name}] model: needs model_id at the top, the name of all revisions for clients")
        if host.gpus and len(host.gpus) != workers:
            found.append(
                f"[hosts.{name}] gpus: {len(host.gpus)} for {workers} workers; name one for each, or a list like [0, 1] for one"
                " that has several, and one that is shared more than once"
            )
        claims = Counter(gpu for own in host.gpus for gpu in own.split(","))
        claimed = [gpu for own in host.gpus if "," in own for gpu in own.split(",") if claims[gpu] > 1]
        if claimed:
            found.append(f"[hosts.{name}] gpus: {claimed[0]} is named twice; a worker with several GPUs shares none")
        if host.gpus and host.cores:
            found.append(f"[hosts.{name}] cores: only for workers on the CPU, and these are on gpus")
        if not is_ip(host.listens_on):
            found.append(f"[hosts.{name}] bind: needed, since {host.address} is a name: the IP address to listen on")
        if workers and not host.interface and not host.kv_address:
            found.append(
                f"[hosts.{name}] interface: needed, since {host.address} is a name and {host.bind} is every address: the one"
                " that KV arrives on, like eth0"
            )
        if is_loopback(host.address) and apart:
            found.append(f"[hosts.{name}] address: {host.address} cannot be reached from the other hosts")
        if is_loopback(host.bind or "") and not is_loopback(host.address):
            found.append(f"[hosts.{name}] bind: {host.bind} is not reached through {host.address}")
    return found


def _security(file: ClusterFile) -> list[str]:
    if file.keys and file.insecure:
        return ["insecure: says nothing beside keys; take one of the two out"]
    open_to = next((name for name, host in file.hosts.items() if not is_loopback(host.listens_on)), "")
    if open_to and not file.keys and not file.insecure:
        return [
            f"keys: needed, since [hosts.{open_to}] listens on {file.hosts[open_to].listens_on}, where others can connect."
            " Make some with: crossdock keys new DIR (or say insecure = true, on a network where you trust everyone)"
        ]
    return []
