"""`python -m tools.configuration [FILE]`: the reference of all options, made from the settings classes."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from launcher.commands import TABLE
from runtime.settings.command_line import commands_in
from runtime.settings.options import CONFIG_ENV, bounds, option_name
from runtime.settings.types import ENV_PREFIX, Options

_HEAD = f"""\
# Configuration

Made by `python -m tools.configuration docs/configuration.md` from the settings classes; a test fails when it is
stale. `--help` of each command shows the same text.

Flags take precedence over the environment, the environment over a TOML file, and the file over the defaults. `--config PATH` or
`{CONFIG_ENV}` names the file. It has a section for each role. Its keys are the options with underscores:

```toml
[gateway]
port = 8080
[worker]
kv_gib = 4.0
```

The sections are `coordinator`, `gateway`, `worker` and `serve`. Lists are written with commas. A flag has one form, the one
that changes its default: `--once` turns an option on, `--no-access-log` turns one off. In the environment and the file, write
`true` or `false`. Unknown, malformed and out-of-bounds values are refused. The message names the option and the source of its
value.

`cluster.toml`, which `crossdock up FILE` and `crossdock cluster` read, is another file. See
[multi-node](multi-node.md) and `scripts/cluster.toml`, which explains every key.

"""


def commands() -> Iterator[tuple[str, type[Options]]]:
    """Every command that people call, with its settings."""
    for name, command in commands_in(TABLE):
        yield f"crossdock {name}", command.settings_class()


def text() -> str:
    parts = [_HEAD]
    for name, cls in commands():
        about = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
        parts.append(f"## {name}\n\n{about}\n\n")
        if cls.section:
            parts.append(f"Section `[{cls.section}]` of the file.\n\n")
        if not cls.model_fields:
            continue
        parts.append("| option | environment | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(key, field) for key, field in cls.model_fields.items()]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _row(key: str, field: FieldInfo) -> str:
    meaning = (field.description or "") + (f" ({limits})" if (limits := bounds(field)) else "")
    extra, option = field.json_schema_extra, f"`{option_name(key, field)}`"
    if isinstance(extra, dict) and "also_argument" in extra:
        option = f"`{extra['also_argument']}`, {option}"
    columns = (option, f"`{ENV_PREFIX}{key.upper()}`", _default(field), meaning)
    return "| " + " | ".join(text.replace("|", "\\|") for text in columns) + " |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value in ("", []):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{','.join(map(str, value)) if isinstance(value, list) else value}`"


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main()
