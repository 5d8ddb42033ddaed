"""`crossdock cluster launch`: the whole cluster of a `cluster.toml`, up, looked at, and down. Each host runs `crossdock up`."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launcher.cluster.file import ClusterError, ClusterFile, incomplete
from launcher.cluster.hosts import HostAnswer, HostFailed, HostSite, keys_there, parcel
from launcher.cluster.plan import base_urls, check, coordinator_address
from launcher.cluster.settings import (
    LaunchDownSettings,
    LaunchLogsSettings,
    LaunchSettings,
    LaunchStatusSettings,
    LaunchUpSettings,
)
from launcher.cluster.up import read_file
from launcher.local.child_logs import readable
from launcher.local.detached import STOP_S
from runtime.process.output import Output
from runtime.settings.options import SettingsError

_SHORT_S = 60.0
_FETCH_S = 3600.0  # in which a host may fetch its models first
_STATE = """
p=$(sed -n 's/.*"pid":\\([0-9]*\\).*/\\1/p' "$d/cluster.json" 2>/dev/null)
s=$(sed -n 's/.*"started":\\([0-9]*\\).*/\\1/p' "$d/cluster.json" 2>/dev/null)
if [ -n "$p" ] && [ "$(sed 's/.*) //' "/proc/$p/stat" 2>/dev/null | cut -d' ' -f20)" = "$s" ]; then
    echo "up (pid $p)"
else
    echo down
    exit 3
fi
"""
"""Does the same as `launcher.local.registry.running`, without the second that Python takes to start."""
_UNPACK = 'umask 077 && mkdir -p "$d" && tar -xf - -C "$d" --no-same-owner'


def site_of(settings: LaunchSettings) -> HostSite:
    """Raises `SettingsError`."""
    path = Path(settings.cluster_file).expanduser().resolve()
    file = read_file(settings.cluster_file)
    try:
        check(file)
    except ClusterError as error:
        raise SettingsError("\n".join(f"FILE: {line}" for line in str(error).splitlines())) from None
    return HostSite(path, file, settings.local)


def up(settings: LaunchUpSettings) -> int:
    """Raises `SettingsError`, `HostFailed`."""
    site, console = site_of(settings), Console(soft_wrap=True, highlight=False)
    if lacking := incomplete(site.file):
        raise SettingsError("\n".join(f"FILE: {line}" for line in lacking))
    parcels = {name: parcel(site, name) for name in site.file.hosts}
    states = _all(site, _STATE)
    if running := [answer for answer in states if answer.status == 0]:
        names = ", ".join(answer.host for answer in running)
        raise HostFailed(f"{site.file.name} is up already on {names}; crossdock cluster launch down stops it")
    _expect(states, (3,))
    failed: list[HostAnswer] = []
    try:
        for name, packed in parcels.items():
            _expect([site.run(name, _UNPACK, timeout_s=_SHORT_S, given=packed)], (0,))
        console.print(f"Starting {site.file.name} on {', '.join(site.file.hosts)}")
        script = 'crossdock up "$d/cluster.toml" --host {} --detach --ready-timeout-s ' + str(settings.ready_timeout_s)
        scripts = {name: script.format(name) for name in site.file.hosts}
        for answer in site.run_all(scripts, timeout_s=settings.ready_timeout_s + _FETCH_S):
            if answer.status == 0:
                console.print(answer.output, markup=False)
            elif not failed:
                failed.append(answer)
                # Stop the hosts at once, and not when the others have waited in vain for the one that failed.
                _down(site, console, keep_logs=True)
        _expect(failed, (0,))
    except BaseException:
        if not failed:
            _down(site, console, keep_logs=True)
        console.print(
            "Nothing is left running; logs stay on the hosts until crossdock cluster launch down", markup=False
        )
        raise
    for url in base_urls(site.file):
        console.print(f"Base URL   {url}/v1", markup=False)
    return 0


def status(settings: LaunchStatusSettings) -> int:
    site, console = site_of(settings), Console(soft_wrap=True, highlight=False)
    states = _all(site, _STATE)
    width = max(map(len, site.file.hosts))
    for answer in states:
        console.print(f"{answer.host:{width}}  {answer.output}", markup=False)
    named = next(name for name, host in site.file.hosts.items() if host.coordinator)
    if next(answer for answer in states if answer.host == named).status == 0:
        keys = f" --keys {keys_there(site)}" if site.file.keys else ""
        script = f"crossdock status --coordinator {coordinator_address(site.file)}{keys}"
        console.print(site.run(named, script, timeout_s=_SHORT_S).output, markup=False)
    return 0 if all(answer.status == 0 for answer in states) else 1


def logs(settings: LaunchLogsSettings) -> int:
    site = site_of(settings)
    if settings.on_host and settings.on_host not in site.file.hosts:
        raise SettingsError(
            f"--host: {settings.cluster_file} has no host {settings.on_host}, but {', '.join(site.file.hosts)}"
        )
    names = [settings.on_host] if settings.on_host else list(site.file.hosts)
    script = f'cd "$d" && exec tail -n {settings.lines} {"-F" if settings.follow else ""} -- *.log'
    running = [
        subprocess.Popen(
            site.command(name, script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for name in names
    ]
    readers = [
        threading.Thread(target=_show, args=(name, process), daemon=True)
        for name, process in zip(names, running, strict=True)
    ]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    except KeyboardInterrupt:
        pass  # Ctrl-C ends --follow
    finally:
        for process in running:
            process.terminate()
            process.wait(_SHORT_S)
    return 0


def down(settings: LaunchDownSettings) -> int:
    site, console = site_of(settings), Console(soft_wrap=True, highlight=False)
    return 0 if _down(site, console, settings.keep_logs) else 1


def _down(site: HostSite, console: Console, keep_logs: bool) -> bool:
    """Stops all hosts; returns whether all went well. Hosts with gateways go first, since gateways end the streams; a host
    with only a coordinator goes last."""
    script = (
        '[ -f "$d/cluster.toml" ] || {{ echo "{0} is not up"; exit 0; }}\n'
        'crossdock down "$d/cluster.toml" --host {0}' + (" --keep-logs" if keep_logs else "")
    )
    well = True
    for stage in range(3):
        scripts = {name: script.format(name) for name in site.file.hosts if _stage(site.file, name) == stage}
        for answer in site.run_all(scripts, timeout_s=STOP_S + _SHORT_S):
            console.print(answer.output, markup=False)
            well &= answer.status == 0
    return well


def _stage(file: ClusterFile, name: str) -> int:
    host = file.hosts[name]
    return 0 if host.gateways else 2 if host.coordinator else 1


def _all(site: HostSite, script: str) -> list[HostAnswer]:
    answers = site.run_all(dict.fromkeys(site.file.hosts, script), timeout_s=_SHORT_S)
    order = list(site.file.hosts)
    return sorted(answers, key=lambda answer: order.index(answer.host))


def _expect(answers: Sequence[HostAnswer], statuses: tuple[int, ...]) -> None:
    """Raises `HostFailed`."""
    failed = [answer for answer in answers if answer.status not in statuses]
    if failed:
        raise HostFailed("\n".join(f"{one.host}: status {one.status}\n{one.output}" for one in failed))


def _show(name: str, process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        level, text = readable(line.decode("utf-8", "replace").rstrip())
        sys.stdout.write(f"{name} | {level + ' ' if level else ''}{text}\n")
        sys.stdout.flush()
        if isinstance(sys.stdout, Output) and sys.stdout.is_gone:
            process.terminate()  # nobody reads on
