"""`python -m coordinator`: this role alone, for unit files and launchers."""

from runtime.exits import leave
from runtime.options import run_role
from runtime.settings import CoordinatorSettings


def _run(settings: CoordinatorSettings) -> int:
    from coordinator.main import run  # here, so that --help and a wrong option answer at once

    return run(settings)


if __name__ == "__main__":
    leave(run_role("coordinator", CoordinatorSettings, _run))
