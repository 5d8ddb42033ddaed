"""`crossdock worker`: one process with one engine, KV pool and prefix cache, in either role. It has the modules of both roles,
because a worker can change its role while it runs (`crossdock flip`).
"""

from runtime.settings import machine
from runtime.settings.workers import WorkerSettings
from runtime.worker import engine_python


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    engine_python.enter(settings)
    settings = machine.prepare(settings)
    # It imports torch, so it must come after the environment that `prepare` sets.
    from launcher import worker_roles

    return worker_roles.run(settings)
