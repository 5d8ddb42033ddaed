"""Reads tool calls from a model's text while it arrives. Pure.

One reader for all forms: `{"name": …, "arguments": {…}}`, alone, in a list or one behind the other, and `NAME[ARGS]{…}`.
"""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_BETWEEN: Final = frozenset(" \t\r\n,;[]")
_ARGS: Final = "[ARGS]"


@dataclass(frozen=True)
class CallBegun:
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


class _At(Enum):
    BETWEEN = "between calls"
    NAME = "in a bare name"
    KEY = "before or in a key"
    VALUE = "in a value"


class CallReader:
    def __init__(self) -> None:
        self._at = _At.BETWEEN
        self._token = ""  # The part of the present name, key or value that has come
        self._key: str | None = None
        self._depth = 0
        self._in_string = self._escaped = False
        self._name: str | None = None
        self._arguments: str | None = None  # The complete arguments, if they came before the name
        self._passed_on = 0  # Characters of the present call's arguments
        self._streams = self._is_bare = False
        self._out: list[CallBegun | Arguments] = []

    @property
    def is_between(self) -> bool:
        """Whether all calls that have begun are whole."""
        return self._at is _At.BETWEEN

    def feed(self, text: str) -> list[CallBegun | Arguments]:
        """The events that have become certain with this text."""
        self._out = []
        for char in text:
            match self._at:
                case _At.BETWEEN:
                    self._between(char)
                case _At.NAME:
                    self._bare_name(char)
                case _At.KEY:
                    self._in_key(char)
                case _At.VALUE:
                    self._in_value(char)
        self._flush()
        return self._out

    # --- one character ----------------------------------------------------------------------------------------------------

    def _between(self, char: str) -> None:
        if char in _BETWEEN:
            return
        self._name, self._arguments = None, None
        self._token, self._key = "", None
        if char == "{":
            self._at = _At.KEY
        else:
            self._at, self._token = _At.NAME, char

    def _bare_name(self, char: str) -> None:
        self._token += char
        if self._token.endswith(_ARGS):
            self._name = self._token.removesuffix(_ARGS).strip()
            self._out.append(CallBegun(self._name))
            self._key = ARGUMENT_KEYS[0]
            self._begin_value(bare=True)

    def _in_key(self, char: str) -> None:
        if not self._token and char == "}":
            self._at = _At.BETWEEN
        elif (not self._token and char != '"') or self._string_goes_on(char):
            return
        elif char == ":":
            self._key = _text_of(self._token)
            self._begin_value()

    def _string_goes_on(self, char: str) -> bool:
        """Takes the characters of a key."""
        if self._token and not self._in_string:
            return False
        self._token += char
        if len(self._token) == 1:
            self._in_string = True
        elif self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
        return True

    def _begin_value(self, *, bare: bool = False) -> None:
        self._at, self._token, self._depth = _At.VALUE, "", 0
        self._in_string = self._escaped = False
        self._streams = self._key in ARGUMENT_KEYS and self._name is not None
        self._is_bare, self._passed_on = bare, 0

    def _in_value(self, char: str) -> None:
        if not self._token and not self._depth and char.isspace():
            return
        if not self._in_string and self._depth == 0 and char in ",}":
            self._value_ends()
            self._at, self._token = (_At.KEY, "") if char == "," else (_At.BETWEEN, "")
            return
        self._token += char
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0 and self._is_bare:
                self._value_ends()
                self._at = _At.BETWEEN

    # --- whole values -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Arguments are passed on as they come, unless they are written as a string."""
        if self._at is _At.VALUE and self._streams and self._token and not self._token.startswith('"'):
            self._pass_on(self._token)

    def _pass_on(self, text: str) -> None:
        """Pass on the rest of `text`, which holds the arguments that have come."""
        if len(text) > self._passed_on:
            self._out.append(Arguments(text[self._passed_on :]))
        self._passed_on = len(text)

    def _value_ends(self) -> None:
        if self._key == "name" and self._name is None:
            self._name = _text_of(self._token)
            self._out.append(CallBegun(self._name))
            if self._arguments is not None:
                self._out.append(Arguments(self._arguments))
        elif self._key in ARGUMENT_KEYS:
            text = self._token.rstrip()
            if text.startswith('"'):
                text = _text_of(text)
            if self._name is None:
                self._arguments = text
            else:
                self._pass_on(text)


def _text_of(token: str) -> str:
    try:
        value = json.loads(token)
    except ValueError:
        return token.strip().strip('"')
    return value if isinstance(value, str) else token
