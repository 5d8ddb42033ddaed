"""`python -m prefill_worker` and `python -m decode_worker`."""

from importlib import import_module
from typing import NoReturn

from runtime.process import garbage_collector
from runtime.process.exits import leave
from runtime.settings import machine
from runtime.settings.command_line import run_role
from runtime.settings.workers import WorkerSettings
from runtime.worker import engine_python


def run_alone(role: str, package: str) -> NoReturn:
    """Run a worker that begins in this role, with the process's arguments."""

    def run(settings: WorkerSettings) -> int:
        engine_python.enter(settings)
        settings = machine.prepare(settings)
        with garbage_collector.at_rest():
            # Not before, so that --help and a wrong option answer at once. It knows both roles, since the process can take
            # either.
            main = import_module("launcher.worker_roles")
        status: int = main.run(settings)
        return status

    leave(run_role(package, WorkerSettings, run, fixed={"role": role}))
