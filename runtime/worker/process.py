"""The process of a worker: load the model on the compute thread, then drive the worker, in one role after the other, until told
to stop. A mixed worker is driven in both roles at once, each over its own part of the KV pool.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor

from proto.errors import BadOption, CrossdockError
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.link.server import CannotBind, LinkSettings
from runtime.metrics.combined import CombinedPage
from runtime.metrics.server import MetricsPage, MetricsServer
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
    split: Callable[[EngineT], Mapping[Role, EngineT]],
) -> int:
    """Call `load` on `thread`, then drive the role that `make_role` makes of its result until SIGTERM or SIGINT. It is called
    again for each change of role, with a driver whose settings name the new one. `split` gives each role of a mixed worker its
    part of the engine. `be_nice(niceness)` is called on `thread` once the model is loaded. Returns the exit code; raises
    `ConfigError`, as `load` and `split` may, or in place of their `BadOption`."""

    links = {role: _links(settings.in_role(role)) for role in settings.roles}

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
            with as_config_error():
                parts = split(engine) if len(settings.roles) > 1 else {Role(settings.role): engine}
            leave_cores(settings.cores)
            _log_loaded(logger, engine)
            drivers = _drivers(settings, parts, make_role, thread, name, logger, metrics, links)
            statuses = await asyncio.gather(*(_drive(driver, stop, logger) for driver in drivers))
            if any(statuses):
                return max(statuses)
        await metrics.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _drivers(
    settings: WorkerSettings,
    parts: Mapping[Role, EngineT],
    make_role: Callable[[EngineT, WorkerDriver], WorkerRole],
    thread: Executor,
    name: str,
    logger: Log,
    metrics: MetricsServer,
    links: Mapping[Role, LinkSettings],
) -> list[WorkerDriver]:
    """One for each role with a part of the engine. Those of a mixed worker share thread, watch and metrics."""
    is_mixed = len(parts) > 1
    watch = StepWatch(settings.step_timeout_ms / 1000)
    # What is asked of the thread waits for one step of each role.
    notify.only_while(notify.Pulse(thread, clock.now, lambda: len(parts) * watch.longest_s))
    page: MetricsPage = CombinedPage(metrics, len(parts)) if is_mixed else metrics
    readiness = _Readiness(parts)

    def make(role: Role, before: WorkerDriver | None = None) -> WorkerDriver:
        engine = parts[role] if before is None else parts[Role(settings.role)]
        return WorkerDriver(
            settings.in_role(role), engine, make_role, thread=thread,
            name=f"{name}-{role}" if is_mixed else name,
            log=logger.bind(role=str(role)) if is_mixed else logger, metrics_server=page,
            links=links[role] if before is None else _links(settings.in_role(role)),
            watch=watch, in_role=_keeps_its_role if is_mixed else make, before=before,
            say_ready=readiness.registered,
        )  # fmt: skip

    return [make(role) for role in parts]


class _Readiness:
    """A process is ready once it is registered in each of its roles."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._missing = set(roles)
        self._words = f"registered as {' and '.join(roles)} worker"

    def registered(self, role: Role) -> None:
        self._missing.discard(role)
        if not self._missing:
            notify.ready(self._words)


def _keeps_its_role(role: Role, driver: WorkerDriver) -> WorkerDriver:
    raise ConfigError(f"{driver.name} is one half of a mixed worker, which cannot become a {role} worker while it runs")


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
    """One role after the other; returns the exit code. On a failure, what else this process does is to stop, too."""
    following: WorkerDriver | None = driver
    try:
        while following is not None:
            driver, following = following, await following.run(stop)
    except CannotBind as error:
        machine.check_listening("--kv-bind", error)
        logger.error("cannot start", error=f"--kv-bind: {error.strerror}")
        stop.set()
        return 1
    except TimeoutError:
        logger.critical("cannot change the role, as a KV transfer does not end; ending", role=driver.settings.role)
        stop.set()
        return 1
    return 0


def leave_cores(cores: tuple[int, ...]) -> None:
    """Move this thread, and those it will make, off the cores of the one that computes: they are its own from now on."""
    rest = os.sched_getaffinity(0) - set(cores)
    if cores and rest:
        os.sched_setaffinity(0, rest)
