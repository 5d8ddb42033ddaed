"""Structured output of a real cluster: what is finished is valid, with everything else that a request may ask for."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests import tiny_models
from tests.e2e.live import Live, at_once, live, said
from tests.helpers import first
from tests.schemas import random_root

CONTEXT_TOKENS = 2048
_TOKEN = {char: tiny_models.tokenizer().convert_tokens_to_ids(char) for char in '"}]'}
ENDS_SOON = {str(token): 4 for token in _TOKEN.values()}
"""A random model writes brackets and quotes as rarely as anything else."""
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = tiny_models.make(
        "llama", tmp_path_factory.mktemp("models") / "wide", max_position_embeddings=CONTEXT_TOKENS
    )
    with live(model, tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


def post(up: Live, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{up.base_url}{path}", json={"model": up.model_id, **body}, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, said(answer)
    found: dict[str, Any] = answer.json()
    return found


def chat(up: Live, **body: Any) -> dict[str, Any]:
    return post(up, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **{"max_tokens": 1500, **body})


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def check(schema: dict[str, Any], text: str) -> None:
    checker = jsonschema.FormatChecker()
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)


@pytest.mark.parametrize("count", first(1, [60, 500]))
def test_random_schema_answers_are_valid(up: Live, count: int) -> None:
    """Each finished answer to a random JSON schema is valid."""
    source = random.Random(count)
    schemas = [random_root(source) for _ in range(count)]

    def ask(numbered: tuple[int, dict[str, Any]]) -> bool:
        number, schema = numbered
        (choice,) = chat(up, seed=number, logit_bias=ENDS_SOON, response_format=as_format(schema))["choices"]
        if choice["finish_reason"] != "stop":
            return False
        try:
            check(schema, choice["message"]["content"])
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{json.dumps(schema)}\n{choice['message']['content']}\n{error}") from error
        return True

    finished = sum(at_once(ask, enumerate(schemas)))
    assert finished > 0.8 * count


def test_structured_output_with_sampling_options(up: Live) -> None:
    """Structured output holds together with choices, penalties, bias and log probabilities."""
    body = {
        "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.4, "repetition_penalty": 1.1,
        "logit_bias": ENDS_SOON, "response_format": as_format(WEATHER),
    }  # fmt: skip
    answers = [chat(up, **body) for _ in range(2)]
    texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    for choice in answers[0]["choices"]:
        check(WEATHER, choice["message"]["content"])
        tokens = choice["logprobs"]["content"]
        assert all(-9998 < token["logprob"] <= 0 for token in tokens)
        assert tokens[0]["token"] == "{" and tokens[0]["logprob"] == 0.0  # the only one allowed


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["a b", 'q"\\']}, re.escape("a b") + "|" + re.escape('q"\\')),
        ({"guided_regex": "^[0-9]{3}/[a-z]{2}$"}, "[0-9]{3}/[a-z]{2}"),
        ({"structured_outputs": {"grammar": 'start: "a" B "c"\nB: /[0-9]{1,5}/'}}, "a[0-9]{1,5}c"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9] "y" | "z"'}, "x[0-9][0-9]y|z"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
        ({"guided_json": json.dumps({"enum": [5, "six"]})}, '5|"six"'),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": [
                {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{1,4}"}, "end": "</n>"},
                {"type": "optional", "content": {"type": "const_string", "value": "!"}},
            ]}}},
            "<n>[0-9]{1,4}</n>!?",
        ),
    ],
    ids=["choice", "guided_choice", "regex", "lark", "gbnf", "json_object", "guided_json", "structural_tag"],
)  # fmt: skip
def test_other_constraint_forms_hold(up: Live, fields: dict[str, Any], pattern: str) -> None:
    """Answers match choices, regular expressions, grammars and structural tags."""
    for seed in range(3):
        body = {"prompt": "x", "max_tokens": 400, "seed": seed, "logit_bias": ENDS_SOON, **fields}
        (choice,) = post(up, "/v1/completions", **body)["choices"]
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parallel", [False, True])
def test_tool_calls_match_their_schema(up: Live, choice: Any, parallel: bool) -> None:
    """Tool calls match their schema, and a streamed answer has the same ones."""
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "logit_bias": ENDS_SOON, "seed": 3}
    (whole,) = chat(up, **body)["choices"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert parallel or len(whole["message"]["tool_calls"]) == 1
    for call in whole["message"]["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] == "get_weather"
        check(WEATHER, call["function"]["arguments"])
    streamed, finish = _streamed(up, **body)
    assert finish == "tool_calls"
    assert [call["function"] for call in streamed] == [call["function"] for call in whole["message"]["tool_calls"]]


def _streamed(up: Live, **body: Any) -> tuple[list[dict[str, Any]], str]:
    """The calls of a stream, put together, and how it ended."""
    calls: list[dict[str, Any]] = []
    finish = ""
    body = {"model": up.model_id, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, **body}
    with httpx.stream(
        "POST", f"{up.base_url}/v1/chat/completions", json={**body, "stream": True}, timeout=120.0, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            finish = choice["finish_reason"] or finish
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append(part)
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls, finish


def test_tool_results_continue_the_chat(up: Live) -> None:
    """A chat goes on after the result of a tool call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = post(
        up, "/v1/chat/completions", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=3, ignore_eos=True
    )
    assert answer["usage"]["completion_tokens"] == 3


def test_hostile_grammar_is_refused(up: Live) -> None:
    """Hostile grammars are refused, and other requests are served meanwhile."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    hostile: list[dict[str, Any]] = [
        {"guided_json": deep},
        {"guided_json": {"enum": [f"value {number}" for number in range(5000)]}},
        {"guided_json": {"allOf": [{"type": "string", "pattern": f"a.*b.*c{number}"} for number in range(20)]}},
        {"guided_json": {"type": "integer", "multipleOf": 99991}},
        {"guided_grammar": "start: A\nA: " + " & ".join(f"/(.*)x{number}(.*)/" for number in range(20))},
        {"guided_regex": "(?<=a)b"},
    ]

    def ask(fields: dict[str, Any]) -> tuple[int, float]:
        body = {"model": up.model_id, "prompt": "x", "max_tokens": 4, **fields}
        answer = httpx.post(f"{up.base_url}/v1/completions", json=body, timeout=60.0, trust_env=False)
        return answer.status_code, answer.elapsed.total_seconds()

    answers = at_once(ask, [*hostile, *[{"guided_choice": ["a"]}] * 4, *[{}] * 4])
    assert [status for status, _ in answers] == [400] * len(hostile) + [200] * 8, answers


def test_backtracking_regex_does_no_harm(up: Live) -> None:
    """Compiled in no time, it would take minutes to match in many an engine."""
    for pattern in ("(a+)+b", "(a*)*(a*)*b", "(a|a)*b"):
        body = {"prompt": "x", "max_tokens": 200, "temperature": 0, "guided_regex": pattern}
        (choice,) = post(up, "/v1/completions", **body, logit_bias={str(tiny_models.tokenizer().encode("a")[0]): 100})[
            "choices"
        ]
        assert set(choice["text"]) <= {"a", "b"}
