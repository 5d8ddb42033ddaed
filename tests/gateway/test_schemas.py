"""Schemas of clients: what is refused, what is left out without `strict`, and what is said of it."""

import json
from typing import Any

import pytest

from gateway.structured import schema as module
from gateway.structured.compile_process import NO_ANSWER, checked, compiled
from gateway.structured.lark import Grammar, Relaxed, TooLarge, next_relaxed
from gateway.structured.schema import SchemaError, prepared
from runtime.grammar.compiler import make_tokenizer
from tests import tiny_models

TOKENIZER = make_tokenizer(tiny_models.tokenizer().backend_tokenizer.to_str(), tiny_models.VOCAB, [tiny_models.EOS])


def in_e(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"e": keywords, "f": {"type": "string", "pattern": "^a+$"}}}


ODD = [
    in_e(type="string", pattern="^(?!x)[a-z]{1,3}$"),
    in_e(type="string", pattern=r"^(?=.{1,64}$)(?!\.)[^@]+@[^@]+$"),
    in_e(type="string", pattern=r"(?<=a)b"),
    in_e(type="string", pattern=r"(a)\1"),
    in_e(type="string", pattern=r"\bword\b"),
    in_e(type="string", pattern="a$b"),
    in_e(type="string", pattern=r"\cA"),
    in_e(type="string", pattern="[^]"),
    in_e(type="string", pattern="a{,3}"),
    in_e(type="string", pattern="("),
    in_e(type="string", format="iri"),
    in_e(type="string", format="uri", minLength=500),
    in_e(type="string", minLength=5000, pattern="(a|b)*c"),
    in_e(type="object", patternProperties={"^(?!x)a": {}}, additionalProperties=False),
    in_e(type="object", patternProperties={"a.*b": {}, "c.*d": {}}),
    in_e(type="object", propertyNames={"pattern": "^(?!x)"}),
    in_e(type="array", uniqueItems=True, contains={"type": "string"}),
    in_e(oneOf=[{"type": "string"}, {"type": "string", "maxLength": 3}]),
    in_e(anyOf=[{"not": {"type": "string"}}, {"if": {}, "then": {}}]),
    in_e(type="integer", multipleOf=123457),
    in_e(type="number", multipleOf=1.23456789),
    in_e(allOf=[{"type": "integer", "multipleOf": 9001}, {"multipleOf": 9973}]),
    in_e(allOf=[{"pattern": f"{letter}.*"} for letter in "abcd"]),
    in_e(type="integer", minimum=-1e30, maximum=1e30),
    {"$ref": "https://example.org/schema"},
    in_e(**{"$dynamicRef": "#x"}),
    in_e(allOf=[{"anyOf": [{"type": "string", "minLength": 10 * i + j} for j in range(3)]} for i in range(12)]),
    {"x-guidance": {"lenient": False}},
    True,
]


@pytest.mark.parametrize("schema", ODD, ids=lambda schema: json.dumps(schema)[39:100])
def test_odd_schema_compiles_when_relaxed(schema: Any) -> None:
    """An odd schema without strict compiles once what cannot be expressed is left out."""
    relaxed: Relaxed | None = Relaxed()
    verdict = ""
    for _ in range(20):
        assert relaxed is not None, verdict
        grammar = Grammar(lambda text: [text], relaxed)
        verdict = compiled(grammar.text(grammar.json(schema, strict=False)), TOKENIZER)
        if not verdict:
            return
        relaxed = next_relaxed(grammar.schemas, relaxed, verdict)
    pytest.fail(verdict)


