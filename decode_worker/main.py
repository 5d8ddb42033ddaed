"""The decode worker process."""

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.model.loader import load_engine
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import allowed_on, memory_for
from runtime.process.niceness import be_nice_as_group
from runtime.settings.workers import WorkerSettings
from runtime.worker.process import as_config_error, run_worker


def run(settings: WorkerSettings) -> int:
    """Stream answers until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)

    device = pick_device(settings.device)
    with as_config_error():
        confidential = settings.transfer_encryption == "on"
        memory = memory_for(allowed_on(settings.kv_transport, device, confidential), device)

    def load() -> Engine:
        engine = load_engine(
            settings.model,
            device=device,
            dtype=settings.dtype,
            block_size=settings.block_size,
            kv_bytes=int(settings.kv_gib * (1 << 30)),
            allocate=memory.allocate if memory is not None else None,
        )
        thread.be_nice(settings.nice)
        if settings.nice:
            be_nice_as_group(settings.nice)
        return engine

    return run_worker(
        settings,
        thread=thread,
        load=load,
        make=lambda engine, log, name, links, observed: DecodeWorker(
            settings, engine, thread, log, name, links, memory, observed
        ),
    )
