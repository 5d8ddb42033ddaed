"""JSON schemas of clients: bounded before anything compiles them, and prepared for llguidance. Pure.

llguidance itself refuses keywords that it does not enforce, remote references and unsatisfiable schemas. Without `strict`, the
parts that it would refuse are left out of the schema that it gets, and the answer is checked against the whole schema.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal
from urllib.parse import unquote

DEPTH_MAX: Final = 32
NODES_MAX: Final = 4000  # Objects and lists, those of `enum` and `const` included
ENUM_MAX: Final = 4000  # Values over the whole schema
PATTERNS_IN_ALL_OF_MAX: Final = 2  # intersecting regular expressions can take exponential time
MULTIPLE_OF_MAX: Final = 10_000  # states that track the remainder; intersections have the least common multiple
MULTIPLES_MAX: Final = 40_000  # States over the whole schema
WHITESPACE: Final = r"[ \n\t]{1,20}"  # bounded: a model that writes nothing else must not go on until its limit
_UNIONS: Final = ("anyOf", "oneOf")
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)  # Keywords whose values map names to schemas. A name may be that of any keyword.
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
_SINGLES: Final = frozenset({"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
                             "propertyNames", "unevaluatedItems", "unevaluatedProperties"})  # fmt: skip
_LISTS: Final = frozenset({*_UNIONS, "allOf", "prefixItems", "items"})
_STRUCTURE: Final = frozenset({"type", "properties", "required", "items", "prefixItems", "additionalProperties", "enum",
                               "const", "anyOf", "$ref", "$defs", "definitions"})  # fmt: skip
_ENFORCED: Final = _STRUCTURE | {
    "allOf", "patternProperties", "minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "additionalItems",
}  # fmt: skip
_NAMES_ONLY: Final = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                                "$comment"})  # fmt: skip
"""Keywords that do not constrain an instance, and can be long."""
_IDENTIFIERS: Final = frozenset({"$schema", "$id", "id", "$anchor"})
_OBJECT_KEYS: Final = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties", "$ref"})
_UNSUPPORTED_IN_PATTERNS: Final = (
    ("look-around", ("(?=", "(?!", "(?<=", "(?<!")),
    ("word boundaries", ("\\b", "\\B")),
    ("back-references", ("\\k", *(f"\\{digit}" for digit in "0123456789"))),
)
_OPTIONS: Final = "x-guidance"  # llguidance's own, for which clients have no use

Path = tuple[str, ...]
_Kind = Literal["schema", "names", "value"]  # one or several, a mapping of names to them, or an instance's


class SchemaError(Exception):
    """The schema is refused; `str()` is for the user."""


@dataclass(frozen=True)
class PreparedSchema:
    schema: dict[str, Any]  # As llguidance gets it
    is_whole: bool  # Nothing that it says of an instance was left out


def prepared(
    schema: Any, *, strict: bool, left_out: Collection[Path] = (), structure_only: bool = False
) -> PreparedSchema:
    """Raises `SchemaError` if it is too large, or if it is `strict` and has what cannot be enforced.

    An object schema that names properties and does not mention others gets `additionalProperties` false, so that a model
    finishes. Every answer that is still possible is valid. `left_out` are paths of keywords to leave out, and `structure_only`
    leaves out all but the types of the parts.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise SchemaError("a JSON schema must be an object")
    fault = _bounds(schema)
    if fault and strict:
        raise SchemaError(fault.message)
    intersects = any("allOf" in node or ("$ref" in node and "properties" in node) for node in _schemas(schema))
    rewriter = _Rewriter(
        strict, frozenset(left_out), structure_only, fault.keys if fault else frozenset(), not intersects
    )
    found = rewriter.rewritten(schema, (), in_union=False)
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return PreparedSchema({**found, _OPTIONS: options}, rewriter.is_whole)


def where(path: Path) -> str:
    """A keyword and its place, for users."""
    return f"'{path[-1][:60]}' at {'.'.join(('$', *(part[:60] for part in path[:-1])))[:300]}"


def mentioned(schema: Any, message: str) -> list[Path]:
    """Paths of the keywords that llguidance's message about the schema is about: those whose value it quotes, or else those
    that it names."""
    quoted: dict[int, list[Path]] = {}
    named: list[Path] = []
    for node, path in _with_paths(schema):
        for key, value in node.items():
            texts = value if key == "patternProperties" and isinstance(value, dict) else [value]
            for text in texts:
                plain = " ".join(text.split()).removeprefix("#")[:100] if isinstance(text, str) else ""
                if plain and key in ("pattern", "patternProperties", "format", "type", "$ref") and plain in message:
                    quoted.setdefault(len(plain), []).append((*path, key))
            if f"'{key}'" in message or f'"{key}"' in message or (key in _UNIONS and key in message):
                named.append((*path, key))
    return quoted[max(quoted)] if quoted else named


