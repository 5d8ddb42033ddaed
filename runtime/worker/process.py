"""What both worker processes do around their worker: load on the engine thread, run until told to stop."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from proto.errors import BadOption, CrossdockError
from proto.messages import Message, Role
from proto.progress import Hung
from proto.status import KvHeld
from runtime.link.keys import keys_for
from runtime.link.server import CannotBind, LinkSettings
from runtime.metrics.server import MetricsServer
from runtime.process import clock, log, notify
from runtime.process import garbage_collector as collector
from runtime.process.driver import Stop, run_process, unless_stopped, watched
from runtime.process.exits import GPU_EXIT, HUNG_EXIT, ConfigError
from runtime.process.log import Log
from runtime.process.zmq_sockets import close_sockets
from runtime.settings import machine
from runtime.settings.workers import WorkerSettings
from runtime.worker.gpu_faults import breaks_cuda_context
from runtime.worker.registration import Registration
from runtime.worker.step_watch import StepWatch

_STEP_END_S = 5.0

EngineT = TypeVar("EngineT")


class RunsUntilStopped(Protocol):
    async def run(self, stop: Stop) -> None: ...


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
    make: Callable[[EngineT, Log, str, LinkSettings, MetricsServer], RunsUntilStopped],
) -> int:
    """Load on `thread`, then `make(engine, log, name, links, observed).run(stop)` until SIGTERM or SIGINT. Returns the exit
    code; raises `ConfigError`, as `load` may, or in place of its `BadOption`."""

    bound = {"--kv-bind": settings.kv_bind} if settings.role == "decode" else {}
    links = LinkSettings(heartbeat_ms=settings.heartbeat_ms, keys=keys_for(settings, Role(settings.role), bound))

    async def main(stop: Stop) -> int:
        name = settings.name or f"{settings.role}-{os.getpid()}"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        observed = MetricsServer(settings.metrics, settings.advertise)
        await observed.start()
        logger.info("loading", model=settings.model)
        try:
            with as_config_error(), collector.at_rest():
                engine = await unless_stopped(stop, thread, load)
        except ConfigError:
            raise
        except (CrossdockError, OSError, ValueError, RuntimeError) as error:
            logger.error("cannot load the model", model=settings.model, error=str(error))
            return 1
        if engine is not None:
            leave_cores(settings.cores)
            try:
                await make(engine, logger, name, links, observed).run(stop)
            except CannotBind as error:
                machine.check_listening("--kv-bind", error)
                logger.error("cannot start", error=f"--kv-bind: {error.strerror}")
                return 1
        await observed.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class Blocks(Protocol):
    """`engine.kv.allocator.BlockAllocator` is the real one."""

    @property
    def held_count(self) -> int: ...
    @property
    def quarantined_count(self) -> int: ...


def kv_held(blocks: Blocks, sessions: int) -> KvHeld:
    """The answer to a `StatusRequest`."""
    return KvHeld(blocks.held_count, blocks.quarantined_count, sessions)


def leave_cores(cores: tuple[int, ...]) -> None:
    """Move this thread, and those it will make, off the cores of the one that computes: they are its own from now on."""
    rest = os.sched_getaffinity(0) - set(cores)
    if cores and rest:
        os.sched_setaffinity(0, rest)


async def work_until_stopped(
    steps: Coroutine[Any, Any, None],
    *,
    registration: Registration,
    thread: Executor,
    watch: StepWatch,
    stop: Stop,
    drain_timeout_s: float,
    close_transfers: Callable[[], Awaitable[None]],
    logger: Log,
) -> None:
    """Registered, run `steps`, which compute on `thread`, until told to stop; then take leave of what runs. Raises what `steps`
    ended with."""
    notify.only_while(notify.Pulse(thread, clock.now, lambda: watch.longest_s))
    await registration.start()
    stepping, stopping = watched(steps), asyncio.get_running_loop().create_task(stop.wait())
    watching = watched(end_if_hung(watch, registration.send, logger))
    try:
        await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stepping.done():
            await registration.leave(drain_timeout_s, stop)
    finally:
        stopping.cancel()
        stepping.cancel()
        watching.cancel()
        await asyncio.wait({stepping}, timeout=_STEP_END_S)
        await registration.close()
        # Late: a transfer thread is stuck with a dead peer; the process ends anyway.
        with contextlib.suppress(TimeoutError):
            await close_transfers()
    if stepping.done() and not stepping.cancelled():
        stepping.result()


def end_if_gpu_is_lost(error: BaseException, logger: Log) -> None:
    """End with a status of its own where after this error, of the model or a transfer, every CUDA call of this process fails.

    To be called on the event loop, when those whose work failed have been told. What runs here goes on elsewhere; a worker that
    stayed would fail all that it is given.
    """
    if not breaks_cuda_context(error):
        return
    logger.critical(
        "this process cannot use its GPU any more; ending", error=(str(error).splitlines() or [""])[0][:300]
    )
    logging.shutdown()
    close_sockets()
    os._exit(GPU_EXIT)


async def end_if_hung(watch: StepWatch, tell: Callable[[Message], None], logger: Log) -> None:
    """Look after the compute thread, which cannot be interrupted: where its step hangs, tell the coordinator, and end."""
    while watch.timeout_s:
        await asyncio.sleep(watch.look_every_s)
        ran_s = watch.hung_for(clock.now())
        if ran_s is None:
            continue
        logger.critical("a step hangs (--step-timeout-ms); ending", ran_s=round(ran_s, 1))
        tell(Hung(1000 * ran_s))
        faulthandler.dump_traceback(sys.stderr)
        logging.shutdown()
        close_sockets()
        os._exit(HUNG_EXIT)
