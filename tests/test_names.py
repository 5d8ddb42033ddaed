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


def long_test_names(path: str, source: str) -> list[str]:
    """Names of tests of over 45 characters, or with a relative clause for their subject."""
    return [
        f"{path}:{node.lineno}: {node.name}"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if len(node.name) > 45 or node.name.split("_")[1] in ("who", "what", "which", "whose")
    ]


def test_names_of_tests_are_short() -> None:
    assert not [one for path, source in sources(["tests"]) for one in long_test_names(path, source)]
    source = "def test_what_comes():\n  pass\ndef test_this_name_is_a_sentence_of_so_many_words_that():\n  pass\n"
    assert len(long_test_names("a.py", source)) == 2
