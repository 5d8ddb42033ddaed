"""The decode worker process."""

from decode_worker.worker import DecodeWorker
from engine.model.loader import load_engine
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import allowed_on, memory_for
from runtime.settings.workers import WorkerSettings
from runtime.worker.process import as_config_error, run_worker


def run(settings: WorkerSettings) -> int:
    """Stream answers until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
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
            kv_bytes=settings.kv_bytes,
            allocate=memory.allocate if memory is not None else None,
        ),
        be_nice=thread.be_nice,
        make_role=lambda engine, driver: DecodeWorker(engine, driver, transports, memory),
    )
