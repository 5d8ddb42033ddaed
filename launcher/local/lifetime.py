"""A cluster on this machine from start to stop: what `serve` and the benchmarks run on."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher.http.client import answers_ready, new_session
from launcher.local import registry
from launcher.local.cluster import LocalAddresses, build
from launcher.local.ports import ReservedPorts
from launcher.local.supervisor import Child, RoleFailed, Supervisor
from launcher.models.resolve import ReadyModel
from runtime.process import interrupts
from runtime.process.output import Output
from runtime.settings.serve import ServeSettings

RUNS_KEPT = 5
PROBE_EVERY_S = 0.2
_RUN_NAME = re.compile(r"^\d{8}-\d{6}-\d+\Z")
_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


@dataclass(frozen=True)
class Running:
    cluster: LocalAddresses
    supervisor: Supervisor
    client: aiohttp.ClientSession  # of the gateway, with a key if one is needed
    log_dir: Path


@contextlib.asynccontextmanager
async def running(settings: ServeSettings, model: ReadyModel, console: Console) -> AsyncIterator[Running]:
    """Yields a cluster that is ready, and stops it on the way out in every case. Raises `SettingsError` before anything is
    started, `RoleFailed` if the cluster is not ready in time, and `SettingsError` or `ConfigError` if a role refuses its
    settings.
    """
    with ReservedPorts() as ports:
        cluster = build(settings, model, ports)
        for note in cluster.notes:
            console.print(f"[yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
        async with (
            new_session(cluster.base_url, cluster.key, trusts=cluster.certificate) as client,
            _started(settings, cluster, model, console) as up,
        ):
            supervisor, log_dir = up
            await wait_ready(lambda: _all_ready(client, cluster), supervisor, settings.ready_timeout_s, console)
            supervisor.started_up = True
            supervisor.observe(cluster.metrics)
            yield Running(cluster, supervisor, client, log_dir)


@contextlib.asynccontextmanager
async def _started(
    settings: ServeSettings, cluster: LocalAddresses, model: ReadyModel, console: Console
) -> AsyncIterator[tuple[Supervisor, Path]]:
    """Yields the started processes, which may not be ready yet, and the folder of their logs; stops them at the end of the
    context."""
    log_dir = new_log_dir()
    supervisor = Supervisor(log_dir=log_dir, say=sayer(console), verbose=settings.verbose)
    try:
        with registry.noted(
            log_dir, model_id=model.model_id, base_url=cluster.base_url, coordinator=cluster.coordinator
        ):
            for spec in cluster.processes:
                supervisor.start(spec)
            yield supervisor, log_dir
    finally:
        await supervisor.close()


def run_until_stopped(begin: Callable[[], Coroutine[Any, Any, int]], console: Console) -> int:
    """Runs the work that `begin` returns, which may take long to get ready, for instance to fetch a model. If a signal comes
    before that, this is printed, and the status is that of the signal. Serving that is cancelled returns 0."""
    Output.matters = False
    try:
        with interrupts.raised():
            status = uvloop.run(until_interrupted(begin(), console))
    except interrupts.SignalReceived as stopped:
        status = stopped.status
    if status in interrupts.STATUSES:
        console.print("Stopped before it was ready.")
    return status


async def until_interrupted(work: Coroutine[Any, Any, int], console: Console) -> int:
    """Returns the result of `work`, the exit status. If SIGINT, SIGTERM or SIGHUP comes first, `work` is cancelled and has
    cleaned up when this returns. The status is then 128 and the signal's number, unless `work` returned one of its own. A
    SIGINT after any of them ends this process at once; the kernel then kills what the supervisor has started."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    status = 0

    def interrupted(number: int) -> None:
        nonlocal status
        if stop.is_set() and number != signal.SIGINT:
            return  # a terminal and its shell both send SIGHUP, Slurm and a job's script both SIGTERM
        if stop.is_set():
            console.show_cursor()
            console.print("Killed.")
            os._exit(status)
        status = interrupts.status_of(number)
        stop.set()

    for number in interrupts.heeded():
        loop.add_signal_handler(number, interrupted, number)
    task = loop.create_task(work)
    stopped = loop.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        console.print("\nStopping … (Ctrl-C again kills at once)")
        task.cancel()
    await asyncio.wait({task})
    stopped.cancel()
    return status if task.cancelled() else task.result()


def sayer(console: Console) -> Callable[[str, str, str], None]:
    def say(level: str, name: str, text: str) -> None:
        colour = _COLOURS.get(level, "dim")
        console.print(f"[{colour}]{escape(name)}[/{colour}] {escape(text)}", highlight=False, soft_wrap=True)

    return say


def new_log_dir() -> Path:
    """Makes a folder for this run's logs, and removes those of all but the last few runs. Raises `CannotKeep`."""
    runs = registry.runs_folder()
    own = runs / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    registry.make_folder(own)
    old = sorted(path for path in runs.iterdir() if _RUN_NAME.match(path.name) and path != own)
    for path in old[: max(0, len(old) - RUNS_KEPT)]:
        if not Path(f"/proc/{path.name.rsplit('-', 1)[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
    return own


async def wait_ready(
    is_ready: Callable[[], Coroutine[Any, Any, bool]], supervisor: Supervisor, timeout_s: float, console: Console
) -> None:
    """Waits until the cluster is ready. Raises `RoleFailed`, or the error with which a role refused its settings."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    failed = asyncio.ensure_future(supervisor.wait_failed())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(f"{name}: starting", total=None) for name in supervisor.children}
        try:
            async with asyncio.timeout(timeout_s):
                while not await is_ready():
                    for name, child in supervisor.children.items():
                        progress.update(tasks[name], description=escape(f"{name}: {_state(child)}"))
                    # Readiness is asked over HTTP a few times a second, as a client would; a child's failure ends the wait.
                    await asyncio.wait({failed}, timeout=PROBE_EVERY_S)
                    if failed.done():
                        failed.result()
        except TimeoutError:
            raise RoleFailed(_not_ready(supervisor, timeout_s)) from None
        finally:
            failed.cancel()
            await asyncio.wait({failed})


async def _all_ready(client: aiohttp.ClientSession, cluster: LocalAddresses) -> bool:
    return all([await answers_ready(client, f"{url}/ready") for url in cluster.base_urls])


def _state(child: Child) -> str:
    if child.pid == 0:
        return "not running"
    return child.log.last_event[:100] or "starting"


def _not_ready(supervisor: Supervisor, timeout_s: float) -> str:
    """Returns an error text that names what is missing, with the last line of each role."""
    lines = [f"    {name}: {_state(child)} ({child.log.path})" for name, child in supervisor.children.items()]
    return "\n".join([f"the cluster was not ready within {timeout_s:.0f} s (--ready-timeout-s). Last words:", *lines])
