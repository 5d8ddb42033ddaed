"""The prefill worker process."""

from engine.engine import Engine
from engine.model.loader import load_engine
from engine.thread import EngineThread, pick_device
from kvtransfer.transports.registry import allowed_on
from prefill_worker.worker import PrefillWorker
from runtime.process.niceness import be_nice_as_group
from runtime.settings.workers import WorkerSettings
from runtime.worker.process import as_config_error, run_worker


def run(settings: WorkerSettings) -> int:
    """Compute prompts until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)

    device = pick_device(settings.device)
    with as_config_error():
        allowed_on(settings.kv_transport, device, settings.transfer_encryption == "on")

    def load() -> Engine:
        engine = load_engine(
            settings.model,
            device=device,
            dtype=settings.dtype,
            block_size=settings.block_size,
            kv_bytes=int(settings.kv_gib * (1 << 30)),
        )
        thread.be_nice(settings.nice)
        if settings.nice:
            be_nice_as_group(settings.nice)
        return engine

    return run_worker(
        settings,
        thread=thread,
        load=load,
        make=lambda engine, log, name, links, observed: PrefillWorker(
            settings, engine, thread, log, name, links, observed
        ),
    )
