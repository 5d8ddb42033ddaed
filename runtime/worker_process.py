"""What both worker processes do around their worker: load on the engine thread, run until told to stop."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from proto.errors import CrossdockError
from runtime import log
from runtime.driver import run_process
from runtime.log import Log
from runtime.settings import WorkerSettings

EngineT = TypeVar("EngineT")


class RunsUntilStopped(Protocol):
    async def run(self, stop: asyncio.Event) -> None: ...


def run_worker(
    settings: WorkerSettings,
    *,
    thread: Executor,
    load: Callable[[], EngineT],
    make: Callable[[EngineT, Log, str], RunsUntilStopped],
) -> int:
    """Load on `thread`, then `make(engine, log, name).run(stop)` until SIGTERM or SIGINT. Returns the exit code."""

    async def main(stop: asyncio.Event) -> int:
        name = settings.name or f"{settings.role}-{os.getpid()}"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        logger.info("loading", model=settings.model)
        try:
            engine = await asyncio.get_running_loop().run_in_executor(thread, load)
        except (CrossdockError, OSError, ValueError, RuntimeError) as error:
            logger.error("cannot load the model", model=settings.model, error=str(error))
            return 1
        rest = os.sched_getaffinity(0) - set(settings.cores)
        if settings.cores and rest:
            # This thread, and those it will make: the cores of the one that computes are its own from now on.
            os.sched_setaffinity(0, rest)
        await make(engine, logger, name).run(stop)
        logger.info("stopped")
        return 0

    try:
        return run_process(main)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