KEYWORDS = sorted(
    module._ENFORCED | module._MAPS | module._SINGLES | module._LISTS | module._VALUES | module._IDENTIFIERS
)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_property_may_be_named_as_a_keyword(keyword: str, strict: bool) -> None:
    """Names under `properties` and `$defs` are no keywords, and what `const` and `enum` hold is no schema."""
    odd = {
        "multipleOf": 123_457,
        "allOf": [{"pattern": letter} for letter in "abc"],
        "type": {"type": 1},
        "$ref": "a:b",
    }
    parts = [{"type": "string"}, {"type": ["object", "null"], "properties": {keyword: {"type": "array"}}}, {"const": odd},
             {"enum": [odd, "a"]}, {"$ref": f"#/$defs/{keyword}"}, {"pattern": "a+"}]  # fmt: skip
    for part in parts:
        names = {keyword: part, "a": {"pattern": "b"}, "b": {"pattern": "c"}, "c": {"pattern": "d"}}
        schema = {"type": "object", "properties": names, "required": [keyword], "$defs": {keyword: {"type": "object"}}}
        grammar = Grammar(lambda text: [text])
        assert compiled(grammar.text(grammar.json(schema, strict=strict)), TOKENIZER) == ""


def test_reference_into_a_value_is_refused() -> None:
    """The bounds do not count what stands in a value, so that nothing may refer to it."""
    schema = {
        "$defs": {"const": {}, "a": {"const": {"multipleOf": 123_457}}},
        "properties": {"b": {"$ref": "#/$defs/const"}},
    }
    prepared(schema, strict=True)
    with pytest.raises(SchemaError):
        prepared({**schema, "additionalItems": {"$ref": "#/$defs/a/%63onst"}}, strict=False)


@pytest.mark.parametrize("schema", ODD[:6], ids=lambda schema: schema["properties"]["e"].get("pattern", "")[:20])
def test_only_inexpressible_parts_are_left_out(schema: Any) -> None:
    """Only the named keyword is left out of a schema, and the schema is then not whole."""
    found = prepared(schema, strict=False, left_out={("properties", "e", "pattern")})
    assert found.schema["properties"] == {"e": {"type": "string"}, "f": {"type": "string", "pattern": "^a+$"}}
    assert not found.is_whole and prepared(in_e(type="string"), strict=False).is_whole


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"type": "string", "pattern": "^(?!x)a"}, "'pattern' at $.properties.e"),
        ({"type": "string", "pattern": "a$b"}, "'pattern' at $.properties.e"),
        ({"items": {"pattern": r"\bx"}}, "'pattern' at $.properties.e.items"),
        ({"anyOf": [{}, {"not": {}}]}, "'not' at $.properties.e.anyOf.1"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' at $.properties.e"),
        ({"type": "string", "format": "iri"}, "'format' at $.properties.e"),
        ({"type": "text"}, "'type' at $.properties.e"),
        ({"$ref": "https://x/y"}, "'$ref' at $.properties.e"),
        ({"$ref": "#/$defs/none"}, "'$ref' at $.properties.e"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "'oneOf' at $.properties.e"),
        ({"type": "object", "patternProperties": {"(?=a)b": {}}}, "'patternProperties' at $.properties.e"),
    ],
)
def test_strict_refusal_names_keyword_and_path(keywords: dict[str, Any], said: str) -> None:
    """The refusal of a strict schema names the keyword and its path."""
    grammar = Grammar(lambda text: [text])
    try:
        verdict = compiled(grammar.text(grammar.json(in_e(**keywords), strict=True)), TOKENIZER)
        assert verdict
        verdict = grammar.schemas[0].explained(verdict)
    except SchemaError as error:
        verdict = str(error)
    assert said in verdict


