"""`python -m gateway`: this role alone, for unit files and launchers."""

from runtime.process import garbage_collector
from runtime.process.exits import leave
from runtime.settings.command_line import run_role
from runtime.settings.roles import GatewaySettings


def _run(settings: GatewaySettings) -> int:
    with garbage_collector.at_rest():
        from gateway.main import run  # here, so that --help and a wrong option answer at once

    return run(settings)


if __name__ == "__main__":
    leave(run_role("gateway", GatewaySettings, _run))
