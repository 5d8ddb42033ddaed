"""Reads tool calls from a model's text while it arrives. Pure.

One reader for all forms: `{"name": …, "arguments": {…}}`, alone, in a list or one behind the other, and `NAME[ARGS]{…}`.
Arguments that are an object behind the call's name are passed on as they come, and others when the call is whole.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_BETWEEN: Final = frozenset(" \t\r\n,;[]")
_ARGS: Final = "[ARGS]"
_HEAD_CHARS_MAX: Final = 4096  # of a call before its arguments, where these are to be passed on


@dataclass(frozen=True)
class CallBegun:
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


class CallReader:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._head: list[str] = []  # of the present call, up to its arguments
        self._depth = 0
        self._in_string = self._escaped = False
        self._around: int | None = None  # the depth around the arguments that are passed on
        self._is_named = False

    @property
    def is_between(self) -> bool:
        """Whether all calls that have begun are whole."""
        return not self._head

    def feed(self, text: str) -> list[CallBegun | Arguments]:
        """The events that have become certain with this text."""
        found: list[CallBegun | Arguments] = []
        given: list[str] = []
        for char in text:
            if not self._head and char in _BETWEEN:
                continue
            depth = self._depth
            self._scan(char)
            if not self._is_named and (name := self._name(char, depth)) is not None:
                self._is_named, self._around = True, depth
                found.append(CallBegun(name))
            if self._around is None:
                self._head.append(char)
            elif self._depth > self._around or depth > self._around:
                given.append(char)
                if self._depth == self._around:
                    found.append(Arguments("".join(given)))
                    given, self._around = [], None
            if self._depth == 0 and depth == 1 and (self._is_named or self._head[0] == "{"):
                if not self._is_named:
                    found += _whole("".join(self._head))
                self._begin()
        return [*found, Arguments("".join(given))] if given else found

    def _scan(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _name(self, char: str, depth: int) -> str | None:
        """The name of the call whose arguments begin with this character, if it is known."""
        if char != "{" or self._in_string or depth > 1 or not 0 < len(self._head) <= _HEAD_CHARS_MAX:
            return None
        head = "".join(self._head)
        if depth == 0:
            return head.rstrip().removesuffix(_ARGS).strip() if head.rstrip().endswith(_ARGS) else None
        call = _decoded(head + "null}")
        return call["name"] if isinstance(call.get("name"), str) and [*call][-1] in ARGUMENT_KEYS else None


def _whole(text: str) -> list[CallBegun | Arguments]:
    call = _decoded(text)
    if not isinstance(name := call.get("name"), str):
        return []
    given = [call[key] for key in ARGUMENT_KEYS if key in call]
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in given[:1]]
    return [CallBegun(name), *map(Arguments, texts)]


def _decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
