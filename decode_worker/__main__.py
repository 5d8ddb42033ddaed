"""`python -m decode_worker`: this role alone, for unit files and launchers."""

from runtime.process import garbage_collector as collector
from runtime.process.exits import leave
from runtime.settings import machine
from runtime.settings.command_line import run_role
from runtime.settings.workers import WorkerSettings


def _run(settings: WorkerSettings) -> int:
    settings = machine.prepare(settings)
    with collector.at_rest():
        from decode_worker.main import run  # here, so that --help and a wrong option answer at once

    return run(settings)


if __name__ == "__main__":
    leave(run_role("decode_worker", WorkerSettings, _run, fixed={"role": "decode"}))
