"""Bad inputs over structured output, tools and thoughts; part of the table in `bad_requests`."""

from dataclasses import replace
from typing import Any

from tests.gateway.bad_requests import Rows

FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


COMPILED = (
    "schema of nothing", "schema with an unknown type", "schema with an unknown keyword", "schema with a remote reference",
    "regex broken", "regex with look-around", "grammar broken", "tool strict with an unknown keyword",
)  # fmt: skip


def add(t: Rows) -> None:
    own = Rows(t.model, t.context_tokens, t.vocab_size, t.body_bytes_max)
    _all(own)
    t.rows += [replace(row, compiled=row.name in COMPILED) for row in own.rows]


def _all(t: Rows) -> None:
    _formats(t)
    _structured(t)
    _tools(t)
    _choices(t)
    _conversations(t)


def _schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def _formats(t: Rows) -> None:
    where, schema = "response_format", "response_format.json_schema.schema"
    t.chat("format a string", where, "invalid_type", response_format="json")
    t.chat("format without a type", f"{where}.type", "unsupported_value", response_format={})
    t.chat("format unknown", f"{where}.type", "unsupported_value", response_format={"type": "xml"})
    t.chat("format with more", f"{where}.x", "unknown_parameter", response_format={"type": "json_object", "x": 1})
    t.chat("schema missing", f"{where}.json_schema", "invalid_type", response_format={"type": "json_schema"})
    t.chat("schema without a name", f"{where}.json_schema.name", "invalid_value",
           response_format={"type": "json_schema", "json_schema": {"schema": {}}})  # fmt: skip
    t.chat(
        "schema strict a string",
        f"{where}.json_schema.strict",
        "invalid_type",
        response_format=_schema({}, strict="yes"),
    )
    t.chat("schema a string", schema, "invalid_value", response_format=_schema("object"))
    t.chat("schema a list", schema, "invalid_value", response_format=_schema([{}]))
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": deep}
    t.chat("schema too deep", schema, "invalid_value", response_format=_schema(deep))
    t.chat("schema too large", schema, "invalid_value", response_format=_schema({"enum": [[]] * 4001}))
    t.chat("schema of nothing", schema, "invalid_value", response_format=_schema(False, strict=True))
    t.chat(
        "schema with an unknown type", schema, "invalid_value", response_format=_schema({"type": "text"}, strict=True)
    )
    t.chat("schema with an unknown keyword", schema, "invalid_value",
           response_format=_schema({"uniqueItems": True}, strict=True))  # fmt: skip
    t.chat(
        "schema with a remote reference",
        schema,
        "invalid_value",
        response_format=_schema({"$ref": "http://x/y"}, strict=True),
    )
    t.chat(
        "schema with options of the compiler",
        schema,
        "invalid_value",
        response_format=_schema({"x-guidance": {}}, strict=True),
    )
    t.chat("schema with many intersections", schema, "invalid_value",
           response_format=_schema({"allOf": [{"pattern": f"a.*{n}"} for n in range(9)]}, strict=True))  # fmt: skip
    t.chat(
        "schema with a large divisor",
        schema,
        "invalid_value",
        response_format=_schema({"multipleOf": 99991}, strict=True),
    )
    t.chat("format and structured outputs", "structured_outputs", "invalid_value",
           response_format={"type": "json_object"}, structured_outputs={"regex": "a"})  # fmt: skip
    t.chat(
        "format and ignore_eos", "ignore_eos", "invalid_value", response_format={"type": "json_object"}, ignore_eos=True
    )
    tag: dict[str, Any] = {"type": "structural_tag"}
    t.chat("tag without a format", where, "invalid_value", response_format=tag)
    t.chat("tag of an unknown format", where, "invalid_value", response_format={**tag, "format": {"type": "x"}})
    t.chat("tag with an unknown field", where, "invalid_value",
           response_format={**tag, "format": {"type": "any_text", "max_chars": 3}})  # fmt: skip
    t.chat("tag without its trigger", where, "invalid_value", response_format={
        **tag, "triggers": ["<x"], "structures": [{"begin": "<y>", "schema": {}, "end": "</y>"}]})  # fmt: skip
    star: dict[str, Any] = {"type": "any_text"}
    for _ in range(20):
        star = {"type": "star", "content": star}
    t.chat("tag too deep", where, "invalid_value", response_format={**tag, "format": star})


def _structured(t: Rows) -> None:
    where = "structured_outputs"
    t.completion("structured a list", where, "invalid_type", structured_outputs=[])
    t.completion("structured of two kinds", where, "invalid_value", structured_outputs={"regex": "a", "choice": ["a"]})
    t.completion("structured of none", where, "invalid_value", structured_outputs={})
    t.completion("structured unknown", f"{where}.x", "unknown_parameter", structured_outputs={"x": 1})
    t.completion("choice empty", f"{where}.choice", "invalid_value", structured_outputs={"choice": []})
    t.completion("choice of numbers", f"{where}.choice", "invalid_type", structured_outputs={"choice": [1]})
    t.completion("regex a number", "guided_regex", "invalid_type", guided_regex=1)
    t.completion("regex broken", "guided_regex", "invalid_value", guided_regex="(a")
    t.completion("regex with look-around", f"{where}.regex", "invalid_value", structured_outputs={"regex": "(?=a)b"})
    t.completion("guided JSON no JSON", "guided_json", "invalid_value", guided_json="{")
    t.completion("grammar broken", "guided_grammar", "invalid_value", guided_grammar="start: (")
    t.completion("grammar without a start", "guided_grammar", "invalid_value", guided_grammar='begin: "a"')
    t.completion("grammar with an include", "guided_grammar", "invalid_value", guided_grammar="start: a\na: %json {}")
    t.completion("grammar of two kinds", "guided_regex", "invalid_value", guided_json={}, guided_regex="a")
    t.completion("backend of its own", "guided_decoding_backend", "unsupported_parameter", guided_decoding_backend="x")


