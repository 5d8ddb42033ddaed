"""The decode worker process."""

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.loader import load_engine
from engine.thread import EngineThread, pick_device
from kvtransfer.memory import SharedMemory
from kvtransfer.settings import allowed_transports
from runtime.settings import WorkerSettings
from runtime.worker_process import run_worker


def run(settings: WorkerSettings) -> int:
    """Stream answers until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)

    device = pick_device(settings.device)
    shared = device == "cpu" and "shm" in allowed_transports(settings.kv_transport)
    memory = SharedMemory() if shared else None

    def load() -> Engine:
        engine = load_engine(
            settings.model,
            device=device,
            dtype=settings.dtype,
            block_size=settings.block_size,
            kv_bytes=int(settings.kv_gib * (1 << 30)),
            step_tokens_max=settings.max_seqs,
            allocate=memory.allocate if memory is not None else None,
        )
        thread.be_nice(settings.nice)
        return engine

    return run_worker(
        settings,
        thread=thread,
        load=load,
        make=lambda engine, log, name: DecodeWorker(settings, engine, thread, log, name, memory),
    )
