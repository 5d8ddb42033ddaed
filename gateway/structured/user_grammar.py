"""Grammars that clients write, in Lark or in llama.cpp's GBNF: what is refused of them before they are compiled. Pure."""

import re
from typing import Final

_DIRECTIVES: Final = re.compile(r"^\s*%(?!ignore\b|import\b)(\w+)|%(json|regex|lark|llguidance)\b", re.MULTILINE)
_SET_OPERATORS: Final = re.compile(r"[&~]")
SET_OPERATORS_MAX: Final = 2
"""To intersect or negate regular expressions can take exponential time. Those in strings are counted as well."""
LINES_MAX: Final = 2000


class UserGrammarError(Exception):
    """The grammar is refused; `str()` is for the user."""


def as_lark(text: str) -> str:
    """Raises `UserGrammarError`."""
    if text.count("\n") > LINES_MAX:
        raise UserGrammarError(f"the grammar has more than {LINES_MAX} lines")
    if "::=" in text:
        text = _from_gbnf(text)
    if found := _DIRECTIVES.search(text):
        raise UserGrammarError(f"the directive '%{found[1] or found[2]}' is not supported in a grammar")
    if len(_SET_OPERATORS.findall(text)) > SET_OPERATORS_MAX:
        raise UserGrammarError(f"more than {SET_OPERATORS_MAX} of the operators & and ~ are not supported")
    if not re.search(r"^\s*start\s*:", text, re.MULTILINE):
        raise UserGrammarError("a grammar in Lark needs a rule named 'start', and one in GBNF a rule named 'root'")
    return text


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(text)).replace("%llguidance {}", "", 1)
    except (GbnfToLarkError, RecursionError, ValueError, IndexError) as error:
        raise UserGrammarError(f"the GBNF cannot be read: {str(error)[:200]}") from None
