"""Calls and patterns that are safe only when they are written in one way."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.test_layout import sources
from tests.test_tidy import ROOT

_PATTERN_CALLS = frozenset("compile match fullmatch search sub subn split findall finditer".split())
_JSON_SCHEMA = "tools/openapi.py"
"""Its patterns are for clients, and in JSON Schema `$` is the end of the text."""
_parser: Any = re._parser  # type: ignore[attr-defined]


def _trees() -> Iterator[tuple[str, ast.AST]]:
    paths = [*sources().values(), *(path for path in (ROOT / "scripts").glob("*") if _is_python(path))]
    for path in sorted(paths):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def _is_python(path: Any) -> bool:
    return path.is_file() and (path.suffix == ".py" or "python" in path.read_text("utf-8")[:60])


def _constants(node: ast.AST) -> Iterator[str]:
    """The literal parts of a string, or of the text parts of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield from (text for side in (node.left, node.right) for text in _constants(side))


def patterns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, regular expression) of all that a module compiles, or gives to pydantic or msgspec as `pattern`, and of each
    string that begins like one, under whatever name it is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = [word.value for word in node.keywords if word.arg in ("pattern", "regex")]
            if name.startswith("re.") and name[3:] in _PATTERN_CALLS:
                given += node.args[:1]
            yield from ((node.lineno, text) for one in given for text in _constants(one))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("^"):
            yield node.lineno, node.value


def lets_a_line_break_through(pattern: str) -> bool:
    """Whether it has a `$` that stands for the end of the text, or for the place before the line break that ends it."""
    try:
        parsed = _parser.parse(pattern.replace("\\z", "\\Z"))
    except re.error:
        return False  # a part of one
    return any(op is _parser.AT and where is _parser.AT_END for op, where in _flat(parsed))


def _flat(parsed: Any) -> Iterator[tuple[Any, Any]]:
    for op, argument in parsed:
        yield op, argument
        waiting = [argument]
        while waiting:
            one = waiting.pop()
            if isinstance(one, _parser.SubPattern):
                yield from _flat(one)
            elif isinstance(one, list | tuple):
                waiting += one


def test_no_pattern_ends_with_a_dollar() -> None:
    """`$` matches before a last line break too; `\\Z` (`\\z` for pydantic) does not."""
    found = {
        f"{path}:{line}: {text}" for path, tree in _trees() if path != _JSON_SCHEMA for line, text in patterns(tree)
    }
    assert len(found) > 40
    assert not sorted(one for one in found if lets_a_line_break_through(one.split(": ", 1)[1]))


@pytest.mark.parametrize(
    ("pattern", "is_open"),
    [("^a$", True), (r"(a|b$)?", True), (r"^a\Z", False), (r"^a\z", False), (r"[a$]", False), (r"a\$", False)],
)
def test_open_pattern_is_detected(pattern: str, is_open: bool) -> None:
    """The check detects patterns that let a last line break through, and no others."""
    assert lets_a_line_break_through(pattern) is is_open


def without_refusal_of_code(tree: ast.AST) -> list[int]:
    """Lines that have transformers load something without saying that a model's own code must not run."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        loads = name in ("from_pretrained", "get_class_from_dynamic_module")
        loads |= name == "pipeline" and bool(node.args or node.keywords)  # psycopg's takes nothing
        if loads or (name == "from_config" and owner.startswith("Auto")):
            said = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            if not (said and isinstance(said[0], ast.Constant) and said[0].value is False):
                found.append(node.lineno)
    return found


def test_transformers_never_runs_model_code() -> None:
    """Each call that loads something with transformers refuses a model's own code."""
    found = {path: lines for path, tree in _trees() if (lines := without_refusal_of_code(tree))}
    assert not found


@pytest.mark.parametrize("call", ["A.from_pretrained(p)", "A.from_pretrained(p, trust_remote_code=x)", "pipeline(p)"])
def test_code_running_call_is_detected(call: str) -> None:
    """The check detects calls that do not refuse a model's own code."""
    assert without_refusal_of_code(ast.parse(call)) == [1]
    assert not without_refusal_of_code(ast.parse("A.from_pretrained(p, trust_remote_code=False)"))
