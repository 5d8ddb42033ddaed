"""Runs a coordinator: waits for the leader lock of its usage ledger, serves, and begins anew after each absence."""

import os

from coordinator.main import Coordinator
from coordinator.recovery.leader_lock import PREDECESSOR_S, LeaderLock, NotLeader
from runtime.metrics import server
from runtime.process import log, notify
from runtime.process.driver import Stop, run_process
from runtime.settings.roles import CoordinatorSettings


async def serve(settings: CoordinatorSettings, stop: Stop) -> int:
    """Serve while the leader lock is held: other coordinators may write the same ledger."""
    if not settings.usage_db:
        return await _serve_anew(settings, stop, 0.0)
    process = settings.name or f"coordinator-{os.getpid()}"
    logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=process)
    leader_lock = LeaderLock(settings.usage_db)
    if settings.standby:
        server.load()
        logger.info("standing by", lock=str(leader_lock.path))
        notify.ready(f"waits for {leader_lock.path}")
    try:
        if not await leader_lock.take(stop, None if settings.standby else PREDECESSOR_S):
            return 0
        return await _serve_anew(settings, stop, PREDECESSOR_S if settings.standby else 0.0, leader_lock)
    except NotLeader as error:
        logger.error("cannot start", error=f"--usage-db: {error}")
        return 1
    finally:
        leader_lock.give_up()


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
