"""The process of a worker of either role: load the model on the compute thread, then drive the worker until told to stop."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from proto.errors import BadOption, CrossdockError
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.link.server import CannotBind, LinkSettings
from runtime.metrics.server import MetricsServer
from runtime.process import garbage_collector as collector
from runtime.process import log
from runtime.process.driver import Stop, run_process, unless_stopped
from runtime.process.exits import ConfigError
from runtime.process.niceness import be_nice_as_group
from runtime.settings import machine
from runtime.settings.workers import WorkerSettings
from runtime.worker.driver import EngineT, WorkerDriver
from runtime.worker.role import WorkerRole


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
    """Call `load` on `thread`, then drive the role that is made with its result until SIGTERM or SIGINT. `be_nice(niceness)`
    is called on `thread` once the model is loaded. Returns the exit code; raises `ConfigError`, as `load` may, or in place of
    its `BadOption`."""

    bound = {"--kv-bind": settings.kv_bind} if settings.role == "decode" else {}
    links = LinkSettings(heartbeat_ms=settings.heartbeat_ms, keys=keys_for(settings, Role(settings.role), bound))

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
            driver = WorkerDriver(
                settings, engine, make_role, thread=thread, name=name, log=logger, links=links, metrics_server=metrics
            )
            try:
                await driver.run(stop)
            except CannotBind as error:
                machine.check_listening("--kv-bind", error)
                logger.error("cannot start", error=f"--kv-bind: {error.strerror}")
                return 1
        await metrics.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def leave_cores(cores: tuple[int, ...]) -> None:
    """Move this thread, and those it will make, off the cores of the one that computes: they are its own from now on."""
    rest = os.sched_getaffinity(0) - set(cores)
    if cores and rest:
        os.sched_setaffinity(0, rest)
