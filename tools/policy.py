"""`python -m tools.policy PAGE`: puts the keys of a scenario, and what the scenarios in docs/scenarios print,
between the markers of docs/scenarios/README.md."""

import io
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.commands import simulate as load
from lab.scenarios import scenario
from lab.scenarios.build import COORDINATOR_OPTIONS
from runtime.settings.options import bounds

SCENARIOS: Final = Path(__file__).parents[1] / "docs" / "scenarios"
COLUMNS: Final = 128
_PART: Final = re.compile(r"(<!-- (keys|file|output): ([\w -]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def replace(page: str) -> str:
    """The page with everything between its markers made anew. Raises `ValueError` if there are none."""
    made, parts = _PART.subn(lambda found: f"{found[1]}\n{_part(found[2], found[3])}\n{found[4]}", page)
    if not parts:
        raise ValueError("the page has no part between markers")
    return made


def _part(kind: str, argument: str) -> str:
    match kind:
        case "keys" if argument == "coordinator":
            return ", ".join(f"`{name}`" for name in sorted(COORDINATOR_OPTIONS)) + ".\n"
        case "keys":
            return _keys(getattr(scenario, argument))
        case "file":
            return f"```toml\n{(SCENARIOS / argument).with_suffix('.toml').read_text(encoding='utf-8')}```\n"
        case _:
            name, *numbers = argument.split()
            return f"```\n{_printed(name, [int(number) for number in numbers])}\n```\n"


def _keys(table: type[BaseModel]) -> str:
    rows = [_row(key, field) for key, field in table.model_fields.items()]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def _row(key: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    choices = [f"`{one}`" for one in get_args(field.annotation) if isinstance(one, str)]
    if not all(choice in meaning for choice in choices):
        meaning = f"{', '.join(choices)}. {meaning}"
    elif not choices and (limits := bounds(field)):
        meaning += f" ({limits})"
    return f"| `{key}` | {_default(field)} | {meaning.strip()} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    return "" if field.default in (None, "", [], {}) else f"`{field.default}`"


@cache
def run(name: str) -> dict[str, Any]:
    """Figures of a scenario in docs/scenarios."""
    return figures(play(load.read(str(SCENARIOS / f"{name}.toml"))))


def _printed(name: str, numbers: list[int]) -> str:
    """Returns the chosen tables that the command prints, counted from 1."""
    out = io.StringIO()
    load.show(run(name), Console(file=out, width=COLUMNS, highlight=False))
    tables = out.getvalue().split("\n\n")
    return "\n\n".join(tables[number - 1].strip("\n") for number in numbers)


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(replace(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
