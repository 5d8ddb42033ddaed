"""The pages name files that exist, and the diagram of the life cycle is that of the table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ALL_PAGES, ROOT
from tools import lifecycle

UNIT = re.compile(r"\n\n|\n(?=\||\s*(?:[-*]|\d+\.) )")  # between paragraphs, rows of a table and items of a list
CODE = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def missing(text: str) -> list[str]:
    """Files named in backticks that do not exist: paths with a folder, and names like `core.py`, which stand for files in a
    folder that was named before in the same paragraph, row or item."""
    return [name for unit in UNIT.split(FENCE.sub("", text)) for name in _missing_in(unit)]


def _missing_in(unit: str) -> Iterator[str]:
    folders: list[Path] = []
    for code in CODE.findall(unit):
        name = code.split()[0].removeprefix("./").partition("::")[0]
        in_root = (
            sorted(ROOT.glob(name.rstrip("/"))) if re.fullmatch(r"[\w*/.-]+", name) and name[0] not in "/." else []
        )
        if in_root:
            folders.append(in_root[0] if in_root[0].is_dir() else in_root[0].parent)
        elif _is_ours(name) and not any((folder / name).exists() for folder in folders):
            yield name


def _is_ours(name: str) -> bool:
    if re.fullmatch(r"[\w*/-]+\.py", name):
        return True
    return bool(re.match(r"(tests|scripts|docs)/\w", name)) or bool(re.fullmatch(r"[a-z_]+(/[a-z_]+)*/", name))


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_pages_exist(page: Path) -> None:
    """Every file that a page names exists."""
    assert missing(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`coordinator/core.py`, `state.py` and `tests/launcher`", []),
        ("**`kvtransfer`** has `memory/` and `sender.py`", []),
        ("`tests/test_layout.py::test_folders`, `scripts/chaos --faults 3`, `tests/proto/schema-v*.json`", []),
        ("`coordinator/nodes.py`", ["coordinator/nodes.py"]),
        ("| `coordinator/core.py` | x |\n| `state.py` | y |", ["state.py"]),
        ("`coordinator/core.py` and `nodes.py`", ["nodes.py"]),
        ("`tests/none` and `scripts/none --x`", ["tests/none", "scripts/none"]),
        ("`coordinator` has `wrong/`", ["wrong/"]),
        ("`tests/proto/schema-v*.txt`, `GET /v1/models`, `https://x/y`", ["tests/proto/schema-v*.txt"]),
    ],
)
def test_missing_file_is_detected(text: str, expected: list[str]) -> None:
    """The check reports a page's file names that do not exist, and no others."""
    assert missing(text) == expected


def test_life_cycle_is_up_to_date() -> None:
    """The life cycle in ARCHITECTURE.md equals the generated one."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert lifecycle.replace(page) == page, "run: python -m tools.lifecycle ARCHITECTURE.md"


def test_life_cycle_has_every_transition() -> None:
    """Every transition of the state machine is in the life cycle's diagram or text."""
    text = lifecycle.text()
    for (state, trigger), following in lifecycle.TRANSITIONS.items():  # type: ignore[attr-defined]
        edge = f"    {state.name} --> {following.name}: {trigger}\n" in text
        assert edge or f"`{trigger}` leads to {following.name}" in text, (state, trigger)


def test_page_without_markers_is_refused() -> None:
    """A page without the life cycle's markers is refused."""
    with pytest.raises(ValueError, match="lifecycle: end"):
        lifecycle.replace("# Architecture\n")


@pytest.mark.parametrize(
    ("page", "lines"),
    [("README.md", 120), ("ARCHITECTURE.md", 250), ("CONTRIBUTING.md", 120), ("docs/decisions/[0-9]*.md", 30)],
)
def test_pages_stay_short(page: str, lines: int) -> None:
    """Each page stays within its number of lines."""
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob(page)}
    assert lengths and max(lengths.values()) <= lines, lengths


def test_code_walk_names_real_functions() -> None:
    """The walk through the code names files and functions that exist."""
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]+) \|", page, re.MULTILINE)
    assert len(rows) == 24
    for file, names in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert set(re.findall(r"`(\w+)`", names)) <= defined, file
    for file in re.findall(r"`([\w/]+/[\w.]*)`", page):
        assert (ROOT / file).exists(), file
