"""Makes the roles of a worker process. Prefill, decode, or both share one engine, one KV pool and one prefix cache; each role
has an allocator of its own.
"""

import logging
import os
from collections.abc import Callable
from typing import NoReturn

import torch

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.gpu.memory import GpuShare
from engine.kv.allocator import BlockAllocator, BlockPool
from engine.kv.split import prefill_blocks
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import TRANSPORTS, WrongTransport, allowed_on, memory_for, within_process
from kvtransfer.transports.transport import PoolMemory
from prefill_worker.worker import PrefillWorker
from proto.errors import BadOption
from proto.messages import Role
from runtime.process import log
from runtime.process.exits import HUNG_EXIT
from runtime.process.log import Log
from runtime.settings import machine
from runtime.settings.workers import WorkerSettings
from runtime.worker.driver import WorkerDriver
from runtime.worker.process import as_config_error, run_worker
from runtime.worker.role import WorkerRole


class Roles:
    """Makes the drivers of the roles. They share the blocks of the pool, and cached blocks stay when the roles change."""

    def __init__(self, transports: tuple[str, ...], memory: PoolMemory | None) -> None:
        self._transports, self._memory = transports, memory
        self._pool: BlockPool | None = None
        self._receivers: set[int] = set()  # incarnations of the decode workers that this process is, or was

    def make(self, engine: Engine, driver: WorkerDriver) -> WorkerRole:
        if self._pool is None:
            self._pool = BlockPool(engine.pool.shape[0])
            say_what_is_encrypted(driver.settings, self._transports, engine.pool.device.type, driver.log)
        blocks = BlockAllocator(engine.blocks, self._pool)
        if driver.settings.role == "prefill":
            with as_config_error():
                return PrefillWorker(engine, blocks, driver, self._transports, self._receivers, self._memory)
        self._receivers.add(driver.hello.incarnation)
        return DecodeWorker(engine, blocks, driver, self._transports, self._memory)

    def shares(self, engine: Engine, role: Role, settings: WorkerSettings) -> dict[Role, Engine]:
        """Returns each role's share of the engine. Raises `MixedPoolTooSmall` and `WrongTransport`."""
        if role is not Role.MIXED:
            return {role: engine}
        check_within_process(settings, self._transports)
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
    """The pool is too small for a mixed worker."""


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


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)
    device = pick_device(settings.device)
    with as_config_error():
        transports = allowed_on(settings.kv_transport, device, settings.confidential_transfers)
        if settings.role == "mixed":
            check_within_process(settings, transports)
    memory = memory_for(transports, device)
    roles = Roles(transports, memory)
    return run_worker(
        settings,
        thread=thread,
        load=lambda: _load(settings, device, memory.allocate if memory is not None else None),
        be_nice=thread.be_nice,
        make_role=roles.make,
        shares=lambda engine, role: roles.shares(engine, role, settings),
    )


def _end_without_rank(why: str) -> NoReturn:
    log.get("crossdock.engine").critical("a rank of the model is lost", why=why)
    logging.shutdown()
    os._exit(HUNG_EXIT)


def _load(settings: WorkerSettings, device: str, allocate: Callable[[int], torch.Tensor] | None) -> Engine:
    """`allocate` is set for a prefill worker, too, because it may become a worker that receives."""
    on_progress = log.get("crossdock.model").info
    if settings.engine == "vllm":
        from engine.vllm.load import load_engine as load_vllm

        return load_vllm(
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
            on_progress=on_progress,
            on_lost_rank=_end_without_rank,
        )
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
        on_progress=on_progress,
    )
