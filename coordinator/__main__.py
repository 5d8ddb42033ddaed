"""`python -m coordinator`: this role alone, for unit files and launchers."""

import os
import threading
from importlib import import_module

from runtime.exits import leave
from runtime.options import run_role
from runtime.settings import CoordinatorSettings

_NICE_LOADING = 10


def _run(settings: CoordinatorSettings) -> int:
    if settings.standby:
        _load_in_nobodys_way(settings.usage_db)
    from coordinator.main import run  # here, so that --help and a wrong option answer at once

    return run(settings)


def _load_in_nobodys_way(usage_db: str) -> None:
    """Beside a coordinator that serves, nobody waits for us, but streams may need the cores. Niceness is a thread's on Linux,
    and a process without rights cannot take its own back."""
    from coordinator.turn import is_taken

    if is_taken(usage_db):
        loading = threading.Thread(target=_load_nicely, name="loading")
        loading.start()
        loading.join()


def _load_nicely() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE_LOADING)
    import_module("coordinator.main")


if __name__ == "__main__":
    leave(run_role("coordinator", CoordinatorSettings, _run))