# --- bounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fault:
    """Too much of one kind of keywords."""

    message: str
    keys: frozenset[str]  # Keys without which the schema is small enough


def _bounds(schema: dict[str, Any]) -> _Fault | None:
    """Check the size limits. Returns the fault that leaving out keywords would cure, or None. Raises `SchemaError` for any
    other fault."""
    nodes, enums, patterns, intersected, refers, joined_refs = 0, 0, 0, 0, False, 0
    intersects = False
    multiples: list[int] = []
    waiting: list[tuple[Any, int, bool, _Kind]] = [(schema, 1, False, "schema")]
    while waiting:
        value, depth, in_all_of, kind = waiting.pop()
        if not isinstance(value, dict | list):
            continue
        nodes += 1
        if depth > DEPTH_MAX:
            raise SchemaError(f"the JSON schema is nested deeper than {DEPTH_MAX} levels")
        if nodes + len(waiting) > 20 * NODES_MAX or nodes > NODES_MAX:
            raise SchemaError(f"the JSON schema has more than {NODES_MAX} objects and lists")
        if isinstance(value, dict) and kind == "schema":
            enums += len(value["enum"]) if isinstance(value.get("enum"), list) else 0
            in_all_of |= "allOf" in value
            has_pattern = isinstance(value.get("pattern"), str) or isinstance(value.get("format"), str)
            patterns += has_pattern
            intersected += in_all_of and has_pattern
            if _is_in_value(value.get("$ref")):
                raise SchemaError(
                    "a '$ref' points into 'const', 'enum', 'default' or 'examples', which hold no schemas"
                )
            refers |= in_all_of and "$ref" in value
            joined_refs += "$ref" in value
            intersects |= in_all_of or (("$ref" in value or any(key in value for key in _UNIONS)) and len(value) > 1)
            if states := _states(value.get("multipleOf")):
                multiples.append(states)
        waiting += ((part, depth + 1, in_all_of, inner) for part, inner in _parts(value, kind))
    if enums > ENUM_MAX:
        raise SchemaError(f"the JSON schema has more than {ENUM_MAX} values in 'enum'")
    if (patterns if refers else intersected) > PATTERNS_IN_ALL_OF_MAX:
        message = f"more than {PATTERNS_IN_ALL_OF_MAX} patterns or formats in an 'allOf' are not supported"
        return _Fault(message, frozenset({"pattern", "format", "multipleOf"}))
    if not multiples:
        return None
    states = math.lcm(*multiples) if intersects else max(multiples)
    if states > MULTIPLE_OF_MAX or sum(multiples) * (1 + joined_refs) > MULTIPLES_MAX:
        what = "together, " if states <= MULTIPLE_OF_MAX or len(multiples) > 1 else ""
        return _Fault(f"{what}'multipleOf' over {MULTIPLE_OF_MAX} is not supported", frozenset({"multipleOf"}))
    return None


def _parts(value: dict[str, Any] | list[Any], kind: _Kind) -> Iterator[tuple[Any, _Kind]]:
    """The objects and lists in a part of a schema. Parts under an unknown keyword count as schemas, since `$ref` may point
    there."""
    for key, part in value.items() if isinstance(value, dict) else (("", part) for part in value):
        if isinstance(part, dict | list):
            yield part, _kind_below(kind, key)


def _kind_below(kind: _Kind, key: str) -> _Kind:
    if kind == "schema":
        return "names" if key in _MAPS else "value" if key in _VALUES else "schema"
    return "schema" if kind == "names" else kind


def _is_in_value(ref: Any) -> bool:
    """Whether the reference points to a part of a value. It would otherwise be compiled without having been counted."""
    kind: _Kind = "schema"
    for part in unquote(ref).split("/")[1:] if isinstance(ref, str) else ():
        kind = _kind_below(kind, part.replace("~1", "/").replace("~0", "~"))
    return kind == "value"


def _states(divisor: Any) -> int:
    """States of the automaton for a `multipleOf`: the divisor without its decimal point. 0: it needs none."""
    if isinstance(divisor, int):
        return 0 if isinstance(divisor, bool) else min(abs(divisor), 10**20)
    if not isinstance(divisor, float) or not math.isfinite(divisor):
        return 0
    _, digits, exponent = Decimal(repr(divisor)).normalize().as_tuple()
    assert isinstance(exponent, int)
    # A divisor with more digits than a bound far above ours is too large, whatever its exponent.
    whole = int("".join(map(str, digits[:20])))
    states: int = whole * 10 ** min(max(exponent, 0), 20)
    return min(states, 10**20)


