"""Names that were retired do not come back: `retired_names.tsv` has them, with what replaces each."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.test_docstrings import sources
from tests.test_tidy import EVERYTHING, ROOT, parsed

RETIRED = dict(
    line.split("\t")
    for line in (ROOT / "tests" / "retired_names.tsv").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def retired(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(asname=str(name)):
                pass
            case _:
                continue
        if name.lstrip("_") in RETIRED:
            yield f"{path}:{getattr(node, 'lineno', 0)}: {name}; the name is {RETIRED[name.lstrip('_')]}"


def test_no_retired_name_is_used() -> None:
    assert not [one for path, source in sources(sorted(EVERYTHING)) for one in retired(path, source)]


def test_retired_names_are_detected_anywhere() -> None:
    """The check detects retired names in imports, classes, functions, parameters and attributes."""
    lines = (
        "from launcher import reports as bench_report",
        "class Seldom:",
        " def knock(self, wish):",
        "  self._band = wish",
    )
    assert len(list(retired("a.py", "\n".join(lines)))) == 6


def test_class_names_are_unique() -> None:
    """Private ones aside, and `Tick`, which is the same event to three cores."""
    found = Counter(
        node.name
        for _, source in sources(sorted(EVERYTHING))
        for node in parsed(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(found) > 800 and [name for name, count in found.items() if count > 1] == ["Tick"]
