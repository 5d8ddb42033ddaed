"""What is wrong with a tenants file, in words. Pure."""

from typing import Any

from pydantic_core import ErrorDetails


def explain(details: ErrorDetails) -> str:
    """`tenants.acme.users.ann.weight: must be over 0, not -1`."""
    loc = [str(part) for part in details["loc"]]
    is_name = loc[-1:] == ["[key]"]
    where = ".".join(loc[:-1] if is_name else loc)
    if is_name:
        return f"{where}: a name is 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'"
    return f"{where}: {_what_is_wrong(details)}"


def _what_is_wrong(details: ErrorDetails) -> str:
    context: dict[str, Any] = details.get("ctx", {})
    value, kind = details["input"], details["type"]
    shown = repr(value)[:60]
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
        case "too_short":
            return "must not be empty"
        case _ if kind.endswith("_type"):
            wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "dict": "a table"}
            name = kind.removesuffix("_type")
            return f"must be {wanted.get(name, 'a table' if name == 'model' else f'a {name}')}, not {shown}"
        case _:
            return details["msg"][0].lower() + details["msg"][1:]
