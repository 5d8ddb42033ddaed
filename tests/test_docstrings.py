"""Docstrings of the product can be read alone, the names in them exist, and imports keep the names of what is ours."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_tidy import EVERYTHING, ROOT, parsed

FRAGMENT = re.compile(
    r"^(Of|In|With|For|At|To|By|Likewise|Until|From|On|Beside|Behind|Among|Between|Under|Over|Without|Within|Since|Through|Beyond)"
    r"\b|^(\.\.\.|…)|(\.\.\.|…)$"
)
"""A text that begins with a preposition, or goes on in another docstring, has its subject elsewhere."""
RELATIVE = re.compile(r"(?:^|(?<=[.!?:;]\s)|(?<=\n\n))(?:Who|What|Whom|Which|Whose)\b[^.?!]*[.?!]?")
"""A sentence whose subject is a relative clause has to be read twice."""
ELSEWHERE = frozenset(
    "prefix_offset read_offset DecodeStream _build PR_SET_PDEATHSIG prometheus_client auth tcpi_bytes_received fn s0".split()
)
"""Names of other programs, and of mathematics."""
Found = tuple[str, int, str]


def docstrings(path: str, source: str) -> Iterator[Found]:
    """Those of attributes and constants, too."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield path, node.lineno, node.value.value.strip()


def sources(folders: list[str]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def fragments(found: Iterator[Found]) -> list[str]:
    return [f"{path}:{line}: {text[:60]}" for path, line, text in found if FRAGMENT.search(text)]


def relative_subjects(found: Iterator[Found]) -> list[str]:
    """Sentences that begin with a relative clause; a question does not."""
    texts = ((path, line, match[0]) for path, line, text in found for match in RELATIVE.finditer(text))
    return [f"{path}:{line}: {text[:60]}" for path, line, text in texts if not text.endswith("?")]


def comments(path: str, source: str) -> Iterator[Found]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield path, token.start[0], token.string.lstrip("# ")


def words_of(source: str) -> set[str]:
    """Every name of a module, and every word of its texts but docstrings."""
    found, tree = set[str](), parsed(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name):
                found.update(name.split("."))
            case ast.Constant(value=str(text)) if id(node) not in told:
                found.update(re.findall(r"\w+", text))
    return found


@cache
def known() -> frozenset[str]:
    found = set(dir(builtins)) | ELSEWHERE
    for path, source in sources([*EVERYTHING, "tests", "benchmarks", "tools"]):
        found |= words_of(source) | {part.removesuffix(".py") for part in Path(path).parts}
    return frozenset(
        found | {path.stem for path in [*ROOT.glob("*.*"), *(ROOT / "docs").glob("*"), *(ROOT / "scripts").glob("*")]}
    )


def named(text: str) -> Iterator[str]:
    """The identifiers of a docstring that are between backticks, with what a call names."""
    for quoted in re.findall(r"`([^`]+)`", text):
        if call := re.match(r"([\w.]+)\(", quoted):
            quoted = call[1]
        if re.fullmatch(r"[\w.-]+", quoted):
            yield from (word for word in quoted.strip("-.").split(".") if re.fullmatch(r"[A-Za-z_]\w*", word))


@pytest.mark.parametrize("folder", [*sorted(EVERYTHING), "benchmarks", "tools"])
def test_no_docstring_is_a_fragment(folder: str) -> None:
    assert not fragments(one for path, source in sources([folder]) for one in docstrings(path, source))


@pytest.mark.parametrize("folder", [*sorted(EVERYTHING), "benchmarks", "tools"])
def test_no_relative_clause_is_a_subject(folder: str) -> None:
    """No sentence in docstrings and comments has a relative clause as its subject."""
    found = [(*docstrings(path, source), *comments(path, source)) for path, source in sources([folder])]
    assert not relative_subjects(one for of_file in found for one in of_file)


@pytest.mark.parametrize("folder", sorted(EVERYTHING))
def test_names_in_docstrings_exist(folder: str) -> None:
    gone = [
        f"{path}:{line}: `{word}`"
        for file, source in sources([folder])
        for path, line, text in docstrings(file, source)
        for word in named(text)
        if word not in known()
    ]
    assert not gone


def test_relative_subjects_are_detected() -> None:
    """The check detects sentences whose subject is a relative clause, but not questions."""
    source = "'What is left goes.'\n# Who comes late waits.\n'What is left? It shows what is left.'\n"
    found = [*docstrings("a.py", source), *comments("a.py", source)]
    assert [one.split(": ")[1] for one in relative_subjects(iter(found))] == [
        "What is left goes.",
        "Who comes late waits.",
    ]


def test_fragments_and_dead_names_are_detected() -> None:
    gone = "_".join(("no", "such", "name"))
    lines = (
        "class A:",
        "    x: int",
        "    'Of the pool.'",
        "    y: int",
        "    'A sum ...'",
        "    z: int",
        f"    'See `{gone}(1)`.'",
    )
    found = list(docstrings("a.py", "\n".join(lines)))
    assert len(fragments(iter(found))) == 2
    assert [word for _, _, text in found for word in named(text) if word not in known()] == [gone]


def renamed(path: str, source: str) -> list[str]:
    """Imports that give something of ours another name. Two of the same name in one file may have one each."""
    imports = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    return [
        f"{path}:{node.lineno}: {alias.name} as {alias.asname}"
        for node in imports
        for alias in node.names
        if node.module and node.module.split(".")[0] in EVERYTHING
        if alias.asname not in (None, alias.name) and names.count(alias.name) < 2
    ]


def test_imports_keep_their_names() -> None:
    """Imports within the project do not rename anything."""
    assert not [one for path, source in sources(sorted(EVERYTHING)) for one in renamed(path, source)]
    source = "from proto import limits as bounds\nfrom proto import codec as codec\n"
    assert renamed("a.py", source) == ["a.py:1: limits as bounds"]
