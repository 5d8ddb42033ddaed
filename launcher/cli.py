"""The `crossdock` command. Imports next to nothing by itself, so that Ctrl-C is heard from the first moment."""

import sys


def main() -> None:
    try:
        from runtime.process import interrupts, output

        output.secure()
        interrupts.guard()
        from launcher.commands import as_listed, build_app, only_groups
        from runtime.process.exits import leave
        from runtime.settings.command_line import invoke
    except ImportError as error:
        if others := overwritten():
            sys.exit(f"crossdock: {error}: {others}")
        raise

    arguments = as_listed(sys.argv[1:])
    leave(invoke(build_app(), [*arguments, "--help"] if only_groups(arguments) else arguments, "crossdock"))


def overwritten() -> str:
    """Returns the name of another distribution whose files have replaced ours, since our package names are common words;
    empty: there is none."""
    from importlib.metadata import packages_distributions

    found = packages_distributions()
    ours = [name for name, owners in found.items() if "crossdock" in owners]
    for name in sorted(ours):
        if others := sorted(set(found[name]) - {"crossdock"}):
            return (
                f"{', '.join(others)} has installed files over crossdock's package {name!r};"
                " give crossdock an environment of its own"
            )
    return ""


if __name__ == "__main__":
    main()
