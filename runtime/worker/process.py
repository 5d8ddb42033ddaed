"""The process of a worker: load the model on the compute thread, then drive the worker until told to stop. A mixed worker is
driven in both roles at once, each over its own share of the KV pool. `role_change` has what happens when it takes another role.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Generic

from proto.errors import BadOption, CrossdockError
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.link.server import LinkSettings
from runtime.metrics.combined import CombinedPage
from runtime.metrics.server import MetricsPage, MetricsServer
from runtime.process import clock, garbage_collector, log, notify
from runtime.process.driver import Stop, keep_memory_private, run_process, unless_stopped
from runtime.process.exits import ConfigError
from runtime.process.log import Log
from runtime.settings.workers import MIXED_NAME_CHARS, WorkerSettings
from runtime.worker.changeover import Changeover
from runtime.worker.driver import EngineT, WorkerDriver
from runtime.worker.niceness import be_nice_as_group
from runtime.worker.role import LoadedEngine, WorkerRole
from runtime.worker.role_change import RoleDrivers, run_roles
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
    shares: Callable[[EngineT, Role], Mapping[Role, EngineT]],
) -> int:
    """Call `load` on `thread`, then drive the roles that `make_role` makes of its result until SIGTERM or SIGINT. It is called
    again for each change of role, with a driver whose settings name the new one. `shares` gives each of a process's roles its
    share of the engine. `be_nice(niceness)` is called on `thread` once the model is loaded. Returns the exit code; raises
    `ConfigError`, as `load` and `shares` may, or in place of their `BadOption`."""
    role = Role(settings.role)
    for one in role.registers_as:
        _links(settings.in_role(one))  # what is wrong with the keys is said before the model is loaded

    def load_and_be_nice() -> EngineT:
        engine = load()
        be_nice(settings.nice)
        if settings.nice:
            be_nice_as_group(settings.nice)
        if not engine.on_gpu:
            keep_memory_private()
        return engine

    async def main(stop: Stop) -> int:
        name = settings.name or f"{settings.role}-{os.getpid()}"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        metrics = MetricsServer(settings.metrics, settings.advertise)
        await metrics.start()
        logger.info("loading", model=settings.model)
        try:
            with as_config_error(), garbage_collector.at_rest():
                engine = await unless_stopped(stop, thread, load_and_be_nice)
        except ConfigError:
            raise
        except (CrossdockError, OSError, ValueError, RuntimeError) as error:
            logger.error("cannot load the model", model=settings.model, error=str(error))
            return 1
        if engine is not None:
            leave_cores(settings.cores)
            _log_loaded(logger, engine)
            process = _Process(settings, name, logger, metrics, thread, lambda role: shares(engine, role), make_role)
            if status := await run_roles(RoleDrivers(process.drivers, role), stop, logger):
                return status
        await metrics.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main, private=False)  # not before the session's niceness is set
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class _Process(Generic[EngineT]):
    """The resources that all drivers of this process share, whatever its role."""

    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        logger: Log,
        metrics: MetricsServer,
        thread: Executor,
        shares: Callable[[Role], Mapping[Role, EngineT]],
        make_role: Callable[[EngineT, WorkerDriver], WorkerRole],
    ) -> None:
        self._settings, self._name, self._log, self._metrics = settings, name, logger, metrics
        self._thread, self._shares, self._make_role = thread, shares, make_role
        self._watch = watch = StepWatch(settings.step_timeout_ms / 1000)
        # A request to the thread waits for one step of each role.
        notify.only_while(notify.Pulse(thread, clock.now, lambda: len(Role.MIXED.registers_as) * watch.longest_s))

    def drivers(self, role: Role, before: Sequence[WorkerDriver], changeover: Changeover) -> list[WorkerDriver]:
        """One for each role that the process registers in then. Those of a mixed worker share its metrics' page. Raises
        `ConfigError`, and what `make_role` raises."""
        roles, settings, name = role.registers_as, self._settings, self._name
        is_mixed = len(roles) > 1
        if is_mixed and len(name) > MIXED_NAME_CHARS:
            raise ConfigError(
                f"--name: {name} is too long for a mixed worker, which registers as NAME-prefill and NAME-decode"
            )
        page: MetricsPage = CombinedPage(self._metrics, len(roles)) if is_mixed else self._metrics
        readiness = _Readiness(roles)
        with as_config_error():
            shares = self._shares(role)
        made = [
            WorkerDriver(
                settings.in_role(one), shares[one], self._make_role, thread=self._thread,
                name=f"{name}-{one}" if is_mixed else name,
                log=self._log.bind(role=str(one)) if is_mixed or before else self._log,
                links=_links(settings.in_role(one)), metrics_server=page, watch=self._watch,
                say_ready=readiness.registered, changeover=changeover, process=name if is_mixed else "", before=before,
            )
            for one in roles
        ]  # fmt: skip
        made[0].registration.succeeds([driver.registration for driver in before])
        return made


class _Readiness:
    """A process is ready once it is registered in each of its roles."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._missing = set(roles)
        self._words = f"registered as {' and '.join(roles)} worker"

    def registered(self, role: Role) -> None:
        self._missing.discard(role)
        if not self._missing:
            notify.ready(self._words)


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


def leave_cores(cores: tuple[int, ...]) -> None:
    """Move this thread, and those it will make, off the cores of the one that computes: they are its own from now on."""
    rest = os.sched_getaffinity(0) - set(cores)
    if cores and rest:
        os.sched_setaffinity(0, rest)
