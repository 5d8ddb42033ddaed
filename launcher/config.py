"""`crossdock config show`: the options of a command or a running process, and where each value comes from."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field

from launcher import tables
from launcher.local import process_states, registry
from runtime.settings.options import CONFIG_ENV, SECTIONS, SettingsError, checked, merged_values, option_name
from runtime.settings.types import ENV_PREFIX, JsonOption, Options

_SECRETS = ("api_keys",)


class ConfigShowSettings(JsonOption):
    """Show the values of all options of a command or a running process, and where each comes from.

    NAME is serve, coordinator, gateway or worker: the values with which that command would start here. Or it is a process of a
    cluster on this machine, as in crossdock status: the values with which it runs.
    """

    name: str = Field("serve", description="A command or a process.", json_schema_extra={"argument": "NAME"})
    config_file: str = Field(
        "",
        description=f"TOML file with settings; empty: environment {CONFIG_ENV}.",
        json_schema_extra={"option": "--config"},
    )
    changed: bool = Field(False, description="Only what is no default.")


def show(settings: ConfigShowSettings) -> int:
    """Raises `SettingsError`."""
    cls = SECTIONS.get(settings.name)
    if cls is not None:
        rows = _rows(cls, {}, settings.config_file)
    else:
        rows = _of_process(settings.name)
    rows = [row for row in rows if row["source"] != "default" or not settings.changed]
    if settings.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return 0
    listed(rows).show(tables.console(highlight=False))
    return 0


def listed(rows: Iterable[Mapping[str, Any]]) -> tables.Table:
    table = tables.Table("", "option", tables.words("value"), tables.words("source"))
    for row in rows:
        table.row(row["option"], str(row["value"]), row["source"])
    return table


def _rows(cls: type[Options], flags: Mapping[str, Any], config: str = "") -> list[dict[str, Any]]:
    """Raises `SettingsError`."""
    given, sources = merged_values(cls, flags, config)
    # An option that must be given, like a worker's role, has no value here.
    needed = {key for key, field in cls.model_fields.items() if field.is_required() and key not in given}
    values = vars(checked(cls, given, sources)) if not needed else {}
    found = []
    for key, field in cls.model_fields.items():
        value = values.get(key, given.get(key, "" if key in needed else field.get_default(call_default_factory=True)))
        source = sources.get(key, "flag" if key in given else "default").removeprefix("from ")
        shown = "(hidden)" if key in _SECRETS and value else value
        found.append({"option": option_name(key, field), "value": shown, "source": source})
    return found


def _of_process(name: str) -> list[dict[str, Any]]:
    """Raises `SettingsError` unless a process of this name runs in one cluster on this machine."""
    folders = {folder for one in registry.clusters() for folder in registry.folders_of(one.coordinator)}
    states = [one for folder in folders for one in process_states.read(folder).processes]
    pids = {one.pid for one in states if one.name == name and one.pid}
    if len(pids) != 1:
        names = ", ".join(sorted({one.name for one in states}))
        why = f"{len(pids)} processes here are called {name}" if pids else f"{name} is no command, and no process here"
        raise SettingsError(f"NAME: {why}; there are {', '.join(SECTIONS)}{f', {names}' if names else ''}")
    proc = Path(f"/proc/{pids.pop()}")
    role = name.partition("-")[0]
    cls = SECTIONS.get(role, SECTIONS["worker"])
    environment = dict(line.split("=", 1) for line in _words(proc / "environ") if line.startswith(ENV_PREFIX))
    flags = _flags(cls, _words(proc / "cmdline")) | ({"role": role} if cls is SECTIONS["worker"] else {})
    for key in [key for key in os.environ if key.startswith(ENV_PREFIX)]:
        del os.environ[key]
    os.environ |= environment
    return _rows(cls, flags)


def _words(path: Path) -> list[str]:
    return [word.decode("utf-8", "replace") for word in path.read_bytes().split(b"\0")[:-1]]


def _flags(cls: type[Options], words: list[str]) -> dict[str, Any]:
    """Returns the options of a command line that the launcher has made."""
    fields = {option_name(key, field): (key, field) for key, field in cls.model_fields.items()}
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word in fields:
            key, field = fields[word]
            found[key] = not field.default if field.annotation is bool else after
    return found
