"""`crossdock worker`: one process of either role."""

from runtime.settings import machine
from runtime.settings.workers import WorkerSettings


def run(settings: WorkerSettings) -> int:
    settings = machine.prepare(settings)
    # Each imports torch, which must not come before the environment that `prepare` sets.
    if settings.role == "prefill":
        from prefill_worker.main import run as run_prefill

        return run_prefill(settings)
    from decode_worker.main import run as run_decode

    return run_decode(settings)
