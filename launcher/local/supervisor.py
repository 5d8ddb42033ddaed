"""Runs child processes: started in groups of their own, restarted when they die or hang, and gone when this process is.

Once the cluster has been ready no child is given up, with any exit status: it is started again after pauses that grow to a
minute, while the others serve. A child that has been ready and then sends nothing for its watchdog's time is killed. A child
that should stop gets SIGTERM and SIGINT, has `STOP_GRACE_S`, and is then killed. If this process itself is killed, the kernel
kills the children (`PR_SET_PDEATHSIG`), so there are no orphans.
"""

import asyncio
import ctypes
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.local import process_states, supervisor_metrics
from launcher.local.child_logs import NEWS, ChildLog
from launcher.local.notify_listener import NotifySocket
from launcher.local.process_states import RESTARTS_KEPT, WINDOW_S, ProcessState, ProcessStates
from launcher.local.restart import RestartPolicy
from launcher.local.watchdog import Watchdog
from proto.errors import CrossdockError
from runtime.metrics.server import MetricsServer
from runtime.process import clock
from runtime.process.exits import CONFIG_EXIT, HOPELESS_EXITS, ConfigError
from runtime.settings.options import SettingsError, complaints
from runtime.storage.background_writer import BackgroundWriter

STOP_GRACE_S = 5.0
ABORT_S = 1.0  # between SIGABRT, on which a hung child writes where its threads are, and SIGKILL
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class RoleFailed(CrossdockError):
    """A role could not be kept running; `str()` ends with its last lines of output."""


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()  # to start on, inherited by its threads; empty: as this process
    stop_stage: int = 0  # in which it is stopped; the next one begins when all of this one have gone
    watchdog_s: float = 0.0  # of silence after it was ready, then it is killed; 0: never


@dataclass
class Child:
    """One role and its current incarnation, if any."""

    spec: ProcessSpec
    log: ChildLog
    heard: NotifySocket
    watchdog: Watchdog
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    pid: int = 0  # 0 while it does not run
    restarts: int = 0
    restarted_at: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS_KEPT))  # Unix times
    starts_at: float | None = None
    exit_status: int | None = None
    ended: str = ""

    @property
    def is_ready(self) -> bool:
        return self.pid > 0 and self.watchdog.ready_at is not None

    def state(self) -> ProcessState:
        return ProcessState(
            self.spec.name, self.pid, self.is_ready, self.restarts, tuple(self.restarted_at), self.starts_at,
            self.ended, self.exit_status,
        )  # fmt: skip


