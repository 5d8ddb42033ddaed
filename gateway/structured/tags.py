"""Structural tags, as XGrammar and vLLM define them, as rules of a grammar. Pure."""

from collections.abc import Callable
from typing import Any, Final

from gateway.structured.lark import Grammar

DEPTH_MAX: Final = 16
ELEMENTS_MAX: Final = 256
REPEAT_MAX: Final = 1000


class TagError(Exception):
    """The structural tag is refused; `str()` is for the user."""


def tag(content: dict[str, Any], grammar: Grammar) -> str:
    """The expression of `{"type": "structural_tag", "format": …}`, or of the older form with `structures` and `triggers`.
    Raises `TagError` and `SchemaError`."""
    if "structures" in content or "triggers" in content:
        return _older(content, grammar)
    if "format" not in content:
        raise TagError("it needs 'format'")
    return _format(content["format"], grammar, 1)


def _older(content: dict[str, Any], grammar: Grammar) -> str:
    structures, triggers = content.get("structures"), content.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise TagError("'structures' and 'triggers' must be lists")
    tags = []
    for one in structures:
        if not isinstance(one, dict) or not isinstance(one.get("schema"), dict):
            raise TagError("each of 'structures' must have 'begin', 'schema' and 'end'")
        inner = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": inner, "end": one.get("end")})
    return _format({"type": "triggered_tags", "triggers": triggers, "tags": tags}, grammar, 1)


def _format(content: Any, grammar: Grammar, depth: int) -> str:
    if depth > DEPTH_MAX:
        raise TagError(f"it is nested deeper than {DEPTH_MAX} levels")
    if not isinstance(content, dict) or not isinstance(content.get("type"), str):
        raise TagError("each format must be an object with 'type'")
    kind = content["type"]
    if kind not in _FORMATS:
        raise TagError(f"the format {kind[:40]!r} is not supported; these are: {', '.join(_FORMATS)}")
    write, fields = _FORMATS[kind]
    for key in content.keys() - {"type", *fields}:
        raise TagError(f"a format of the type {kind!r} has no field {key[:40]!r} here")
    return grammar.rule(write(content, grammar, depth))


def _text(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise TagError(f"{key!r} must be a string, and not empty")
    return value


def _elements(content: dict[str, Any], key: str = "elements") -> list[Any]:
    value = content.get(key)
    if not isinstance(value, list) or not 1 <= len(value) <= ELEMENTS_MAX:
        raise TagError(f"{key!r} must be a list of 1 to {ELEMENTS_MAX}")
    return value


def _tag_parts(content: Any, grammar: Grammar, depth: int) -> tuple[str, str]:
    """(begin, the expression of content and end)"""
    if not isinstance(content, dict) or content.get("type", "tag") != "tag":
        raise TagError("'tags' must be formats of the type 'tag'")
    begin, inner = content.get("begin"), content.get("content")
    ends = content.get("end")
    ends = ends if isinstance(ends, list) else [ends]
    if not isinstance(begin, str) or not ends or not all(isinstance(end, str) for end in ends):
        raise TagError("a tag's 'begin' must be a string, and 'end' one or several")
    if isinstance(inner, dict) and inner.get("type") == "any_text" and len(ends) == 1 and ends[0]:
        if inner.keys() - {"type"}:
            raise TagError("'any_text' has no other fields here")
        return begin, grammar.up_to(ends[0])
    closing = grammar.either([grammar.literal(end) for end in ends])
    return begin, f"{_format(inner, grammar, depth + 1)} {closing}"


def _tag(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    begin, rest = _tag_parts(content, grammar, depth)
    return f"{grammar.literal(begin)} {rest}"


def _triggered(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    triggers = _elements(content, "triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise TagError("'triggers' must be strings, none of them empty")
    options: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for one in _elements(content, "tags"):
        begin, rest = _tag_parts(one, grammar, depth)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise TagError(f"no trigger begins the tag {begin[:40]!r}")
        options[trigger].append(f"{grammar.literal(begin[len(trigger) :])} {rest}")
    calls = grammar.either([f"{grammar.up_to(key)} {grammar.either(rest)}" for key, rest in options.items() if rest])
    least_one, first_only = _flag(content, "at_least_one"), _flag(content, "stop_after_first")
    if first_only:
        return calls if least_one else f"{calls} | {grammar.any_text()}"
    return f"{calls}{'+' if least_one else '*'} {grammar.any_text()}"


def _separated(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    separator = _text(content, "separator")
    one = grammar.either([_format({"type": "tag", **part}, grammar, depth + 1) for part in _elements(content, "tags")])
    least_one, first_only = _flag(content, "at_least_one"), _flag(content, "stop_after_first")
    several = one if first_only else f"{one} ({grammar.literal(separator)} {one})*"
    return several if least_one else f"({several})?"


def _flag(content: dict[str, Any], key: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise TagError(f"{key!r} must be true or false")
    return value


def _repeat(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    least, most = content.get("min"), content.get("max")
    if type(least) is not int or type(most) is not int or not 0 <= least <= REPEAT_MAX or not -1 <= most <= REPEAT_MAX:
        raise TagError(f"'min' and 'max' must be whole numbers up to {REPEAT_MAX}; 'max' -1 is without limit")
    if most != -1 and most < max(least, 1):
        raise TagError("'max' must not be below 'min'")
    return f"{_inner(content, grammar, depth)}{{{least},{'' if most == -1 else most}}}"


def _inner(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    return _format(content.get("content"), grammar, depth + 1)


def _or(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    return grammar.either([_format(part, grammar, depth + 1) for part in _elements(content)])


def _sequence(content: dict[str, Any], grammar: Grammar, depth: int) -> str:
    return " ".join(_format(part, grammar, depth + 1) for part in _elements(content))


_Write = Callable[[dict[str, Any], Grammar, int], str]
_FORMATS: Final[dict[str, tuple[_Write, tuple[str, ...]]]] = {
    "const_string": (lambda content, grammar, _: grammar.literal(_text(content, "value")), ("value",)),
    "json_schema": (
        lambda content, grammar, _: grammar.json(content.get("json_schema"), strict=True),
        ("json_schema",),
    ),
    "regex": (lambda content, grammar, _: grammar.regex(_text(content, "pattern")), ("pattern",)),
    "any_text": (lambda content, grammar, _: grammar.any_text(), ()),
    "sequence": (_sequence, ("elements",)),
    "or": (_or, ("elements",)),
    "optional": (lambda content, grammar, depth: f"({_inner(content, grammar, depth)})?", ("content",)),
    "plus": (lambda content, grammar, depth: f"({_inner(content, grammar, depth)})+", ("content",)),
    "star": (lambda content, grammar, depth: f"({_inner(content, grammar, depth)})*", ("content",)),
    "repeat": (_repeat, ("min", "max", "content")),
    "tag": (_tag, ("begin", "content", "end")),
    "triggered_tags": (_triggered, ("triggers", "tags", "at_least_one", "stop_after_first")),
    "tags_with_separator": (_separated, ("tags", "separator", "at_least_one", "stop_after_first")),
}  # how each is written, and its fields
