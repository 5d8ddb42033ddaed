"""`crossdock cluster check`: shows the processes and options that a `cluster.toml` leads to, host by host. It finds out whether
hosts have the GPUs that the file names."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from launcher import tables
from launcher.cluster.file import ClusterError, ClusterFile, incomplete, travels
from launcher.cluster.hosts import HostSite
from launcher.cluster.plan import PlannedProcess, check
from launcher.cluster.settings import ClusterCheckSettings
from launcher.cluster.up import read_file
from runtime.settings.cores import cores_text
from runtime.settings.options import SettingsError
from runtime.settings.types import ENV_PREFIX

_LIST_S = 30.0


def run(settings: ClusterCheckSettings) -> int:
    """Raises `SettingsError`."""
    file = read_file(settings.cluster_file)
    try:
        plans = check(file)
    except ClusterError as error:
        raise SettingsError("\n".join(f"{settings.cluster_file}: {line}" for line in str(error).splitlines())) from None
    keys_note = _look_for_keys(settings.cluster_file, file)
    missing, notes = _look_for_gpus(HostSite(Path(settings.cluster_file).expanduser(), file, settings.local))
    console = tables.console()
    for host, plan in plans.items():
        _table(f"{host} ({file.hosts[host].address})", plan.processes).show(console)
        if plan.note:
            console.print(f"note: {plan.note}", markup=False, highlight=False)
    if keys_note:
        console.print(f"note: {keys_note}", markup=False, highlight=False, soft_wrap=True)
    for line in [*notes, *(f"{line}; it cannot serve yet" for line in incomplete(file))]:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    if missing:
        raise SettingsError("\n".join(f"{settings.cluster_file}: {line}" for line in missing))
    return 0


def _table(title: str, processes: Iterable[PlannedProcess]) -> tables.Table:
    table = tables.Table(title, "process", tables.words("options and environment"))
    for process in processes:
        for number, line in enumerate(_words(process)):
            table.row("" if number else process.name, line)
    return table


def _look_for_gpus(site: HostSite) -> tuple[list[str], list[str]]:
    """Returns a line for each host that lacks GPUs which the file names, and notes about the other hosts with GPUs."""
    missing, notes = list[str](), list[str]()
    asked = {name: "nvidia-smi -L" for name, host in site.file.hosts.items() if host.gpus}
    for answer in sorted(site.run_all(asked, timeout_s=_LIST_S), key=lambda one: list(asked).index(one.host)):
        where = f"[hosts.{answer.host}] gpus:"
        last = answer.output.splitlines()[-1:] or ["no answer"]
        if answer.status == 255:  # of ssh
            notes.append(f"{where} not counted: {last[0]}")
        elif answer.status:
            missing.append(f"{where} nvidia-smi -L fails there: {last[0]}")
        else:
            there = re.findall(r"^GPU (\d+):", answer.output, re.MULTILINE)
            uuids = re.findall(r"\(UUID: ([^)]+)\)", answer.output)
            wanted = dict.fromkeys(gpu for own in site.host(answer.host).gpus for gpu in own.split(","))
            # CUDA takes the beginning of a name.
            absent = [gpu for gpu in wanted if gpu not in there and not any(one.startswith(gpu) for one in uuids)]
            line = f"{where} the host has {len(there)}"
            if absent:
                missing.append(f"{line}, and not {', '.join(absent)}")
            else:
                notes.append(line)
    return missing, notes


def _look_for_keys(path: str, file: ClusterFile) -> str:
    """Returns a note if the folder of keys is expected on the hosts and is not here. Raises `SettingsError` if a missing
    folder would have to be copied with the file."""
    if not file.keys or Path(file.keys).expanduser().is_dir():
        return ""
    where = Path(path).expanduser().resolve()
    if any(str(where.parent / name) == file.keys for name in travels(where.read_text(encoding="utf-8"))):
        raise SettingsError(
            f"{path}: keys: there is no folder {file.keys}; make it with: crossdock keys new {file.keys}"
        )
    return f"keys: {file.keys} is not on this machine; every host needs it"


def _words(process: PlannedProcess) -> list[str]:
    """Returns the options as flags, one to a line, then the environment and the cores. A secret is named, its value is not
    shown."""
    flags, words = process.arguments(), list[str]()
    for word in flags:
        if word.startswith("--"):
            words.append(word)
        else:
            words[-1] += f" {shlex.quote(word)}"
    words.sort()
    words += [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
    words += [f"{ENV_PREFIX}{key.upper()}=…" for key in process.secrets()]
    if process.cores:
        words.append(f"on cores {cores_text(process.cores)}")
    return words
