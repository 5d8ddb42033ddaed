"""Runs a coordinator: waits until it leads, serves, and begins anew after each absence.

With `--database`, leadership is a lease in it (`postgres`). With `--usage-db`, it is a lock on `FILE.lock`, kept until the
process ends. The kernel then passes the lock on, no matter how the process ended. A standby has loaded everything by then, and
serves within milliseconds. A restart without a standby takes the time of a Python start, about a second of CPU.

A network file system may pass a lock on while its holder lives, for example if the holder is cut off for longer than its
lease. So a ledger on such a file system is refused.
"""

import asyncio
import fcntl
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any, Final

from coordinator.main import Coordinator
from coordinator.postgres.leader_lease import LeaderLease, NotLeader
from runtime.link.tls import tls_of
from runtime.metrics import server
from runtime.metrics.registry import MetricsRegistry
from runtime.process import log, notify
from runtime.process.driver import Stop, run_process
from runtime.process.exits import ConfigError
from runtime.settings.roles import CoordinatorSettings
from runtime.storage.lock_file import is_at, lock_of, network_file_system, open_lock

_log = log.get("crossdock.leader")
PREDECESSOR_S: Final = 5.0
"""How long a coordinator without `--standby` waits for a predecessor that is about to end, in seconds."""


class LeaderLock:
    def __init__(self, usage_db: str) -> None:
        self.path = lock_of(usage_db)
        self._usage_db = Path(usage_db).expanduser()
        self._descriptor: int | None = None

    async def acquire(self, stop: Stop, within_s: float | None) -> bool:
        """Whether it was taken before `stop`; `within_s` None: however long it takes. Raises `NotLeader`, `ConfigError`."""
        taken: Future[int] = Future()
        threading.Thread(target=_wait, args=(self._usage_db, self.path, taken), name="turn", daemon=True).start()
        taking, stopping = asyncio.wrap_future(taken), asyncio.ensure_future(stop.wait())
        both: set[asyncio.Future[Any]] = {taking, stopping}
        try:
            await asyncio.wait(both, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                if not stop.is_set():
                    raise NotLeader(f"{self.path}: another coordinator writes this ledger")
                return False
            self._descriptor = taking.result()
        except (OSError, ValueError) as error:
            raise NotLeader(str(error)) from None
        finally:
            taking.cancel()
            stopping.cancel()
        return True

    def is_held(self) -> bool:
        """Whether nobody else can have taken the lock meanwhile, as by removing its file."""
        return self._descriptor is not None and is_at(self._descriptor, self.path)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _wait(usage_db: Path, path: Path, taken: "Future[int]") -> None:
    """Runs on a thread of its own, since waiting for a lock cannot be interrupted: a caller that gives up leaves the thread
    behind."""
    descriptor = -1
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (path.parent, Path(os.path.realpath(usage_db)).parent):
            if kind := network_file_system(folder):
                raise ConfigError(
                    f"--usage-db: {folder} is on {kind}, a network file system, whose locks may be lost:"
                    " name a file on a local disk"
                )
        descriptor = open_lock(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not is_at(descriptor, path):
            raise FileNotFoundError(f"{path} was removed while this coordinator waited for it")
    except (OSError, ValueError, ConfigError) as error:
        if taken.set_running_or_notify_cancel():
            taken.set_exception(error)
    else:
        if taken.set_running_or_notify_cancel():
            taken.set_result(descriptor)
            return
    if descriptor >= 0:
        os.close(descriptor)


async def serve(settings: CoordinatorSettings, stop: Stop) -> int:
    """Serve while this coordinator leads: others may write the same ledger."""
    if not settings.usage_db and not settings.database:
        return await _serve_anew(settings, stop, 0.0)
    process = settings.name or f"coordinator-{os.getpid()}"
    logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=process)
    if settings.standby or settings.database:
        server.load()
    try:
        if settings.database:
            return await _serve_by_lease(settings, stop, LeaderLease(settings.database, f"{process}@{gethostname()}"))
        return await _serve_by_lock(settings, stop, LeaderLock(settings.usage_db))
    except NotLeader as error:
        logger.error("cannot start", error=f"{'--database' if settings.database else '--usage-db'}: {error}")
        return 1


async def _serve_by_lock(settings: CoordinatorSettings, stop: Stop, leader_lock: LeaderLock) -> int:
    if settings.standby:
        _stand_by(str(leader_lock.path))
    try:
        if not await leader_lock.acquire(stop, None if settings.standby else PREDECESSOR_S):
            return 0
        return await _serve_anew(settings, stop, PREDECESSOR_S if settings.standby else 0.0, leader_lock)
    finally:
        leader_lock.release()


async def _serve_by_lease(settings: CoordinatorSettings, stop: Stop, lease: LeaderLease) -> int:
    """Serve in each term for which this coordinator gets the lease."""
    serving: Coordinator | None = None
    _stand_by(lease.name)
    while True:
        try:
            async with _seen_standing_by(settings):
                if not await lease.acquire(stop):
                    return 0
            serving = Coordinator(settings, serving, lease)
            exit_code = await serving.run(stop, PREDECESSOR_S)
        finally:
            await lease.give_up()
        if exit_code or stop.is_set():
            return exit_code


@asynccontextmanager
async def _seen_standing_by(settings: CoordinatorSettings) -> AsyncIterator[None]:
    """Answers at the metrics port meanwhile, so that a supervisor sees that this process is alive."""
    observed = server.MetricsServer(settings.metrics, tls=tls_of(settings))
    observed.show(MetricsRegistry("coordinator"), lambda: "it stands by")
    with suppress(server.PortTaken):  # by the leader, if that runs on this host
        await observed.start()
    try:
        yield
    finally:
        await observed.close()


def _stand_by(waits_for: str) -> None:
    _log.info("standing by", waits_for=waits_for)
    notify.ready(f"waits for {waits_for}")


async def _serve_anew(
    settings: CoordinatorSettings, stop: Stop, bind_within_s: float, leader_lock: LeaderLock | None = None
) -> int:
    """Serve under a new incarnation after each absence. Raises `NotLeader` if another coordinator may have begun to serve
    meanwhile."""
    serving = Coordinator(settings)
    while True:
        exit_code = await serving.run(stop, bind_within_s)
        if exit_code or stop.is_set() or not serving.stall_detector.away_s:
            return exit_code
        if leader_lock is not None and not leader_lock.is_held():
            raise NotLeader(f"{leader_lock.path}: it was removed or replaced while this coordinator was away")
        serving, bind_within_s = Coordinator(settings, serving), PREDECESSOR_S


def run(settings: CoordinatorSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    return run_process(lambda stop: serve(settings, stop))
