"""JSON schemas of clients: bounded before anything compiles them, and prepared for llguidance. Pure.

llguidance itself refuses keywords that it does not enforce, remote references and what cannot be satisfied.
"""

from collections.abc import Iterator
from typing import Any, Final

DEPTH_MAX: Final = 32
NODES_MAX: Final = 4000
"""Objects and lists, those of `enum` and `const` included."""
ENUM_MAX: Final = 4000
"""Values over the whole schema."""
PATTERNS_IN_ALL_OF_MAX: Final = 2
"""To intersect regular expressions can take exponential time."""
MULTIPLE_OF_MAX: Final = 10_000
"""An automaton with so many states counts the remainder."""
WHITESPACE: Final = r"[ \n\t]{1,20}"
"""Between the parts of a JSON text. Bounded: a model that writes nothing else must not go on until its limit."""
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_OBJECT_KEYS: Final = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties", "$ref"})
_UNIONS: Final = ("anyOf", "oneOf")


class SchemaError(Exception):
    """The schema is refused; `str()` is for the user."""


def prepared(schema: Any, *, strict: bool) -> dict[str, Any]:
    """The schema as llguidance gets it. Raises `SchemaError` if it is too large.

    Objects that name their properties and say nothing of others get no others, so that a model comes to an end; all that it may
    write is valid still. Where not `strict`, keywords that cannot be enforced are left to the model.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise SchemaError("a JSON schema must be an object")
    _check_size(schema)
    if not any("allOf" in node or ("$ref" in node and "properties" in node) for node in _schemas(schema)):
        schema = _closed(schema, in_union=False)
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return {**schema, "x-guidance": options}


def _check_size(schema: dict[str, Any]) -> None:
    nodes, enums, patterns, intersected, refers = 0, 0, 0, 0, False
    waiting: list[tuple[Any, int, bool]] = [(schema, 1, False)]
    while waiting:
        value, depth, in_all_of = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        nodes += 1
        if depth > DEPTH_MAX:
            raise SchemaError(f"the JSON schema is nested deeper than {DEPTH_MAX} levels")
        if nodes > NODES_MAX:
            raise SchemaError(f"the JSON schema has more than {NODES_MAX} objects and lists")
        if isinstance(value, dict):
            if "x-guidance" in value:
                raise SchemaError("the keyword 'x-guidance' is not supported")
            enums += len(value["enum"]) if isinstance(value.get("enum"), list) else 0
            in_all_of |= "allOf" in value
            has_pattern = isinstance(value.get("pattern"), str) or isinstance(value.get("format"), str)
            patterns += has_pattern
            intersected += in_all_of and has_pattern
            refers |= in_all_of and "$ref" in value
            divisor = value.get("multipleOf", 0)
            if isinstance(divisor, int | float) and abs(divisor) > MULTIPLE_OF_MAX:
                raise SchemaError(f"'multipleOf' over {MULTIPLE_OF_MAX} is not supported")
        parts = value.values() if isinstance(value, dict) else value
        waiting += ((part, depth + 1, in_all_of) for part in parts)
    if enums > ENUM_MAX:
        raise SchemaError(f"the JSON schema has more than {ENUM_MAX} values in 'enum'")
    if (patterns if refers else intersected) > PATTERNS_IN_ALL_OF_MAX:
        raise SchemaError(f"more than {PATTERNS_IN_ALL_OF_MAX} patterns or formats in an 'allOf' are not supported")


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every subschema; its depth has been checked."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for part in value.values():
                yield from _schemas(part)
        elif key in ("items", "additionalProperties", "not"):
            yield from _schemas(value)
        elif key in (*_UNIONS, "allOf", "prefixItems") and isinstance(value, list):
            for part in value:
                yield from _schemas(part)


def _closed(schema: Any, *, in_union: bool) -> Any:
    """`in_union`: beside it stands something that names properties as well."""
    if not isinstance(schema, dict):
        return schema
    names = isinstance(schema.get("properties"), dict)
    unions = any(key in schema for key in _UNIONS)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: _closed(part, in_union=False) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            found[key] = _closed(value, in_union=False)
        elif key in _UNIONS and isinstance(value, list):
            found[key] = [
                _closed(part, in_union=in_union or names or bool(_OBJECT_KEYS & set(schema))) for part in value
            ]
        elif key == "prefixItems" and isinstance(value, list):
            found[key] = [_closed(part, in_union=False) for part in value]
        else:
            found[key] = value
    if names and not unions and not in_union and not _OBJECT_KEYS & set(schema):
        found["additionalProperties"] = False
    return found
