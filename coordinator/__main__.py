"""`python -m coordinator`: this role alone, for unit files and launchers.

Beside a coordinator that serves nobody waits for this one, but streams may need the cores: all of its loading, about a second
of CPU, is done at low priority then.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from runtime.process import garbage_collector
from runtime.process.niceness import import_nicely
from runtime.storage.lock_file import is_taken

_NICE_LOADING = 5
"""More, and on a busy machine it takes half a minute, in which nobody stands by."""


def _usage_db(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The usage ledger as far as it is told without loading what reads settings: a wrong guess costs only time."""
    for number, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name == "--usage-db":
            return value if given else "".join(arguments[number + 1 : number + 2])
    return environment.get("CROSSDOCK_USAGE_DB", "")


def _main() -> int:
    usage_db = _usage_db(sys.argv[1:], os.environ)
    if usage_db and is_taken(usage_db):
        with garbage_collector.at_rest():
            import_nicely("coordinator.serve", _NICE_LOADING)
    from runtime.settings.command_line import run_role
    from runtime.settings.roles import CoordinatorSettings

    def run(settings: CoordinatorSettings) -> int:
        with garbage_collector.at_rest():
            from coordinator.serve import run  # here, so that --help and a wrong option answer at once

        return run(settings)

    return run_role("coordinator", CoordinatorSettings, run)


if __name__ == "__main__":
    status = _main()
    from runtime.process.exits import leave

    leave(status)