# --- rewriting --------------------------------------------------------------------------------------------------------


@dataclass
class _Rewriter:
    strict: bool
    left_out: frozenset[Path]
    structure_only: bool
    too_many: frozenset[str]  # Keywords to leave out everywhere
    closes: bool  # Objects that name their properties get no others
    is_whole: bool = field(default=True, init=False)

    def rewritten(self, schema: Any, path: Path, *, in_union: bool) -> Any:
        """`in_union`: beside it stands something that names properties as well. The schema's depth has been checked."""
        if not isinstance(schema, dict):
            return schema
        kept = {key: value for key, value in schema.items() if self._keeps(key, value, (*path, key))}
        if "patternProperties" in schema and "patternProperties" not in kept:
            kept.pop("additionalProperties", None)  # it is about what no pattern names
        names = isinstance(kept.get("properties"), dict)
        beside = in_union or names or bool(_OBJECT_KEYS & set(schema))
        found: dict[str, Any] = {}
        for key, value in kept.items():
            at = (*path, key)
            if key in _MAPS and isinstance(value, dict):
                found[key] = {name: self.rewritten(part, (*at, name), in_union=False) for name, part in value.items()}
            elif key in _SINGLES and isinstance(value, dict):
                found[key] = self.rewritten(value, at, in_union=False)
            elif key in _LISTS and isinstance(value, list):
                union = beside if key in _UNIONS else False
                found[key] = [
                    self.rewritten(part, (*at, str(number)), in_union=union) for number, part in enumerate(value)
                ]
            else:
                found[key] = value
        unions = any(key in schema for key in _UNIONS)
        if self.closes and names and not unions and not in_union and not _OBJECT_KEYS & set(schema):
            found["additionalProperties"] = False
        if found.get("additionalProperties") is False and not in_union and "allOf" not in schema:
            self._mend_required(found, closed="additionalProperties" in schema)
        return found

    def _mend_required(self, schema: dict[str, Any], *, closed: bool) -> None:
        """Makes an object possible that requires a property which it does not name. Tools have such schemas by mistake."""
        required = schema["required"] if isinstance(schema.get("required"), list) else []
        named = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
        missing = [name for name in required if isinstance(name, str) and name not in named]
        if missing and not closed:
            schema["properties"] = {**named, **{name: {} for name in missing}}
        elif missing and not self.strict and "patternProperties" not in schema:
            schema["required"] = [name for name in required if name not in missing]

    def _keeps(self, key: str, value: Any, path: Path) -> bool:
        if key in _NAMES_ONLY or (value is None and key != "const"):
            return False
        fault = self._fault(key, value)
        if self.strict and fault:
            raise SchemaError(f"{where(path)} is not supported: {fault}")
        asserts = key not in _IDENTIFIERS and key != _OPTIONS
        if self.strict or not asserts:
            return key != _OPTIONS
        out = fault or path in self.left_out or key in self.too_many or (self.structure_only and key not in _STRUCTURE)
        # llguidance leaves out by itself the keywords that it does not know, and takes `oneOf` for `anyOf`.
        self.is_whole &= not out and key in _ENFORCED
        return not out

    def _fault(self, key: str, value: Any) -> str:
        """Why the keyword cannot be enforced, as far as can be told without compiling it."""
        if key == _OPTIONS:
            return "it is for the compiler"
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            return "schemas elsewhere are not fetched"
        patterns = (
            value if key == "patternProperties" and isinstance(value, dict) else [value] if key == "pattern" else []
        )
        for pattern in patterns:
            for what, marks in _UNSUPPORTED_IN_PATTERNS:
                plain = pattern.replace("\\\\", "") if isinstance(pattern, str) else ""
                if any(mark in plain for mark in marks):
                    return f"{what} cannot be enforced"
        return ""


def _with_paths(schema: Any, path: Path = ()) -> Iterator[tuple[dict[str, Any], Path]]:
    """Every subschema and its path; its depth has been checked."""
    if not isinstance(schema, dict):
        return
    yield schema, path
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _with_paths(part, (*path, key, name))
        elif key in _LISTS and isinstance(value, list):
            for number, part in enumerate(value):
                yield from _with_paths(part, (*path, key, str(number)))
        elif key in _SINGLES:
            yield from _with_paths(value, (*path, key))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    return (node for node, _ in _with_paths(schema))
