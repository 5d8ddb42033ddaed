"""The pages of the repository, and their commands and other blocks as tests take them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DOCS = [
    path for folder in ("", "configuration", "scenarios") for path in sorted((ROOT / "docs" / folder).glob("*.md"))
]
PAGES = [ROOT / "README.md", *_DOCS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]  # those whose commands are checked
ALL_PAGES = [*PAGES, ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    heading: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    heading: str
    text: str  # as a shell takes it
    words: tuple[str, ...]  # without sudo and variables set in front, and the file that the output goes to

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def blocks(language: str) -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in _FENCE.finditer(text):
            if found[1] == language:
                before = text[: found.start()]
                headings = re.findall(r"^#+ (.+)$", re.sub(_FENCE, "", before), re.MULTILINE)
                page = path.relative_to(ROOT).as_posix()
                yield Block(page, before.count("\n") + 2, headings[-1], language, found[2])


def commands() -> list[Command]:
    return [command for block in blocks("sh") for command in _commands_of(block)]


def _commands_of(block: Block) -> Iterator[Command]:
    kept, began = "", 0
    for number, line in enumerate(block.text.splitlines()):
        began = began if kept else number
        kept += line + "\n"
        words = _words(kept)
        if words is None:
            continue
        if words:
            yield Command(block.page, block.line + began, block.heading, kept.rstrip("\n"), words)
        kept = ""
    assert not kept, f"{block.page}:{block.line}: a command without its end: {kept}"


def _words(text: str) -> tuple[str, ...] | None:
    """None: the command goes on."""
    if text.endswith("\\\n"):
        return None
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return None
    while words and (words[0] == "sudo" or _ASSIGNMENT.match(words[0])):
        del words[0]
    if words[-2:-1] == [">"]:
        del words[-2:]
    assert not {"&&", "|", ";", ">"} & set(words), f"one command to a line: {text}"
    return tuple(words)
