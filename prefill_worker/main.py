"""The prefill worker process."""

from engine.engine import Engine
from engine.loader import load_engine
from engine.thread import EngineThread, pick_device
from prefill_worker.worker import PrefillWorker
from runtime.settings import WorkerSettings
from runtime.worker_process import run_worker


def run(settings: WorkerSettings) -> int:
    """Compute prompts until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    thread = EngineThread(threads=settings.threads, cores=settings.cores)

    def load() -> Engine:
        engine = load_engine(
            settings.model,
            device=pick_device(settings.device),
            dtype=settings.dtype,
            block_size=settings.block_size,
            kv_bytes=int(settings.kv_gib * (1 << 30)),
            step_tokens_max=settings.step_tokens_max,
        )
        thread.be_nice(settings.nice)
        return engine

    return run_worker(
        settings,
        thread=thread,
        load=load,
        make=lambda engine, log, name: PrefillWorker(settings, engine, thread, log, name),
    )
