"""Runs a process, and drives a pure core: events in, actions out, one timer for its next deadline."""

import asyncio
import ctypes
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, Generic, Protocol, TypeVar

import uvloop

from runtime.process import clock, hangup, log, notify
from runtime.process.descriptors import raise_descriptor_limit
from runtime.process.exits import BUG_EXIT
from runtime.process.zmq_sockets import close_sockets

_PR_SET_DUMPABLE = 4
E = TypeVar("E")
A = TypeVar("A")
T = TypeVar("T")

E_contra = TypeVar("E_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class DrivenCore(Protocol[E_contra, A_co]):
    """A pure state machine: it gets the time as an argument, and returns its actions."""

    def handle(self, event: E_contra, now: float) -> Iterable[A_co]: ...

    def next_deadline(self) -> float | None: ...


class CoreDriver(Generic[E, A]):
    """Passes events to a core on the event loop's thread, and performs the actions that it returns.

    `perform` may post further events; they are handled after the actions of the current one, in order, so that a core never
    sees an event from inside another.
    """

    def __init__(self, core: DrivenCore[E, A], *, perform: Callable[[A], None], tick: E) -> None:
        self._core = core
        self._perform = perform
        self._tick = tick
        self._pending: deque[E] = deque()
        self._busy = False
        self.events = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def post(self, event: E) -> None:
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                self.events += 1
                for action in self._core.handle(self._pending.popleft(), clock.now()):
                    self._perform(action)
        finally:
            self._busy = False
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        at = self._core.next_deadline()
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - clock.now()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.post(self._tick)


class Stop(asyncio.Event):
    """The first SIGTERM or Ctrl-C sets it: stop in an orderly way. The second one sets `at_once`: stop without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    def signalled(self) -> None:
        notify.stopping()
        (self.at_once if self.is_set() else self).set()

    async def unless_at_once(self, done: Awaitable[object], within_s: float) -> None:
        """Wait for `done`, for at most `within_s` seconds, or until `at_once` is set."""
        loop = asyncio.get_running_loop()
        waiting = {asyncio.ensure_future(done), loop.create_task(self.at_once.wait())}
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


def keep_memory_private() -> None:
    """Prevent other processes from reading this one's memory, environment and files through /proc or as a debugger. Otherwise
    a process of the same user could take the keys. Processes that may trace any process still can. The kernel also writes no
    core file."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def run_process(main: Callable[[Stop], Awaitable[int]], *, private: bool = True) -> int:
    """Run `main(stop)` on uvloop, with as many open files as are allowed; `stop` is set by SIGTERM and SIGINT. Returns main's
    exit code. `private`: call `keep_memory_private` first."""
    if private:
        keep_memory_private()
    raise_descriptor_limit()

    async def body() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_die)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.signalled)
        hangup.listen()
        feeding = watched(notify.feed_watchdog())
        status = await main(stop)
        await cancelled(feeding)
        close_sockets()
        return status

    return uvloop.run(body())


async def unless_stopped(stop: asyncio.Event, executor: Executor, work: Callable[[], T]) -> T | None:
    """The result of `work`, run on `executor`; None if `stop` was set first. Its thread then goes on, since it cannot be
    interrupted, but the end of the process does not wait for it."""
    loop = asyncio.get_running_loop()
    working, stopping = loop.run_in_executor(executor, work), loop.create_task(stop.wait())
    both: set[asyncio.Future[Any]] = {working, stopping}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    return working.result() if working.done() else None


def watched(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a task whose exceptions are not overlooked. An exception in it is a bug, and ends the process."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": f"task {task.get_name()} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)


def _die(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an uncaught error and end the process at once. A process that goes on with a dead task would only seem to work. A
    process that has ended is noticed and started again."""
    error, message = context.get("exception"), str(context.get("message"))
    if " callback " in message:
        message = "a callback failed"  # loops add its arguments, which may be a prompt; the traceback says where it was
    if error is None or "never retrieved" in message:
        log.get("crossdock.driver").error("loose end", what=message, exc_info=error)
        return
    log.get("crossdock.driver").critical("bug", what=message, exc_info=error)
    logging.shutdown()
    os._exit(BUG_EXIT)


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks of ours and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        # Not `await task` under a suppress: that would swallow a cancellation of the caller as well.
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
