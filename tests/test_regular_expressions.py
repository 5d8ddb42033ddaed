"""Regular expressions that meet text of others take time in proportion to it: a quadratic one would hold every stream.

All that the product compiles or uses are found, as attributes of its modules and as calls of `re` in its source.
"""

import ast
import importlib
import pkgutil
import re
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "proto",
    "runtime",
    "gateway",
    "coordinator",
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
)
CALLS = {"compile", "search", "match", "fullmatch", "split", "sub", "subn", "findall", "finditer"}
ANCHORED = {"match", "fullmatch"}
CHARS = 4_000
"""Of the shorter text. A quadratic expression takes more than 20 ms for it, a linear one less than one."""
GROWTH_MAX = 3.0
"""Of the time, for twice the text."""
ENOUGH_S = 0.005
"""Below this, time says nothing, and is no harm."""


def source(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def modules() -> Iterator[str]:
    for package in PACKAGES:
        yield from (found.name for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."))


@cache
def patterns() -> dict[tuple[str, int, bool], set[str]]:
    """(pattern, flags, whether it is only looked for at the text's start) → where it is used."""
    found: dict[tuple[str, int, bool], set[str]] = {}
    for name in modules():
        for pattern, flags, anchored in [*_called(name), *_kept(name)]:
            found.setdefault((pattern, flags & ~re.UNICODE, anchored), set()).add(name)
    return found


def _kept(name: str) -> Iterator[tuple[str, int, bool]]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # for a machine with a GPU
        return
    path = source(name)
    text = path.read_text() if path.exists() else ""
    for own, value in vars(module).items():
        inner = list(vars(value).values()) if isinstance(value, type) and value.__module__ == name else []
        inner += list(value) if isinstance(value, list | tuple) else []
        for one in [value, *inner]:
            if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
                uses = set(re.findall(rf"\b{re.escape(own)}\.(\w+)\(", text))
                yield one.pattern, one.flags, bool(uses) and uses <= ANCHORED


def _called(name: str) -> Iterator[tuple[str, int, bool]]:
    """Inline calls whose pattern is written there. Of f-strings, the parts in braces are taken for a letter."""
    path = source(name)
    if not path.exists():
        return
    tree = ast.parse(path.read_text())
    inner = {id(node) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in ast.walk(one)}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CALLS
            and node.args
        ):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
            continue
        if node.func.attr == "compile" and id(node) not in inner:
            continue  # it is kept, and found there
        pattern = _text(node.args[0])
        named = [part.attr for argument in [*node.args, *(key.value for key in node.keywords)]
                 for part in ast.walk(argument) if isinstance(part, ast.Attribute) and part.attr.isupper()]  # fmt: skip
        flags = sum(int(getattr(re, flag)) for flag in named if hasattr(re, flag))
        if pattern is not None:
            yield pattern, flags, node.func.attr in ANCHORED


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = ["x" if isinstance(part, ast.FormattedValue) else str(part.value) for part in node.values
                 if isinstance(part, ast.Constant | ast.FormattedValue)]  # fmt: skip
        text = "".join(parts)
        try:
            re.compile(text)
        except re.error:
            return None
        return text
    return None


def units(pattern: str) -> list[str]:
    """What the text is made of: one character, or two, among those that the pattern could be made for."""
    letters = sorted(
        {*(char for char in pattern if not char.isalnum()), *" \n\ta0", *pattern[-1:], *pattern[:1]} - set("\\?*+|^$")
    )
    chosen = letters[:8]
    return [*letters, *("".join(pair) for pair in product(chosen, "\n ax0") if len(set(pair)) == 2)]


def seconds(compiled: re.Pattern[str], text: str, *, anchored: bool) -> float:
    started = time.thread_time()
    if anchored:
        compiled.match(text)
        compiled.fullmatch(text)
    else:
        deque(compiled.finditer(text), maxlen=0)  # keeps none of them, so that no garbage collection is timed
    return time.thread_time() - started


def is_linear(pattern: str, flags: int, anchored: bool = False) -> bool:
    compiled = re.compile(pattern, flags)
    return all(_is_linear_on(compiled, anchored, unit, end) for unit in units(pattern) for end in ("", "!"))


def _is_linear_on(compiled: re.Pattern[str], anchored: bool, unit: str, end: str) -> bool:
    for chars in (CHARS // 8, CHARS // 2):  # an exponential one would not be waited for
        if seconds(compiled, unit * (chars // len(unit)) + end, anchored=anchored) > 40 * ENOUGH_S:
            return False
    if seconds(compiled, unit * (2 * CHARS // len(unit)) + end, anchored=anchored) < ENOUGH_S:
        return True
    short, long = (
        min(seconds(compiled, unit * (n // len(unit)) + end, anchored=anchored) for _ in range(3))
        for n in (CHARS, 2 * CHARS)
    )
    return long < ENOUGH_S or long <= GROWTH_MAX * short


def test_known_expressions_are_found() -> None:
    """The collection of regular expressions covers known modules."""
    found = {name for names in patterns().values() for name in names}
    assert {
        "gateway.structured.user_grammar",
        "gateway.http.errors",
        "runtime.grammar.compiler",
        "runtime.link.keys",
    } <= found
    assert len(patterns()) > 25


@pytest.mark.parametrize("pattern", sorted(patterns()), ids=lambda pattern: pattern[0][:40])
def test_expressions_take_linear_time(pattern: tuple[str, int, bool]) -> None:
    assert is_linear(*pattern), f"{pattern[0]!r} of {sorted(patterns()[pattern])}"


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        (r"^\s*%(\w+)", re.MULTILINE),
        (r"^\s*start\s*:", re.MULTILINE),
        (r"\n<|\n\s*\d+ \| ", 0),
        (r"\s+$", 0),
        (r"a*b", 0),
        (r"\d+\.", 0),
    ],
)
def test_quadratic_expression_is_detected(pattern: str, flags: int) -> None:
    assert any(not is_linear(pattern, flags) for _ in range(3)), "a busy machine may hide it once"
