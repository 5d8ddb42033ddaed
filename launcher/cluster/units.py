"""systemd units for one host's part of a cluster. Pure: a plan in, the texts of files out.

The units are templates; what differs from one instance to the next (options, GPU, cores) is in `/etc/crossdock/ROLE-N.env` and,
for cores, in a drop-in. Secret keys reach a process as credentials: no other one can read them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from launcher.cluster.file import ClusterError
from launcher.cluster.plan import MODULES, SECRETS, HostPlan, PlannedProcess, watchdog_s_of
from launcher.process import role_environment
from runtime.process.exits import HOPELESS_EXITS
from runtime.settings.cores import cores_text
from runtime.settings.types import ENV_PREFIX

UNITS: Final = "etc/systemd/system"
OPTIONS: Final = "etc/crossdock"
STATE: Final = "/var/lib/crossdock"
TARGET: Final = "crossdock.target"
STOP_SLACK_S: Final = 15
_HIDDEN: Final = ("/home/", "/root/", "/run/user/")
_ABSENT: Final = ("/tmp/", "/var/tmp/")  # a unit has its own copies (PrivateTmp)
_WRITES: Final = ("usage_db", "event_log", "batch_db")
_READS: Final = ("model", "tenants", "profile", "jwt_jwks")
_DESCRIPTIONS: Final = {
    "coordinator": "crossdock coordinator",
    "coordinator-standby": "crossdock coordinator, the other of two that serve in turn",
    "gateway": "crossdock gateway %i (OpenAI HTTP API)",
    "prefill": "crossdock prefill worker %i",
    "decode": "crossdock decode worker %i",
    "mixed": "crossdock mixed worker %i",
    "autopilot": "crossdock autopilot (ratio of prefill and decode workers)",
}
_ALONE: Final = ("coordinator", "coordinator-standby")  # units of the two coordinators, by index; each has one process
_SINGLE: Final = (*_ALONE, "autopilot")
_SANDBOX: Final = """\
User=crossdock
DynamicUser=yes
UMask=0077
CacheDirectory=crossdock
Environment=HOME=%C/crossdock HF_HOME=%C/crossdock/huggingface
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=tmpfs
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
KeyringMode=private
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
LimitNOFILE=65536
"""
_NO_COMPUTING: Final = """\
PrivateDevices=yes
PrivateUsers=yes
MemoryDenyWriteExecute=yes
"""
_COMPUTING: Final = """\
# Not here: MemoryDenyWriteExecute (kernels are compiled for this machine as they are needed) and PrivateUsers (workers of one
# host hand KV over in shared memory only within one user namespace).
LimitMEMLOCK=infinity
"""
_ON_CPU: Final = "PrivateDevices=yes\n"
_ON_GPU: Final = """\
# All GPUs: with one alone allowed, CUDA would number it 0. CUDA_VISIBLE_DEVICES in the options picks it.
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
DeviceAllow=char-infiniband_verbs rw
"""


@dataclass(frozen=True)
class Installed:
    """The installation on this machine that the units refer to."""

    python: str
    prefixes: tuple[str, ...]  # folders of the interpreter and the packages
    root: str
    keys: str = ""
    key_files: tuple[str, ...] = ()


def render(plan: HostPlan, on: Installed) -> dict[str, str]:
    """Returns the content of each file by its path below the root. Raises `ClusterError`."""
    files: dict[str, str] = {}
    for kind in dict.fromkeys(_kind(process) for process in plan.processes):
        of_kind = [process for process in plan.processes if _kind(process) == kind]
        files[f"{UNITS}/{template(kind)}"] = _unit(kind, of_kind, on)
        for process in of_kind:
            files[f"{OPTIONS}/{_stem(process)}.env"] = _options(process)
            if process.cores:
                dropin = f"[Service]\nCPUAffinity={cores_text(process.cores)}\n"
                files[f"{UNITS}/{unit(process)}.d/cores.conf"] = dropin
    wants = " ".join(unit(process) for process in plan.processes)
    files[f"{UNITS}/{TARGET}"] = (
        f"[Unit]\nDescription=This host's part of a crossdock cluster\nWants={wants}\n"
        "\n[Install]\nWantedBy=multi-user.target\n"
    )
    return files


def template(kind: str) -> str:
    return f"crossdock-{kind}.service" if kind in _SINGLE else f"crossdock-{kind}@.service"


def unit(process: PlannedProcess) -> str:
    return template(_kind(process)).replace("@", f"@{process.index}")


def _kind(process: PlannedProcess) -> str:
    """Returns the kind of unit or template of a process: its role, or the second coordinator of `standby = true`."""
    return _ALONE[process.index] if process.role == "coordinator" else process.role


def is_ours(path: str) -> bool:
    """Whether an earlier call may have made this file. A new call removes such files if it does not make them again."""
    alone, many = "|".join(_SINGLE), "gateway|prefill|decode|mixed"
    return bool(
        re.fullmatch(rf"{UNITS}/crossdock-({alone}|({many})@\d*)\.service(\.d/cores\.conf)?", path)
        or re.fullmatch(rf"{OPTIONS}/({alone}|({many})-\d+)\.env", path)
    )


def _stem(process: PlannedProcess) -> str:
    kind = _kind(process)
    return kind if kind in _SINGLE else f"{kind}-{process.index}"


def _unit(kind: str, processes: Sequence[PlannedProcess], on: Installed) -> str:
    role = processes[0].role
    hopeless = " ".join(str(status) for status in sorted(HOPELESS_EXITS))
    options = kind if kind in _SINGLE else f"{kind}-%i"
    command = [
        _escaped(on.python),
        "-P",
        "-m",
        MODULES[role],
        *(["--keys", "${CREDENTIALS_DIRECTORY}"] if on.keys else []),
    ]
    lines = [
        "[Unit]",
        f"Description={_DESCRIPTIONS[kind]}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"PartOf={TARGET}",
        "# However often it fails, it is started again.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(command)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        f"EnvironmentFile=/{OPTIONS}/{options}.env",
        f"Environment=PYTHONPATH={_escaped(on.root)}",
        *(f"LoadCredential={name}:{_escaped(on.keys)}/{name}" for name in _credentials(role, on)),
        "# A model may take minutes to load; a worker is ready when the coordinator has taken it on.",
        "TimeoutStartSec=30min",
        f"TimeoutStopSec={_stop_s(processes)}",
        f"WatchdogSec={watchdog_s_of(role):.0f}",
        "Restart=on-failure",
        "RestartSec=2",
        "# Settings that cannot work are said in the log once; another start would not help.",
        f"RestartPreventExitStatus={hopeless}",
    ]
    text = "\n".join(lines) + "\n" + _SANDBOX
    if role in ("coordinator", "gateway", "autopilot"):
        text += _NO_COMPUTING
    else:
        on_gpu = any(process.environment.get("CUDA_VISIBLE_DEVICES") for process in processes)
        text += _COMPUTING + (_ON_GPU if on_gpu else _ON_CPU)
    if role == "coordinator" or any(getattr(process.settings, "batch_db", "") for process in processes):
        text += "StateDirectory=crossdock\n"
    text += "".join(f"BindReadOnlyPaths={_escaped(path)}\n" for path in _under_home(processes, on))
    return text + f"\n[Install]\nWantedBy={TARGET}\n"


def _stop_s(processes: Sequence[PlannedProcess]) -> int:
    """Returns the time in which streams may end or move on (--drain-timeout-s), and some seconds more."""
    return math.ceil(max(getattr(process.settings, "drain_timeout_s", 0.0) for process in processes)) + STOP_SLACK_S


def _credentials(role: str, on: Installed) -> list[str]:
    """Returns the names of the key files for a role: all public ones and the role's secret one. A mixed worker has the secret
    keys of both its roles."""
    if not on.keys:
        return []
    public = [name for name in on.key_files if name.endswith(".key")]
    owners = {"autopilot": ("client",), "mixed": ("prefill", "decode")}.get(role, (role,))
    return public + [_secret(owner, on) for owner in owners]


def _secret(role: str, on: Installed) -> str:
    own = [name for name in on.key_files if re.fullmatch(rf"{role}(-.+)?\.key_secret", name)]
    if not own:
        raise ClusterError(f"keys: {on.keys} has no {role}.key_secret")
    return f"{role}.key_secret" if f"{role}.key_secret" in own else own[0]


def _options(process: PlannedProcess) -> str:
    """Returns all options as environment variables, and those for the threads of the CPU."""
    settings = process.settings
    for key in _WRITES:
        path = getattr(settings, key, "")
        if path and not path.startswith(f"{STATE}/"):
            raise ClusterError(f"[{process.role}] {key}: a unit can write to {STATE} only, and not to {path}")
    for key in _READS:
        path = getattr(settings, key, "")
        if path.startswith("~"):
            raise ClusterError(f"[{process.role}] {key}: {path} means another folder in a unit; write it out")
    python = getattr(settings, "engine_python", "")
    if python and (not python.startswith("/") or python.startswith((*_HIDDEN, *_ABSENT))):
        raise ClusterError(
            f"[{process.role}] engine_python: a unit does not see {python}; install vLLM elsewhere, as in /opt/vllm"
        )
    chosen = {key: getattr(settings, key) for key in sorted(settings.model_fields_set) if key not in ("role", "keys")}
    values = {ENV_PREFIX + key.upper(): _text(value) for key, value in chosen.items() if key not in SECRETS}
    values |= {ENV_PREFIX + key.upper(): value for key, value in process.secrets().items()}
    values |= role_environment(process.threads, sends_kv=process.role in ("prefill", "mixed")) | dict(
        process.environment
    )
    return "".join(f"{key}={_quoted(value)}\n" for key, value in values.items())


def _under_home(processes: Sequence[PlannedProcess], on: Installed) -> list[str]:
    """Returns the folders that a unit must read and would not see otherwise. Raises `ClusterError` for a folder that a unit
    cannot see at all."""
    read: list[str] = [on.python, *on.prefixes, on.root]
    for process in processes:
        read += [str(getattr(process.settings, key, "")) for key in _READS]
    if absent := [path for path in read if path.startswith(_ABSENT)]:
        raise ClusterError(f"{absent[0]}: a unit has a /tmp of its own and does not see it; put it into another folder")
    return sorted({path for path in read if path.startswith(_HIDDEN)})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: str) -> str:
    """Quotes a value for EnvironmentFile=. Raises `ClusterError`."""
    if "\n" in value or not value.isprintable():
        raise ClusterError("an option with a line break or a control character cannot be given to a unit")
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'


def _escaped(path: str | PurePath) -> str:
    """Escapes a path for a unit file. Raises `ClusterError`."""
    if re.search(r"[\s\"'\\$]", str(path)):
        raise ClusterError(f"{path}: a path with such characters cannot stand in a unit; move or link it")
    return str(path).replace("%", "%%")


def changes(wanted: Mapping[str, str], there: Mapping[str, str]) -> list[tuple[str, str]]:
    """(what to do, path): `write`, `remove` or `keep`. `there`: the present files for which `is_ours` is true."""
    found = [("keep" if there.get(path) == text else "write", path) for path, text in wanted.items()]
    return found + [("remove", path) for path in sorted(set(there) - set(wanted))]
