"""The `crossdock` command. Imports next to nothing by itself, so that Ctrl-C is heard from the first moment."""

import sys

from runtime.process import interrupts


def main() -> None:
    interrupts.guard()
    from launcher.commands import as_listed, build_app, only_groups
    from runtime.process.exits import leave
    from runtime.settings.command_line import invoke

    arguments = as_listed(sys.argv[1:])
    leave(invoke(build_app(), [*arguments, "--help"] if only_groups(arguments) else arguments, "crossdock"))


if __name__ == "__main__":
    main()
