"""Random JSON schemas of the kinds that clients send: for grammars, which must let only valid answers through."""

import random
from typing import Any

FORMATS = ("date", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname")
"""Without "time": what checks the answers takes RFC 3339's small letters for a mistake."""
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]*$", "^(red|green|blue)-[0-9]+$", "^\\d{3}$", "x")
WORDS = "name age city note size kind tags unit when from value é 日本 a-b".split()


def random_schema(source: random.Random, depth: int = 3) -> dict[str, Any]:
    simple = (_string, _integer, _number, _const, lambda s, d: {"type": "boolean"}, lambda s, d: {"type": "null"})
    nested = (_object, _object, _object, _array, _array, _any_of, _all_of)
    kinds = simple + nested * 2 if depth else simple
    made: dict[str, Any] = source.choice(kinds)(source, depth)
    if source.random() < 0.2:
        made = {"title": "t", "description": "d", **made}
    return made


def random_root(source: random.Random) -> dict[str, Any]:
    """An object, sometimes one that refers to itself or to a definition."""
    schema = _object(source, 3)
    if source.random() < 0.3:
        schema["$defs"] = {"node": _object(source, 1)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/node"}
    if source.random() < 0.1:
        schema["properties"]["again"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    return schema


def _string(source: random.Random, _: int) -> dict[str, Any]:
    match source.randrange(4):
        case 0:
            return {"type": "string", "format": source.choice(FORMATS)}
        case 1:
            return {"type": "string", "pattern": source.choice(PATTERNS)}
        case 2:
            least = source.randrange(5)
            return {"type": "string", "minLength": least, "maxLength": least + source.randrange(20)}
    return {"type": "string"}


def _integer(source: random.Random, _: int) -> dict[str, Any]:
    least = source.randrange(-1000, 1000)
    made: dict[str, Any] = {"type": "integer"}
    if source.random() < 0.5:
        made |= {source.choice(("minimum", "exclusiveMinimum")): least}
    if source.random() < 0.5:
        made |= {source.choice(("maximum", "exclusiveMaximum")): least + 2 + source.randrange(500)}
    if source.random() < 0.2:
        made = {"type": "integer", "multipleOf": source.randrange(1, 20)}
    return made


def _number(source: random.Random, _: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "number"}
    least = round(source.uniform(-100, 100), 2)
    if source.random() < 0.5:
        made |= {"minimum": least}
    if source.random() < 0.5:
        made |= {"maximum": least + source.randrange(1, 50)}
    return made


def _const(source: random.Random, _: int) -> dict[str, Any]:
    values = [None, True, 3, -1.5, 'x"y', "日本", [1, "a"], {"k": [None]}]
    if source.random() < 0.3:
        return {"const": source.choice(values)}
    return {"enum": source.sample(values, source.randint(1, 4))}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(WORDS, source.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(source, max(depth - 1, 0)) for name in names},
        "required": [name for name in names if source.random() < 0.6],
    }
    more = source.random()
    if more < 0.3:
        made["additionalProperties"] = False
    elif more < 0.4:
        made["additionalProperties"] = random_schema(source, 0)
    return made


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": random_schema(source, depth - 1)}
    if source.random() < 0.6:
        made["minItems"] = source.randrange(3)
        made["maxItems"] = made["minItems"] + source.randrange(4)
    if source.random() < 0.2:
        made["prefixItems"] = [random_schema(source, 0) for _ in range(2)]
    return made


def _any_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(source, depth - 1) for _ in range(source.randint(2, 3))]}


def _all_of(source: random.Random, depth: int) -> dict[str, Any]:
    first, second = _object(source, 0), _object(source, 0)
    for number, schema in enumerate((first, second)):
        schema.pop("additionalProperties", None)
        schema["properties"] = {f"{name}{number}": {"type": "integer"} for name in schema["properties"]}
        schema["required"] = []
    return {"allOf": [first, second]}
