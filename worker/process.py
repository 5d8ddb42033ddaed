"""The process of a worker: load the model on the compute thread, then drive the worker until told to stop. Prefill, decode, or
both share one engine, one KV pool and one prefix cache; a mixed worker is driven in both roles at once, each over its own share
of the pool. `role_change` has what happens when it takes another role.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from importlib import import_module
from typing import NoReturn

import torch

from engine.engine import Engine
from engine.gpu.memory import GpuShare
from engine.kv.allocator import BlockAllocator, BlockPool
from engine.kv.split import prefill_blocks
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import TRANSPORTS, WrongTransport, allowed_on, memory_for, within_process
from kvtransfer.transports.transport import PoolMemory
from proto.errors import BadOption, CrossdockError
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.link.server import LinkSettings
from runtime.link.tls import tls_of
from runtime.metrics.combined import CombinedPage
from runtime.metrics.server import MetricsPage, MetricsServer
from runtime.process import clock, garbage_collector, log, notify
from runtime.process.driver import Stop, keep_memory_private, run_process, unless_stopped
from runtime.process.exits import HUNG_EXIT, ConfigError
from runtime.process.log import Log
from runtime.settings import machine
from runtime.settings.workers import MIXED_NAME_CHARS, WorkerSettings
from worker.changeover import Changeover
from worker.driver import WorkerDriver, WorkerRole
from worker.role_change import RoleDrivers, run_roles
from worker.step_watch import StepWatch

ROLES = {"prefill": ("prefill_worker.worker", "PrefillRole"), "decode": ("decode_worker.worker", "DecodeRole")}
"""The classes of the roles are named only, since their packages import this one."""
MakeRole = Callable[[Engine, BlockAllocator, WorkerDriver, tuple[str, ...], set[int], PoolMemory | None], WorkerRole]


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """A `BadOption` raised inside is a `ConfigError` outside."""
    try:
        yield
    except BadOption as error:
        raise ConfigError(f"{error.option}: {error}") from error


def run_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    role = Role(settings.role)
    for one in role.registers_as:
        _links(settings.in_role(one))  # what is wrong with the keys is said before the model is loaded
    thread = EngineThread(threads=settings.threads, cores=settings.cores)
    device = pick_device(settings.device)
    with as_config_error():
        transports = allowed_on(settings.kv_transport, device, settings.confidential_transfers)
        if role is Role.MIXED:
            check_within_process(settings, transports)
    memory = memory_for(transports, device)

    async def main(stop: Stop) -> int:
        name = settings.name or f"{settings.role}-{os.getpid()}"
        logger = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        metrics = MetricsServer(settings.metrics, settings.advertise, tls_of(settings))
        await metrics.start()
        logger.info("loading", model=settings.model)
        try:
            with as_config_error(), garbage_collector.at_rest():
                engine = await unless_stopped(stop, thread, lambda: _load(settings, device, memory, thread))
        except ConfigError:
            raise
        except (CrossdockError, OSError, ValueError, RuntimeError) as error:
            logger.error("cannot load the model", model=settings.model, error=str(error))
            return 1
        if engine is not None:
            leave_cores(settings.cores)
            _log_loaded(logger, engine)
            one_pool = memory if len(engine.pools) == 1 else None
            process = _Process(settings, name, logger, metrics, thread, engine, transports, one_pool)
            if status := await run_roles(RoleDrivers(process.drivers, role), stop, logger):
                return status
        await metrics.close()
        logger.info("stopped")
        return 0

    try:
        return run_process(main, private=False)  # not before the session's niceness is set
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _load(settings: WorkerSettings, device: str, memory: PoolMemory | None, thread: EngineThread) -> Engine:
    """Called on the thread."""
    load = _load_vllm if settings.engine == "vllm" else _load_own
    # Memory is provided for a prefill worker, too, because it may become a worker that receives.
    engine = load(settings, device, memory.allocate if memory is not None else None)
    thread.be_nice(settings.nice)
    if not engine.on_gpu:
        keep_memory_private()
    return engine


def _load_own(settings: WorkerSettings, device: str, allocate: Callable[[int], torch.Tensor] | None) -> Engine:
    from engine.model.loader import load_engine

    return load_engine(
        settings.model,
        device=device,
        dtype=settings.dtype,
        weights=settings.weights,
        block_size=settings.block_size,
        context_tokens_max=settings.max_model_len,
        kv_bytes=settings.kv_bytes_on(device),
        gpu=GpuShare(settings.gpu_memory_share, settings.step_tokens_max, settings.max_seqs),
        allocate=allocate,
        host_bytes=machine.free_memory_bytes(),
        on_progress=log.get("crossdock.model").info,
    )


def _load_vllm(settings: WorkerSettings, device: str, allocate: Callable[[int], torch.Tensor] | None) -> Engine:
    from engine.vllm.load import load_engine
    from worker.rank import map_pool

    return load_engine(
        settings.model,
        device=device,
        dtype=settings.dtype,
        context_tokens_max=settings.max_model_len,
        kv_bytes=settings.kv_bytes_on(device),
        gpu_share=settings.gpu_memory_share,
        step_tokens=settings.step_tokens_max,
        rows=settings.max_seqs,
        args=settings.vllm_args,
        allocate=allocate,
        map_pool=map_pool,
        on_progress=log.get("crossdock.model").info,
        on_lost_rank=_end_without_rank,
    )


def _end_without_rank(why: str) -> NoReturn:
    log.get("crossdock.engine").critical("a rank of the model is lost", why=why)
    logging.shutdown()
    os._exit(HUNG_EXIT)


class _Process:
    """The resources that all drivers of this process share, whatever its role. Cached blocks stay when the roles change."""

    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        logger: Log,
        metrics: MetricsServer,
        thread: Executor,
        engine: Engine,
        transports: tuple[str, ...],
        memory: PoolMemory | None,
    ) -> None:
        self._settings, self._name, self._log, self._metrics = settings, name, logger, metrics
        self._thread, self._engine, self._transports, self._memory = thread, engine, transports, memory
        self._pool = BlockPool(engine.pool.shape[0])
        self._receivers: set[int] = set()  # incarnations of the decode workers that this process is, or was
        say_what_is_encrypted(settings, transports, engine.pool.device.type, logger)
        self._watch = watch = StepWatch(settings.step_timeout_ms / 1000)
        # A request to the thread waits for one step of each role.
        notify.only_while(notify.Pulse(thread, clock.now, lambda: len(Role.MIXED.registers_as) * watch.longest_s))

    def drivers(self, role: Role, before: Sequence[WorkerDriver], changeover: Changeover) -> list[WorkerDriver]:
        """One for each role that the process registers in then. Those of a mixed worker share its metrics' page. Raises
        `ConfigError`."""
        roles, settings, name = role.registers_as, self._settings, self._name
        is_mixed = len(roles) > 1
        if is_mixed and len(name) > MIXED_NAME_CHARS:
            raise ConfigError(
                f"--name: {name} is too long for a mixed worker, which registers as NAME-prefill and NAME-decode"
            )
        page: MetricsPage = CombinedPage(self._metrics, len(roles)) if is_mixed else self._metrics
        readiness = _Readiness(roles)
        with as_config_error():
            shares = engine_shares(self._engine, role, settings, self._transports)
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

    def _make_role(self, engine: Engine, driver: WorkerDriver) -> WorkerRole:
        module, name = ROLES[driver.settings.role]
        make: MakeRole = getattr(import_module(module), name)
        blocks = BlockAllocator(engine.blocks, self._pool)
        with as_config_error():
            return make(engine, blocks, driver, self._transports, self._receivers, self._memory)


class _Readiness:
    """A process is ready once it is registered in each of its roles."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._missing = set(roles)
        self._words = f"registered as {' and '.join(roles)} worker"

    def registered(self, role: Role) -> None:
        self._missing.discard(role)
        if not self._missing:
            notify.ready(self._words)


