"""A worker process with two roles: when it is ready, what its watch counts, and that one role does not outlive the other."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from proto.messages import Role
from runtime.link.server import CannotBind
from runtime.process import log, notify
from runtime.process.driver import Stop
from worker import process, role_change
from worker.driver import ComputeStep, WorkerDriver
from worker.step_watch import StepWatch


def test_readiness_needs_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed worker is ready when it is registered in both roles."""
    said: list[str] = []
    monkeypatch.setattr(notify, "ready", said.append)
    readiness = process._Readiness((Role.PREFILL, Role.DECODE))
    readiness.registered(Role.PREFILL)
    readiness.registered(Role.PREFILL)
    assert not said
    readiness.registered(Role.DECODE)
    assert said == ["registered as prefill and decode worker"]


def test_failed_role_stops_the_other() -> None:
    """A role that cannot start stops the other one."""

    async def scene() -> None:
        async def cannot(stop: Stop) -> None:
            raise CannotBind(errno.EADDRINUSE, "address in use")

        driver: Any = SimpleNamespace(run=cannot, settings=SimpleNamespace(role="decode"))
        stop = Stop()
        assert await role_change._run(driver, stop, log.configure(level="error", fmt="json", process="w")) == 1
        assert stop.is_set()

    uvloop.run(scene())


def test_waiting_step_is_not_watched_yet() -> None:
    """Else a decode step behind a prefill step that compiles would be taken for hung."""
    watch = StepWatch(1.0)
    driver: Any = SimpleNamespace(_watch=watch)
    goes_on, runs = threading.Event(), threading.Event()

    def long() -> None:
        runs.set()
        goes_on.wait(30)

    def step(tokens: int, compute: Any) -> ComputeStep[Any]:
        return ComputeStep(tokens, compute, lambda _: lambda: None, lambda _: None)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(WorkerDriver._compute, driver, step(9, long))
        second = thread.submit(WorkerDriver._compute, driver, step(1, lambda: watch._tokens))
        assert runs.wait(30) and watch._tokens == 9
        goes_on.set()
        assert second.result(30) == 1 and first.done()
    assert watch._tokens == 0