def _tools(t: Rows) -> None:
    where = "tools[0].function"

    def tool(row: str, param: str, code: str, **fields: Any) -> None:
        t.chat(f"tool {row}", param, code, tools=[{"type": "function", "function": {**FUNCTION, **fields}}])

    t.chat("tools an object", "tools", "invalid_type", tools={"f": 1})
    t.chat("tool a string", "tools[0]", "invalid_type", tools=["f"])
    t.chat("tool of the server", "tools[0].type", "unsupported_value", tools=[{"type": "web_search"}])
    t.chat("tool without a function", where, "invalid_type", tools=[{"type": "function"}])
    tool("with a bad name", f"{where}.name", "invalid_value", name="a b")
    tool("with a long name", f"{where}.name", "invalid_value", name="a" * 129)
    tool("with a description of numbers", f"{where}.description", "invalid_type", description=[1])
    tool("with parameters as text", f"{where}.parameters", "invalid_type", parameters="{}")
    tool("with parameters as a list", f"{where}.parameters", "invalid_value", parameters={"type": "array"})
    tool("strict a number", f"{where}.strict", "invalid_type", strict=1)
    tool("with more", f"{where}.x", "unknown_parameter", x=1)
    tool("strict with an unknown keyword", "tools", "invalid_value", strict=True, parameters={"uniqueItems": True})
    t.chat("tools twice the same", "tools", "invalid_value", tools=[TOOL, TOOL])
    t.chat("tools too many", "tools", "invalid_value",
           tools=[{"type": "function", "function": {"name": f"f{n}"}} for n in range(513)])  # fmt: skip
    t.completion("tools in a completion", "tools", "unknown_parameter", tools=[TOOL])


def _choices(t: Rows) -> None:
    where = "tool_choice"
    t.chat("tool_choice unknown", where, "invalid_type", tools=[TOOL], tool_choice="maybe")
    t.chat("tool_choice without tools", where, "invalid_value", tool_choice="required")
    named = {"type": "function", "function": {"name": "g"}}
    t.chat("tool_choice of another", where, "invalid_value", tools=[TOOL], tool_choice=named)
    t.chat("tool_choice allowed badly", f"{where}.allowed_tools", "invalid_value", tools=[TOOL],
           tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "x"}})  # fmt: skip
    t.chat(
        "parallel_tool_calls a string", "parallel_tool_calls", "invalid_type", tools=[TOOL], parallel_tool_calls="yes"
    )


def _conversations(t: Rows) -> None:
    user: dict[str, Any] = {"role": "user", "content": "x"}
    asked: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
    t.message("tool without an id", "messages[0].tool_call_id", "invalid_value", {"role": "tool", "content": "x"})
    t.chat("tool without a call", "messages[1].tool_call_id", "invalid_value",
           messages=[user, {"role": "tool", "content": "x", "tool_call_id": "c1"}])  # fmt: skip
    t.chat("tool for another call", "messages[1].tool_call_id", "invalid_value",
           messages=[asked, {"role": "tool", "content": "x", "tool_call_id": "c2"}])  # fmt: skip
    t.message("calls of a user", "messages[0].tool_calls", "invalid_value", {**user, "tool_calls": [CALL]})
    t.message("call without a function", "messages[0].tool_calls[0].function", "missing_required_parameter",
              {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]})  # fmt: skip
    t.message(
        "thoughts of a user", "messages[0].reasoning_content", "invalid_value", {**user, "reasoning_content": "x"}
    )
    t.chat("template options a list", "chat_template_kwargs", "invalid_type", chat_template_kwargs=[])
    t.chat("template option unknown", "chat_template_kwargs.x", "unsupported_parameter", chat_template_kwargs={"x": 1})
    t.chat(
        "template option of ours",
        "chat_template_kwargs.messages",
        "invalid_value",
        chat_template_kwargs={"messages": []},
    )
    t.chat("effort unknown", "reasoning_effort", "unsupported_value", reasoning_effort="huge")
    t.chat("verbosity unknown", "verbosity", "unsupported_value", verbosity="huge")
    t.message(
        "thoughts of a user by another name", "messages[0].reasoning", "invalid_value", {**user, "reasoning": "x"}
    )
    t.message("refusal of a user", "messages[0].refusal", "invalid_value", {**user, "refusal": "x"})
    t.message("refusal a number", "messages[0].refusal", "invalid_type", {"role": "assistant", "refusal": 1})
    t.message(
        "annotations a string", "messages[0].annotations", "invalid_type", {"role": "assistant", "annotations": "x"}
    )
    t.message("audio a string", "messages[0].audio", "invalid_type", {"role": "assistant", "audio": "x"})
    t.message(
        "function call a string",
        "messages[0].function_call",
        "invalid_type",
        {"role": "assistant", "function_call": "x"},
    )
    t.message("call of a custom tool with a number", "messages[0].tool_calls[0].function.arguments", "invalid_type",
              {"role": "assistant", "tool_calls": [
                  {"id": "c", "type": "custom", "custom": {"name": "f", "input": 1}}]})  # fmt: skip
    t.message(
        "result of no function",
        "messages[0].tool_call_id",
        "invalid_value",
        {"role": "function", "name": "f", "content": ""},
    )
    t.message("cache_control a string", "messages[0].cache_control", "invalid_type", {**user, "cache_control": "x"})
