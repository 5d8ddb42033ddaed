"""`crossdock worker`, and `python -m prefill_worker`, `decode_worker` or `worker` (mixed), which start in one role."""

from typing import NoReturn

from runtime.process import garbage_collector
from runtime.process.exits import leave
from runtime.settings import machine
from runtime.settings.command_line import run_role
from runtime.settings.workers import WorkerSettings
from worker import engine_python


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    engine_python.enter(settings)
    settings = machine.prepare(settings)
    with garbage_collector.at_rest():
        from worker import process  # imports torch, so it must come after the environment that `prepare` sets

    return process.run_worker(settings)


def run_alone(role: str, package: str) -> NoReturn:
    """Run a worker that begins in this role, with the process's arguments."""
    leave(run_role(package, WorkerSettings, run, fixed={"role": role}))
