"""The process of a worker: load the model on the compute thread, then drive the worker, in one role after the other, until told
to stop.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from proto.errors import BadOption, CrossdockError
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.link.server import CannotBind, LinkSettings
from runtime.metrics.server import MetricsServer
from runtime.process import clock, log, notify
from runtime.process import garbage_collector as collector
from runtime.process.driver import Stop, run_process, unless_stopped
from runtime.process.exits import ConfigError
from runtime.process.log import Log
from runtime.process.niceness import be_nice_as_group
from runtime.settings import machine
from runtime.settings.workers import WorkerSettings
from runtime.worker.driver import EngineT, WorkerDriver
from runtime.worker.role import LoadedEngine, WorkerRole
from runtime.worker.step_watch import StepWatch


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """A `BadOption` raised inside is a `ConfigError` outside."""
    try:
        yield
    except BadOption as error:
        raise ConfigError(f"{error.option}: {error}") from error


def run_worker(
    settings: WorkerSettings,
    *,
    thread: Executor,
    load: Callable[[], EngineT],
    be_nice: Callable[[int], None],
    make_role: Callable[[EngineT, WorkerDriver], WorkerRole],
) -> int:
    """Call `load` on `thread`, then drive the role that `make_role` makes of its result until SIGTERM or SIGINT. It is called
    again for each change of role, with a driver whose settings name the new one. `be_nice(niceness)` is called on `thread` once
    the model is loaded. Returns the exit code; raises `ConfigError`, as `load` may, or in place of its `BadOption`."""

    links = _links(settings)

    def load_and_be_nice() -> EngineT:
        engine = load()
        be_nice(settings.nice)
        if settings.nice:
            be_nice_as_group(settings.nice)
        return engine

    async def main(stop: Stop) -> int:
        name = settings.name or f"{settings.role}-{os.getpid()}"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        metrics = MetricsServer(settings.metrics, settings.advertise)
        await metrics.start()
        logger.info("loading", model=settings.model)
        try:
            with as_config_error(), collector.at_rest():
                engine = await unless_stopped(stop, thread, load_and_be_nice)
        except ConfigError:
            raise
        except (CrossdockError, OSError, ValueError, RuntimeError) as error:
            logger.error("cannot load the model", model=settings.model, error=str(error))
            return 1
        if engine is not None:
            leave_cores(settings.cores)
            _log_loaded(logger, engine)
            watch = StepWatch(settings.step_timeout_ms / 1000)
            notify.only_while(notify.Pulse(thread, clock.now, lambda: watch.longest_s))

            def make_driver(role: Role, before: WorkerDriver | None = None) -> WorkerDriver:
                return WorkerDriver(
                    settings.in_role(role), engine, make_role, thread=thread, name=name, log=logger, metrics_server=metrics,
                    links=links if before is None else _links(settings.in_role(role)),
                    watch=watch, in_role=make_driver, before=before,
                )  # fmt: skip

            if status := await _drive(make_driver(Role(settings.role)), stop, logger):
                return status
        await metrics.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _log_loaded(logger: Log, engine: LoadedEngine) -> None:
    logger.info(
        "loaded",
        kv_blocks=engine.blocks,
        backend=engine.backend,
        numerics=engine.numerics,
        batch_invariant=engine.is_batch_invariant,
    )


def _links(settings: WorkerSettings) -> LinkSettings:
    """Each role has a key of its own. Raises `ConfigError`."""
    bound = {"--kv-bind": settings.kv_bind} if settings.role == "decode" else {}
    return LinkSettings(heartbeat_ms=settings.heartbeat_ms, keys=keys_for(settings, Role(settings.role), bound))


async def _drive(driver: WorkerDriver, stop: Stop, logger: Log) -> int:
    """One role after the other; returns the exit code."""
    following: WorkerDriver | None = driver
    try:
        while following is not None:
            driver, following = following, await following.run(stop)
    except CannotBind as error:
        machine.check_listening("--kv-bind", error)
        logger.error("cannot start", error=f"--kv-bind: {error.strerror}")
        return 1
    except TimeoutError:
        logger.critical("cannot change the role, as a KV transfer does not end; ending", role=driver.settings.role)
        return 1
    return 0


def leave_cores(cores: tuple[int, ...]) -> None:
    """Move this thread, and those it will make, off the cores of the one that computes: they are its own from now on."""
    rest = os.sched_getaffinity(0) - set(cores)
    if cores and rest:
        os.sched_setaffinity(0, rest)
