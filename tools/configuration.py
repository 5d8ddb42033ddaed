"""`python -m tools.configuration [FOLDER]`: the options of a cluster's processes, from the settings classes."""

import inspect
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from launcher.commands import TABLE
from runtime.settings.command_line import commands_in
from runtime.settings.option_help import OTHER_PANEL, in_panel_order, panels_of
from runtime.settings.options import CONFIG_ENV, aliases_of, bounds, option_name
from runtime.settings.types import ENV_PREFIX, Options

FOLDER = "docs/configuration"
PAGES = ("serve", "coordinator", "gateway", "worker")
COMMAND = f"python -m tools.configuration {FOLDER}"
_HEAD = f"""\
# Configuration

With this page you find where the value of an option comes from if it is given more than once. The processes of a cluster have
a page each: [serve](serve.md), [coordinator](coordinator.md), [gateway](gateway.md) and [worker](worker.md). A page begins with
what most people set and ends with options for experts. `--help` shows the same text, and that of all other commands.

Flags take precedence over the environment, the environment over a TOML file, and the file over the defaults.

- In the environment, an option is called `{ENV_PREFIX}<OPTION>` with underscores: `--kv-gib` is `{ENV_PREFIX}KV_GIB`.
- `--config PATH` or `{CONFIG_ENV}` names the file. It has the sections `coordinator`, `gateway`, `worker` and `serve`, whose
  keys are the options with underscores:

```toml
[gateway]
port = 8080
[worker]
kv_gib = 4.0
```

Lists are written with commas. `--once` turns an option on, `--no-access-log` turns one off that is on by default. In the
environment and the file, write `true` or `false`. If a value is unknown, malformed or out of bounds, the command ends and its
message names the option and the source of the value.

`crossdock serve` takes the options of `crossdock coordinator`, `gateway`, `worker` and `autopilot`, too. `crossdock up FILE`
and `crossdock cluster` read them from `cluster.toml`: `--allowed-hosts` is `allowed_hosts` in `[gateway]`. See
[multi-node](../multi-node.md) and `scripts/cluster.toml`, which explains every key. Other commands that start a cluster, such
as `crossdock bench`, leave options that they do not have to the environment.
"""


def pages() -> dict[str, str]:
    """File name → text of the page."""
    named = dict(commands_in(TABLE))
    return {"README.md": _HEAD} | {f"{name}.md": _page(name, named[name].settings_class()) for name in PAGES}


def _page(name: str, cls: type[Options]) -> str:
    about = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    parts = [
        f"# crossdock {name}\n\nMade by `{COMMAND}`; a test fails when it is stale. [Configuration](README.md).\n",
        f"\n{about}\n\nSection `[{cls.section}]` of the file.\n",
    ]
    panels, shown = panels_of(cls), ""
    for key, field in in_panel_order(cls, list(cls.model_fields.items())):
        panel = panels.get(key, OTHER_PANEL)
        if panel != shown:
            parts.append(f"\n## {panel}\n\n| option | default | meaning |\n|---|---|---|\n")
            shown = panel
        parts.append(_row(key, field))
    return "".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    meaning = (field.description or "") + (f" ({limits})" if (limits := bounds(field)) else "")
    extra, option = field.json_schema_extra, f"`{option_name(key, field)}`"
    option += "".join(f", `{alias}`" for alias in aliases_of(field))
    if field.default is True:
        option = f"`--{key.replace('_', '-')} / {option[1:]}"
    if isinstance(extra, dict) and "also_argument" in extra:
        option = f"`{extra['also_argument']}`, {option}"
    return "| " + " | ".join(text.replace("|", "\\|") for text in (option, _default(field), meaning)) + " |\n"


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
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
