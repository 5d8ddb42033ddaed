"""What a worker process needs of its roles: one engine and one allocator, over which either is made."""

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.gpu.memory import GpuShare
from engine.kv.allocator import BlockAllocator
from engine.model.loader import load_engine
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import allowed_on, memory_for
from kvtransfer.transports.transport import PoolMemory
from prefill_worker.worker import PrefillWorker
from runtime.settings.workers import WorkerSettings
from runtime.worker.driver import WorkerDriver
from runtime.worker.process import as_config_error, run_worker
from runtime.worker.role import WorkerRole


class Roles:
    """Makes the role of a driver. What is cached in the blocks stays from one role to the next."""

    def __init__(self, transports: tuple[str, ...], memory: PoolMemory | None) -> None:
        self._transports, self._memory = transports, memory
        self._blocks: BlockAllocator | None = None

    def make(self, engine: Engine, driver: WorkerDriver) -> WorkerRole:
        if self._blocks is None:
            self._blocks = BlockAllocator(engine.blocks)
        if driver.settings.role == "prefill":
            return PrefillWorker(engine, self._blocks, driver, self._transports)
        return DecodeWorker(engine, self._blocks, driver, self._transports, self._memory)


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)
    device = pick_device(settings.device)
    with as_config_error():
        transports = allowed_on(settings.kv_transport, device, settings.transfer_encryption == "on")
    memory = memory_for(transports, device)
    return run_worker(
        settings,
        thread=thread,
        load=lambda: load_engine(
            settings.model,
            device=device,
            dtype=settings.dtype,
            weights=settings.weights,
            block_size=settings.block_size,
            kv_bytes=settings.kv_bytes_on(device),
            gpu=GpuShare(settings.gpu_memory_share, settings.step_tokens_max, settings.max_seqs),
            # Also in a prefill worker: it may become one that receives.
            allocate=memory.allocate if memory is not None else None,
        ),
        be_nice=thread.be_nice,
        make_role=Roles(transports, memory).make,
    )
