"""Writes grammars in llguidance's dialect of Lark. Pure."""

import json
from collections.abc import Callable
from typing import Any, Final

from gateway.structured.schema import prepared

SplitSpecial = Callable[[str], list[str | int]]
"""A text → its parts: text, and the ids of special tokens in it, which a grammar has to name by their ids."""
_ANY: Final = r"/(.|\n)*/"


class Grammar:
    """Rules by and by; `text` is the whole. Expressions are passed around as text."""

    def __init__(self, split: SplitSpecial) -> None:
        self._split = split
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []

    def text(self, start: str) -> str:
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._others:
            return lark
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]}, ensure_ascii=False)

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        parts = [f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._split(text)]
        return " ".join(parts) or '""'

    def json(self, schema: Any, *, strict: bool) -> str:
        """Raises `SchemaError`."""
        return self.rule("%json " + json.dumps(prepared(schema, strict=strict), ensure_ascii=False))

    def regex(self, pattern: str) -> str:
        """Matches as a whole, with or without anchors."""
        return self.rule(f"/{_slashed(pattern)}/")

    def any_text(self) -> str:
        return self.rule(_ANY)

    def up_to(self, end: str) -> str:
        """Any text up to the first `end`, which is part of it."""
        parts = self._split(end)
        if len(parts) == 1 and isinstance(parts[0], str):
            return self._lazy(end)
        return self.rule(f"{_ANY} {self.literal(end)}")

    def _lazy(self, end: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {_ANY} {_quoted(end)}")
        return self.rule(name, "[lazy]")

    def either(self, options: list[str]) -> str:
        return self.rule(" | ".join(options))

    def sub_grammar(self, lark: str) -> str:
        """A whole grammar, with rules of its own."""
        name = f"g{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """A regular expression between slashes: those in it are escaped, and line ends written as such."""
    found, escaped = [], False
    for char in pattern:
        found.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(found)
