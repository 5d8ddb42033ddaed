"""Checks grammars that clients write, in Lark or in llama.cpp's GBNF, before they are compiled. Pure."""

import re
from typing import Final

from proto import limits

# No white space here may run across lines: with MULTILINE, that takes quadratic time.
_DIRECTIVES: Final = re.compile(
    r"^[ \t\r\f\v]*%(?!ignore\b|import\b)(\w+)|%(json|regex|lark|llguidance)\b", re.MULTILINE
)
_START: Final = re.compile(r"^[ \t\r\f\v]*start[ \t\r\f\v]*:", re.MULTILINE)
SET_OPERATORS_MAX: Final = 2  # on regular expressions, where they can take exponential time
LINES_MAX: Final = 2000
GBNF_WORK_MAX: Final = 4_000_000  # rules times characters: its reader may look at each character once for each rule


class UserGrammarError(Exception):
    """The grammar is refused; `str()` is for the user."""


def as_lark(text: str) -> str:
    """Raises `UserGrammarError`."""
    _check_size(text)
    if "::=" in text:
        text = _from_gbnf(text)
    if found := _DIRECTIVES.search(text):
        raise UserGrammarError(f"the directive '%{(found[1] or found[2])[:40]}' is not supported in a grammar")
    if text.count("&") + text.count("~") > SET_OPERATORS_MAX:
        raise UserGrammarError(f"more than {SET_OPERATORS_MAX} of the operators & and ~ are not supported")
    if not _START.search(text):
        raise UserGrammarError("a grammar in Lark needs a rule named 'start', and one in GBNF a rule named 'root'")
    return text


def _check_size(text: str) -> None:
    if len(text) > limits.MAX_GRAMMAR_CHARS:
        raise UserGrammarError(f"the grammar has more than {limits.MAX_GRAMMAR_CHARS} characters")
    if text.count("\n") > LINES_MAX:
        raise UserGrammarError(f"the grammar has more than {LINES_MAX} lines")


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") * len(text) > GBNF_WORK_MAX:
        raise UserGrammarError("the GBNF is too large: write it in Lark")
    try:
        return str(gbnf_to_lark(text)).replace("%llguidance {}", "", 1)
    except Exception as error:  # noqa: BLE001 (it raises Exception itself, besides what its parser stumbles over)
        raise UserGrammarError(f"the GBNF cannot be read: {str(error)[:200]}") from None