def _log_loaded(logger: Log, engine: Engine) -> None:
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


# --- the roles' shares of the pool, and how KV leaves it --------------------------------------------------------------


def engine_shares(
    engine: Engine, role: Role, settings: WorkerSettings, transports: tuple[str, ...]
) -> dict[Role, Engine]:
    """Returns each role's share of the engine. Raises `MixedPoolTooSmall` and `WrongTransport`."""
    if role is not Role.MIXED:
        return {role: engine}
    check_within_process(settings, transports)
    return split(engine, settings)


def check_within_process(settings: WorkerSettings, transports: tuple[str, ...]) -> None:
    """Raises `WrongTransport` where the roles of a mixed worker could not reach each other."""
    if not within_process(transports):
        raise WrongTransport(
            f"{settings.kv_transport} does not work within one process, as the two roles of a mixed worker need; auto does"
        )


def say_what_is_encrypted(settings: WorkerSettings, transports: tuple[str, ...], device: str, log: Log) -> None:
    """Logs which transports may send KV unencrypted to another host although there are keys, and which are not used for that
    reason."""
    if not settings.keys:
        return
    clear = [name for name in transports if not TRANSPORTS[name].confidential]
    clear += ["tcp"] if "tcp" in transports and not settings.encrypts_transfers else []
    left_out = [name for name in allowed_on(settings.kv_transport, device) if name not in transports]
    if clear:
        log.warning(
            "KV may cross to other hosts in the clear",
            transports=clear,
            because="--kv-transport, --transfer-encryption",
        )
    elif left_out:
        how = f"--kv-transport {left_out[0]} or --transfer-encryption off"
        log.info("KV crosses to other hosts encrypted", not_used=left_out, to_use_them=how)


class MixedPoolTooSmall(BadOption):
    pass


def split(engine: Engine, settings: WorkerSettings) -> dict[Role, Engine]:
    """Divides the pool between the roles of a mixed worker. Raises `MixedPoolTooSmall`."""
    info, blocks = engine.info, engine.blocks
    context = -(-info.context_tokens // info.block_size)
    if blocks < 2 * context:
        needed, there = (count * info.block_bytes / (1 << 30) for count in (2 * context, blocks))
        error = MixedPoolTooSmall(
            f"a mixed worker needs room for two contexts of {info.context_tokens} tokens, one in each role: {needed:.3g} GiB of"
            f" KV cache; there are {there:.3g}. --max-model-len makes a context shorter"
        )
        error.option = "--gpu-memory-share" if settings.kv_bytes_on(engine.pool.device.type) is None else "--kv-gib"
        raise error
    prefill = prefill_blocks(blocks, context)
    return {Role.PREFILL: engine.part(prefill), Role.DECODE: engine.part(blocks - prefill)}