def multiples(*divisors: float) -> list[dict[str, Any]]:
    return [{"type": "integer", "multipleOf": divisor} for divisor in divisors]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": multiples(9001, 9973)},
        {"allOf": multiples(997, 991)},
        {"allOf": [{"allOf": multiples(101)}, {"allOf": multiples(103)}]},
        {"multipleOf": 9001, "anyOf": multiples(9973, 2)},
        {"multipleOf": 9001, "$ref": "#/$defs/a", "$defs": {"a": multiples(9973)[0]}},
        {"$defs": {"a": multiples(9973)[0]}, "allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 7}]},
        {"properties": {f"p{n}": one for n, one in enumerate(multiples(*range(9000, 9100)))}},
        {"prefixItems": multiples(*range(9900, 9950))},
        {"anyOf": multiples(*range(9900, 9950))},
        {"type": "number", "multipleOf": 123456.789},
        {"type": "number", "multipleOf": 10**400},
        {"$defs": {"a": multiples(9973)[0]}, "prefixItems": [{"$ref": "#/$defs/a", "minimum": n} for n in range(40)]},
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_multiple_of_states_are_bounded(schema: dict[str, Any]) -> None:
    """Schemas with too many remainders of multipleOf are refused if strict, and relaxed otherwise."""
    with pytest.raises(SchemaError, match="multipleOf"):
        prepared(schema, strict=True)
    assert "multipleOf" not in json.dumps(prepared(schema, strict=False).schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": multiples(5)[0], "b": {"type": "number", "multipleOf": 0.01}, "c": multiples(1000)[0]}},
        {"allOf": multiples(5, 10, 100)},
        multiples(9973)[0],
    ],
)
def test_common_divisors_compile(schema: dict[str, Any]) -> None:
    """Schemas with common values of multipleOf compile with strict."""
    grammar = Grammar(lambda text: [text])
    assert compiled(grammar.text(grammar.json(schema, strict=True)), TOKENIZER) == ""


def test_descriptions_are_left_out_of_grammars() -> None:
    """Descriptions and titles are left out of a grammar, and properties of that name stay."""
    schema = {"description": "x" * 100_000, "properties": {"description": {"type": "string", "title": "y" * 70_000}}}
    found = prepared(schema, strict=True).schema
    assert "description" not in found and found["properties"] == {"description": {"type": "string"}}


def test_grammar_size_is_checked_first() -> None:
    """Too large texts and grammars are refused before they are processed."""
    grammar = Grammar(lambda text: pytest.fail("split"))
    for write in (grammar.literal, grammar.regex, grammar.up_to):
        with pytest.raises(TooLarge):
            write("x" * 70_000)
    for _ in range(60):
        grammar.rule(grammar.plain("x" * 1000))
    with pytest.raises(TooLarge):
        grammar.rule(grammar.plain("x" * 20_000))


# --- forms without an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\s\S]", r"abc[^\w\W]d", r"a{2}[^\d\D]"])
def test_unmatchable_regex_is_refused(pattern: str) -> None:
    """A regular expression that matches no text is refused."""
    grammar = Grammar(lambda text: [text])
    assert compiled(grammar.text(grammar.regex(pattern)), TOKENIZER) == NO_ANSWER


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "said"),
    [
        ('{"e": "abc"}', ODD[0], ""),
        ('{"e": "xbc"}', ODD[0], "$.e does not match 'pattern'"),
        ("[1, 1]", {"uniqueItems": True}, "$ does not match 'uniqueItems'"),
        ('{"a": {"b": 1}}', {"properties": {"a": {"not": {"required": ["b"]}}}}, "$.a does not match 'not'"),
        ("nothing", {}, "it is not JSON"),
        ("1e999", {"exclusiveMinimum": 5}, ""),
        ("-1e999", {"exclusiveMinimum": 5}, "$ does not match 'exclusiveMinimum'"),
        ("9" * 5000, {"type": "integer"}, ""),
        ("12345678901234567890123", {"type": "integer", "maximum": 5}, "$ does not match 'maximum'"),
        ('["\\ud800"]', {"type": "array"}, ""),
        ('["\\ud800"]', {"type": "object"}, ""),
        ('"a"', {"$ref": "https://x/y"}, ""),
        ('"a"', {"pattern": "("}, ""),
        (json.dumps("a" * 40 + "!"), {"pattern": "^(a+)+(?!b)$"}, "$ does not match 'pattern'"),
        (json.dumps("a" * 5000), {"pattern": r"^(a|aa)+\1(?!b)$"}, ""),
    ],
)
def test_answers_are_checked_against_schema(text: str, schema: Any, said: str) -> None:
    """Answers are checked against the whole schema, and the first mismatch is named."""
    assert checked(text, schema) == said
