"""`python -m prefill_worker`: this role alone, for unit files and launchers."""

from runtime import collector, machine
from runtime.exits import leave
from runtime.options import run_role
from runtime.worker_settings import WorkerSettings


def _run(settings: WorkerSettings) -> int:
    settings = machine.prepare(settings)
    with collector.at_rest():
        from prefill_worker.main import run  # here, so that --help and a wrong option answer at once

    return run(settings)


if __name__ == "__main__":
    leave(run_role("prefill_worker", WorkerSettings, _run, fixed={"role": "prefill"}))
