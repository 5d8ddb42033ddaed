"""Whether any finite answer matches a grammar. Pure; it runs in the process that compiles, under its limit of CPU time.

A rule is finite if all parts of one of its alternatives are finite. A schema is finite if it has a finite instance. The check
repeats until nothing changes, which gives the least fixed point. Unknown constructs count as finite.
"""

import json
import re
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"""(?P<skip>[ \t\r\f\v]+|//[^\n]*|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<schema>%json[ ])
    |(?P<directive>%\w+[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*+"?i?|/(?:[^/\\\n]|\\.)*+/?[a-z]{0,9}|<[^<>\n]{0,200}>)
    |(?P<repeat>\{[^{}\n]{0,40}\}|[*+?]|~[ ]{0,9}\d{1,9}(?:\.\.\d{1,9})?)
    |(?P<other_grammar>@\w+)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>.)""",
    re.VERBOSE,
)
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})


def has_finite_answer(grammar: str) -> bool:
    """`grammar`: as `gateway.structured.lark` writes them."""
    if not grammar.startswith("{"):
        return _Lark(grammar, frozenset()).is_finite
    parts: list[dict[str, str]] = json.loads(grammar)["grammars"]
    # The first refers to the others, which refer to none.
    finite = frozenset(part["name"] for part in parts[1:] if _Lark(part["lark_grammar"], frozenset()).is_finite)
    return _Lark(parts[0]["lark_grammar"], finite).is_finite


class _Lark:
    def __init__(self, text: str, others: frozenset[str]) -> None:
        self._others = others
        self._finite: set[str] = set()  # Names of rules
        rules = _rules(text)
        waiting = list(rules)
        while waiting:
            left = [name for name in waiting if not self._holds(rules[name])]
            if len(left) == len(waiting):
                break
            self._finite |= set(waiting) - set(left)
            waiting = left
        self.is_finite = "start" in self._finite or "start" not in rules

    def _holds(self, tokens: list[tuple[str, str]]) -> bool:
        """Whether one of the alternatives has finite parts only, given what is known of other rules."""
        stack: list[tuple[bool, bool]] = []
        """The state of each open bracket: (whether an alternative before it was finite, whether the one it is in is so far)."""
        any_before, so_far, last = False, True, True
        for kind, text in [*tokens, ("mark", "|")]:
            if kind == "repeat":
                last = last or not _at_least_one(text)
                continue
            so_far = so_far and last
            last = True
            if kind == "name":
                last = text in self._finite
            elif kind == "other_grammar":
                last = text[1:] in self._others
            elif kind == "schema":
                last = _Schema(text).is_finite
            elif text in ("(", "["):
                stack.append((any_before, so_far))
                any_before, so_far = False, True
            elif text == "|":
                any_before, so_far = any_before or so_far, True
            elif text in (")", "]") and stack:
                inner = any_before or so_far or text == "]"
                any_before, so_far = stack.pop()
                last = inner
        return any_before


def _at_least_one(repeat: str) -> bool:
    if repeat[0] == "~":
        return not repeat[1:].strip().startswith("0")
    return repeat[0] == "+" or (repeat[0] == "{" and repeat[1:].strip()[:1] not in ("0", ",", ""))


def _rules(text: str) -> dict[str, list[tuple[str, str]]]:
    """Tokens of each rule's body."""
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] = []
    at, decoder = 0, json.JSONDecoder()
    fresh = True  # The parser is at the start of a line
    while found := _TOKEN.match(text, at):
        kind = next(name for name in _KINDS if found[name] is not None)
        at = found.end()
        if kind == "schema":
            _, end = decoder.raw_decode(text, at)
            body.append((kind, text[at:end]))
            at = end
        elif kind == "newline":
            fresh = True
            continue
        elif kind == "name" and fresh and (head := _HEAD.match(text, at)):
            body = rules.setdefault(found[kind], [])
            at = head.end()
        elif kind not in ("skip", "directive"):
            body.append((kind, found[kind]))
        fresh = fresh and kind == "skip"
    return rules


_KINDS: Final = ("skip", "newline", "schema", "directive", "text", "repeat", "other_grammar", "name", "mark")
_HEAD: Final = re.compile(r"(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:")  # The text between a rule's name and its body


class _Schema:
    def __init__(self, text: str) -> None:
        self._root: Any = json.loads(text)
        self._finite: set[int] = set()  # Ids of subschemas
        nodes = [node for node in _dicts(self._root) if isinstance(node, dict)]
        nodes.reverse()  # parts come before what they are part of
        while True:
            before = len(self._finite)
            nodes = [node for node in nodes if not self._note(node)]
            if len(self._finite) == before:
                break
        self.is_finite = self._is(self._root)

    def _note(self, node: dict[str, Any]) -> bool:
        if holds := self._holds(node):
            self._finite.add(id(node))
        return holds

    def _is(self, node: Any) -> bool:
        return node is not False and (not isinstance(node, dict) or id(node) in self._finite)

    def _holds(self, node: dict[str, Any]) -> bool:
        if "$ref" in node and not self._is(self._target(node["$ref"])):
            return False
        if not all(map(self._is, _list(node.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list) and not any(map(self._is, node[key])):
                return False
        if "const" in node or "enum" in node:
            return True
        # The mapping under `properties` comes here as well. Its values are schemas, so its `type` may be one.
        asked = node.get("type", "string")
        types = {name for name in (asked if isinstance(asked, list) else [asked]) if isinstance(name, str)}
        return not types <= {"object", "array"} or any(self._has_instance(node, kind) for kind in types)

    def _has_instance(self, node: dict[str, Any], kind: str) -> bool:
        if kind == "object":
            named = node.get("properties")
            properties = named if isinstance(named, dict) else {}
            others = node.get("additionalProperties", True) if "patternProperties" not in node else True
            return all(
                self._is(properties.get(name, others)) for name in _list(node.get("required")) if isinstance(name, str)
            )
        least = node.get("minItems", 0)
        first = _list(node.get("prefixItems"))[: least if isinstance(least, int) else 0]
        if not all(map(self._is, first)):
            return False
        return (
            not isinstance(least, int)
            or least <= len(_list(node.get("prefixItems")))
            or self._is(node.get("items", True))
        )

    def _target(self, ref: Any) -> Any:
        """True where it is not found."""
        if ref == "#":
            return self._root
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return True
        found = self._root
        for part in ref[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part, True) if isinstance(found, dict) else True
        return found if isinstance(found, dict) else True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Any]:
    """All objects and lists in a JSON value, each before its parts."""
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            found.append(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found
