"""The faults of a tenants file, in words. Pure.

Messages never repeat text of the file except names of tables and settings, since the text may be a key in the wrong place. Our
own validators must follow this rule too.
"""

import re
from typing import Any, Final

from pydantic_core import ErrorDetails

_SHOWN: Final = re.compile(r"[A-Za-z0-9_./\[\]-]{1,40}")
_KEY_LIKE: Final = re.compile(r"\b(sk|cd)-|[0-9A-Fa-f]{16}")  # keys as `crossdock tenants key` and others make them


def explain(details: ErrorDetails) -> str:
    """`tenants.acme.users.ann.weight: must be over 0, not -1`."""
    loc = [name_shown(str(part)) for part in details["loc"]]
    is_name = loc[-1:] == ["[key]"]
    where = ".".join(loc[:-1] if is_name else loc)
    if is_name:
        return f"{where}: a name is 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'"
    return f"{where}: {_what_is_wrong(details)}"


def name_shown(name: str) -> str:
    """The name of a table or setting, unless it might be a key."""
    return name if _SHOWN.fullmatch(name) and not _KEY_LIKE.search(name) else "…"


def not_toml(error: ValueError | RecursionError) -> str:
    """Where the text stops being TOML. The parser's further words repeat the text."""
    if isinstance(error, RecursionError):
        return "not TOML that can be read: it is nested too deeply"
    at = re.search(r"\(at (line \d+, column \d+|end of document)\)", str(error))
    return f"not TOML, at {at[1]}" if at else "not TOML"


def _what_is_wrong(details: ErrorDetails) -> str:
    context: dict[str, Any] = details.get("ctx", {})
    value, kind = details["input"], details["type"]
    given = "table" if isinstance(value, dict) else type(value).__name__
    shown = f"{value:g}" if type(value) in (int, float) and abs(value) < 1e15 else f"a {given}"
    match kind:
        case "extra_forbidden":
            return "there is no such setting"
        case "missing":
            return "is needed"
        case "greater_than":
            return f"must be > {context['gt']:g}, not {shown}"
        case "greater_than_equal":
            return f"must be >= {context['ge']:g}, not {shown}"
        case "less_than":
            return f"must be < {context['lt']:g}, not {shown}"
        case "less_than_equal":
            return f"must be <= {context['le']:g}, not {shown}"
        case "string_pattern_mismatch" if "keys" in details["loc"]:
            return "must be a SHA-256 in 64 lower-case hex digits; make a key with: crossdock tenants key"
        case "string_pattern_mismatch":
            return "must be 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long" | "string_too_long":
            return f"may have {context['max_length']} at most"
        case "literal_error":
            return f"must be {context['expected']}"
        case "finite_number":
            return "must be a number that is finite"
        case "int_from_float":
            return "must be a whole number"
        case "value_error":
            return str(context["error"])
        case _ if kind.endswith("_type"):
            wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "dict": "a table"}
            name = kind.removesuffix("_type")
            return f"must be {wanted.get(name, 'a table' if name == 'model' else f'a {name}')}, not {shown}"
        case _:
            return "is not valid"