class Supervisor:
    """Keeps children running until `close`. `say(level, name, text)` is told of every death and restart, on a thread."""

    def __init__(self, *, log_dir: Path, say: Callable[[str, str, str], None], verbose: bool = False) -> None:
        self.children: dict[str, Child] = {}
        self.started_up = False  # set once all children have been ready: from then on none is given up
        self._metrics: MetricsServer | None = None
        self._observing: asyncio.Task[None] | None = None
        self._log_dir = log_dir
        # On threads: the disk and the terminal may stand still.
        self._states = BackgroundWriter(partial(process_states.write, log_dir), size=lambda states: 1)
        self._terminal: BackgroundWriter[tuple[str, str, str]] = BackgroundWriter(
            lambda said: say(*said), size=lambda said: len(said[2])
        )
        self._verbose = verbose
        self._closing = False
        self._news = ""
        self._tasks: dict[asyncio.Task[None], int] = {}  # with the stage in which each is stopped
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, spec: ProcessSpec) -> None:
        def show(level: str, text: str) -> None:
            # While all children are stopped, each reports the loss of the others; that belongs only into the log files.
            if not self._verbose and (self._closing or self._said_already(text)):
                return
            self._say(level, spec.name, text)

        log = ChildLog(spec.name, self._log_dir / f"{spec.name}.log", verbose=self._verbose, show=show)
        child = self.children[spec.name] = Child(spec, log, NotifySocket(), Watchdog(spec.watchdog_s))
        task = asyncio.get_running_loop().create_task(self._keep_running(child))
        task.add_done_callback(self._on_task_done)
        self._tasks[task] = spec.stop_stage

    def _say(self, level: str, name: str, text: str) -> None:
        self._terminal.put((level, name, text))

    def _said_already(self, text: str) -> bool:
        """Whether another child has told the same news: each of them reads the file."""
        if not text.startswith(NEWS):
            return False
        last, self._news = self._news, text
        return text == last

    def all_ready(self) -> bool:
        """Whether each child runs and has said that it is ready."""
        return all(child.is_ready for child in self.children.values())

    def observe(self, address: str) -> None:
        """Shows metrics at this address, soon and until `close`; if that is not possible, this is logged."""
        self._observing = asyncio.get_running_loop().create_task(self._observe(address))

    async def _observe(self, address: str) -> None:
        shown = supervisor_metrics.registry_of(self.states)
        self._metrics = await supervisor_metrics.serve(address, shown, self._say)
        self._publish()

    def states(self) -> list[ProcessState]:
        return [child.state() for child in self.children.values()]

    async def wait_failed(self) -> None:
        """Never returns. Raises `RoleFailed` once a child has been given up; `SettingsError` or `ConfigError` if that child
        refused its settings."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stops all children, stage by stage, in bounded time."""
        self._closing = True
        if self._observing is not None:
            self._observing.cancel()
            await asyncio.gather(self._observing, return_exceptions=True)
        if self._metrics is not None:
            await self._metrics.close()
        for stage in sorted(set(self._tasks.values())):
            going = [task for task, of in self._tasks.items() if of == stage]
            for task in going:
                task.cancel()
            await asyncio.gather(*going, return_exceptions=True)
        if self._failed.done():
            self._failed.exception()
        else:
            self._failed.cancel()
        for child in self.children.values():
            child.log.close()
            child.heard.close()
        self._states.close()
        self._terminal.close()

    async def _keep_running(self, child: Child) -> None:
        while True:
            try:
                exit_code = await self._run_once(child)
                child.exit_status, child.ended = exit_code, _how_it_ended(exit_code)
            except OSError as error:
                if not self.started_up:
                    raise RoleFailed(f"cannot start {child.spec.name}: {error}") from error
                exit_code, child.ended = 1, f"could not be started: {error}"
            delay_s = child.policy.on_exit(
                ready_s=child.watchdog.ready_for_s(clock.now()),
                exit_code=exit_code,
                started_up=self.started_up,
                uniform=random.random(),
            )
            if delay_s is None:
                raise _given_up(child, exit_code)
            child.starts_at = clock.unix_time() + delay_s
            self._publish()
            recent = child.state().recent(clock.unix_time())
            often = f" ({recent} restarts in the last {WINDOW_S / 60:.0f} min)" if recent else ""
            self._say("warning", child.spec.name, f"{child.ended}; starting it again in {delay_s:.1f} s{often}")
            await asyncio.sleep(delay_s)
            child.restarts += 1
            child.restarted_at.append(clock.unix_time())
            child.starts_at = None

    def _publish(self) -> None:
        """Write the states for `crossdock status`."""
        if not self._closing:
            address = self._metrics.address if self._metrics is not None else ""
            self._states.put(ProcessStates(tuple(self.states()), address))

    def _heard(self, child: Child, line: str) -> None:
        was_ready = child.is_ready
        child.watchdog.heard(line, clock.now())
        if child.is_ready != was_ready:
            self._publish()
            if child.is_ready and child.restarts:
                self._say("info", child.spec.name, "is back: started again, and ready")

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Kills the child if it hangs. SIGABRT comes first, so that it writes where it hangs; a stopped process cannot do
        that."""
        if not child.spec.watchdog_s:
            return
        while (silent_s := child.watchdog.silent_s(clock.now())) is None:  # noqa: ASYNC110 (what is awaited is silence)
            await asyncio.sleep(child.watchdog.look_every_s)
        self._say("error", child.spec.name, f"said nothing for {silent_s:.0f} s (watchdog) and is killed")
        _signal(process, signal.SIGABRT)
        await asyncio.sleep(ABORT_S)
        _signal(process, signal.SIGKILL)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Ends `wait_failed` when a role was given up or a task has failed, watching tasks included."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _run_once(self, child: Child) -> int:
        """Runs one incarnation, from its start to its last byte of output. On cancellation the process is stopped first."""
        parent = os.getpid()
        child.watchdog.started(clock.now())
        process = await asyncio.create_subprocess_exec(
            *child.spec.arguments,
            env=dict(child.spec.environment) | _notifying(child),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: _before_exec(parent, child.spec.cores),
        )
        child.pid = process.pid
        child.heard.listen(process.pid, partial(self._heard, child))
        self._publish()
        assert process.stdout is not None
        watching = asyncio.get_running_loop().create_task(self._watch(child, process))
        watching.add_done_callback(self._on_task_done)
        try:
            while data := await process.stdout.read(1 << 16):
                child.log.feed(data)
            return await process.wait()
        finally:
            watching.cancel()
            await asyncio.shield(_stop(process, child.log))
            child.heard.ignore()
            child.pid = 0


def _notifying(child: Child) -> dict[str, str]:
    """Returns the environment for `runtime.process.notify`. A systemd that started this process has variables of its own,
    which are not for the children."""
    usec = str(round(child.spec.watchdog_s * 1e6)) if child.spec.watchdog_s else ""
    # SIGABRT then writes where each thread is.
    return {"NOTIFY_SOCKET": child.heard.address, "WATCHDOG_USEC": usec, "WATCHDOG_PID": "", "PYTHONFAULTHANDLER": "1"}


def _before_exec(parent: int, cores: tuple[int, ...]) -> None:
    """Prepares the child before it becomes another program: it will be killed when the parent dies, and runs on its cores. A
    process group of its own keeps Ctrl-C from it: the parent stops its children in its own order."""
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            pass  # a worker that cannot have these cores reports it itself


async def _stop(process: asyncio.subprocess.Process, log: ChildLog) -> None:
    """Sends SIGTERM and SIGINT, waits for a bounded time, then sends SIGKILL to the whole group; returns when the process is
    reaped. All processes stop together, so nothing can be handed over, and the second signal tells them not to wait for
    that."""
    if process.returncode is not None:
        return
    _signal(process, signal.SIGTERM)
    _signal(process, signal.SIGINT)
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await _drain(process, log)
    except TimeoutError:
        _signal(process, signal.SIGKILL)
        await process.wait()


async def _drain(process: asyncio.subprocess.Process, log: ChildLog) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        log.feed(data)
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        pass  # it went by itself


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _given_up(child: Child, exit_code: int) -> CrossdockError:
    """Returns the error text of a role that refused its settings, for our own user; for other roles, an error with their last
    lines."""
    name = child.spec.name
    if exit_code in HOPELESS_EXITS and (said := complaints(child.log.tail)):
        text = "\n".join(f"{name}: {line}" for line in said)
        return ConfigError(text) if exit_code == CONFIG_EXIT else SettingsError(text)
    return RoleFailed(_with_tail(f"{name} {_how_it_ended(exit_code)} and is given up", child.log))


def _with_tail(message: str, log: ChildLog) -> str:
    if not log.tail:
        return f"{message}; it wrote nothing"
    lines = "\n".join(f"    {line}" for line in list(log.tail)[-12:])
    return f"{message}. Its last lines (all of them in {log.path}):\n{lines}"
