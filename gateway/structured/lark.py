"""Writes grammars in llguidance's dialect of Lark. Pure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.structured.schema import Path, SchemaError, mentioned, prepared, where
from proto import limits

SplitSpecial = Callable[[str], list[str | int]]  # text → its parts: text, and ids of special tokens in it
_ANY: Final = r"/(.|\n)*/"
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
"""If this option is off, llguidance writes text that has no alternative with any tokens of the tokenizer, including special
ones. Text that spells a special token would then end the answer, or would not match."""
_TOO_LARGE: Final = f"it makes a grammar of more than {limits.MAX_GRAMMAR_CHARS} characters"
_CALLS_CHARS_MAX: Final = limits.MAX_GRAMMAR_CHARS // 2  # behind it schemas are left out, for names of functions
_OBJECT: Final = {"type": "object"}
_FOR_GOOD: Final = ("Unsatisfiable", "no answer matches", "it takes more than")  # what leaving out parts does not cure
_PATHS_MAX: Final = 32
_PLACES_MAX: Final = 3


class TooLarge(Exception):
    """The grammar is refused; `str()` is for the user."""


@dataclass(frozen=True)
class Relaxed:
    """The parts of schemas without `strict` that are left out of the grammar."""

    paths: frozenset[tuple[int, Path]] = frozenset()  # each with the number of its schema
    structure_only: bool = False

    def of(self, number: int) -> set[Path]:
        return {path for one, path in self.paths if one == number}


NOTHING: Final = Relaxed()


@dataclass(frozen=True)
class Schema:
    """A schema that the answer, or a call's arguments, must match."""

    schema: Any
    strict: bool
    is_whole: bool  # It is a whole rule in the grammar
    call: str  # The function whose arguments it is of; empty: it is of the answer

    def explained(self, verdict: str) -> str:
        """Why the grammar is refused, with the keywords that this is about, as far as that can be told."""
        places = ", ".join(map(where, mentioned(self.schema, verdict)[:_PLACES_MAX]))
        of = f" of the function '{self.call}'" if self.call and places else ""
        return f"{verdict} ({places}{of})" if places else verdict


def next_relaxed(schemas: Sequence[Schema], relaxed: Relaxed, verdict: str) -> Relaxed | None:
    """The next part to leave out of a grammar that was refused; None: nothing is left to leave out."""
    lenient = [(number, schema.schema) for number, schema in enumerate(schemas) if not schema.strict]
    if not lenient or any(word in verdict for word in _FOR_GOOD):
        return None
    paths = relaxed.paths | {(number, path) for number, schema in lenient for path in mentioned(schema, verdict)}
    if len(relaxed.paths) < min(len(paths), _PATHS_MAX):
        return Relaxed(paths, relaxed.structure_only)
    return None if relaxed.structure_only else Relaxed(paths, structure_only=True)


class Grammar:
    """Collects the rules of a grammar; `text` returns the whole grammar. Expressions are strings."""

    def __init__(
        self, split: SplitSpecial, relaxed: Relaxed = NOTHING, *, split_own: SplitSpecial | None = None
    ) -> None:
        """`split` is for texts of clients, `split_own` for marks of ours."""
        self._split = split
        self._split_own = split_own or split
        self._relaxed = relaxed
        self._chars = 0
        self.schemas: list[Schema] = []
        self._any_object = ""  # The rule for it, once there is one
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []

    def text(self, start: str) -> str:
        lark = "\n".join([_OPTIONS, f"start: {start}", *self._rules])
        if not self._others:
            return lark
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]}, ensure_ascii=False)

    def rule(self, body: str, attributes: str = "", *, prefix: str = "r") -> str:
        """Raises `TooLarge`."""
        self._chars += len(body)
        if self._chars > limits.MAX_GRAMMAR_CHARS:
            raise TooLarge(_TOO_LARGE)
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def plain(self, text: str) -> str:
        """Returns an expression for the text in ordinary tokens, even if a special token is spelled like it."""
        return _quoted(text)

    def literal(self, text: str, *, own: bool = False) -> str:
        """`own`: a mark of ours. Raises `TooLarge`."""
        parts = [f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._parts(text, own)]
        return " ".join(parts) or '""'

    def _parts(self, text: str, own: bool) -> list[str | int]:
        if len(text) > limits.MAX_GRAMMAR_CHARS:
            raise TooLarge(_TOO_LARGE)
        return (self._split_own if own else self._split)(text)

    def json(self, schema: Any, *, strict: bool, call: str = "") -> str:
        """`call`: of the arguments of calls to this function. They are any object if the schema is not strict and there is no
        room for it. Raises `SchemaError` and `TooLarge`."""
        left_out, structure_only = self._relaxed.of(len(self.schemas)), self._relaxed.structure_only
        try:
            found = prepared(schema, strict=strict, left_out=left_out, structure_only=structure_only)
            body = "%json " + json.dumps(found.schema, ensure_ascii=False)
            if call and not strict and self._chars + len(body) > _CALLS_CHARS_MAX:
                raise SchemaError(_TOO_LARGE)
        except SchemaError:
            if strict or not call:
                raise
            self.schemas.append(Schema(schema, strict, is_whole=True, call=call))
            self._any_object = self._any_object or self.rule(
                "%json " + json.dumps(prepared(_OBJECT, strict=True).schema)
            )
            return self._any_object
        self.schemas.append(Schema(schema, strict, found.is_whole, call))
        return self.rule(body)

    def regex(self, pattern: str) -> str:
        """Matches as a whole, with or without anchors. Raises `TooLarge`."""
        if len(pattern) > limits.MAX_GRAMMAR_CHARS:
            raise TooLarge(f"the regular expression has more than {limits.MAX_GRAMMAR_CHARS} characters")
        return self.rule(f"/{_slashed(pattern)}/")

    def any_text(self) -> str:
        return self.rule(_ANY)

    def up_to(self, end: str, *, own: bool = False) -> str:
        """Any text up to the first `end`, which is part of it."""
        parts = self._parts(end, own)
        if len(parts) == 1 and isinstance(parts[0], str):
            return self._lazy(end)
        return self.rule(f"{_ANY} {self.literal(end, own=own)}")

    def _lazy(self, end: str) -> str:
        return self.rule(self.rule(f"{_ANY} {_quoted(end)}", prefix="T"), "[lazy]")

    def either(self, options: list[str]) -> str:
        return self.rule(" | ".join(options))

    def sub_grammar(self, lark: str) -> str:
        """A whole grammar, with rules of its own."""
        name = f"g{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": f"{_OPTIONS}\n{lark}"})
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
