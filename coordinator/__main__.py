"""`python -m coordinator`: this role alone, for unit files and launchers."""

from runtime.process import garbage_collector
from runtime.process.exits import leave
from runtime.settings.command_line import run_role
from runtime.settings.roles import CoordinatorSettings


def _run(settings: CoordinatorSettings) -> int:
    with garbage_collector.at_rest():
        from coordinator.serve import run  # here, so that --help and a wrong option answer at once

    return run(settings)


if __name__ == "__main__":
    leave(run_role("coordinator", CoordinatorSettings, _run))
