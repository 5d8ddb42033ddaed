"""Forms of answers and calls, with a model that writes whatever its grammar allows."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from gateway.app import create_app
from gateway.openai.context import ServedModel
from gateway.openai.prepare import ModelRules
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from gateway.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, CallFormat, regions_of
from gateway.tools.reader import AnswerReader, Reading
from proto.errors import Interrupt
from proto.messages import Interrupted, Submit
from runtime.grammar.compiler import Compiler, make_tokenizer
from tests import tiny_models
from tests.gateway.fakes import MODEL, Site, make_site

SPECIAL = ("<filename>", "<|im_end|>")
TEMPLATES = {
    "in words": tiny_models.CHAT_TEMPLATE,
    "hermes": "{{ tools }}<tool_call>{{ messages[-1].content }}",
    "llama": "{{ tools }}<|python_tag|>{{ messages[-1].content }}",
    "mistral": "{{ tools }}[TOOL_CALLS]{{ messages[-1].content }}",
    "mistral args": "{{ tools }}[TOOL_CALLS][ARGS]{{ messages[-1].content }}",
}
CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {"name": "w", "parameters": {"type": "object", "properties": {"c": {"enum": ["Paris", "a}b"]}},
                                                       "required": ["c"], "additionalProperties": False}}  # fmt: skip
TOOL = {"type": "function", "function": WEATHER}
NAMED = {"type": "function", "function": {"name": "w"}}


def tokenizer(template: str) -> ModelTokenizer:
    fast = tiny_models.tokenizer()
    fast.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast.chat_template = template
    eos = frozenset({tiny_models.EOS, fast.convert_tokens_to_ids("<|im_end|>")})
    return ModelTokenizer(fast, ModelFacts(4096, tiny_models.VOCAB, eos))  # type: ignore[arg-type]


class Model:
    """Draws among the tokens that the grammar allows, and ends as soon as it may, but for one time in ten."""

    def __init__(self, tok: ModelTokenizer) -> None:
        facts = tok.facts
        made = make_tokenizer(tok.serialized(), facts.vocab_size, facts.eos_ids)
        self._compiler, self._eos, self._vocab = Compiler(made, facts.vocab_size), facts.eos_ids, facts.vocab_size
        self._kept: dict[tuple[str, int, int], list[int]] = {}
        self.goes_on = 0.1

    def answer(self, submit: Submit, choice: int) -> list[int]:
        key = (submit.sampling.grammar, submit.sampling.seed, choice)
        if key not in self._kept:
            self._kept[key] = self._drawn(submit.sampling.grammar, submit.sampling.seed * 7 + choice)
        return self._kept[key]

    def _drawn(self, grammar: str, seed: int) -> list[int]:
        source, matcher, found = random.Random(seed), self._compiler.matcher(grammar, ()), list[int]()
        while len(found) < 400:
            allowed = np.flatnonzero(np.isfinite(matcher.mask(np.zeros(self._vocab, np.float32)))).tolist()
            ends = [token for token in allowed if token in self._eos]
            others = [token for token in allowed if token not in self._eos]
            assert allowed, "a dead end"
            token = ends[0] if ends and (not others or source.random() > self.goes_on) else source.choice(others)
            found.append(token)
            if token in self._eos:
                break
            matcher.accept(token)
        return found


def with_model(test: Callable[[Site, Model], Awaitable[None]], template: str = "in words") -> None:
    async def body() -> None:
        site = make_site()
        tok = tokenizer(TEMPLATES[template])
        site.gateway.models = [ServedModel(tok, ModelRules(MODEL, 300))]
        model = Model(tok)
        site.cluster.answer = model.answer
        site.app = create_app(site.gateway)
        try:
            await test(site, model)
        finally:
            await site.gateway.close()

    asyncio.run(body())


async def post(site: Site, body: dict[str, Any], path: str = CHAT) -> Any:
    async with site.client() as client:
        filled = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "seed": 1, **body}
        answer = await client.post(path, json=filled, timeout=60)
        return answer.json() if not body.get("stream") else answer.text


def strict(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


# --- names of special tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["<filename>", "<|im_end|>", "<eos>", "<pad>", "a<eos>b", "<eos><eos>"])
def test_special_token_name_is_plain_text(name: str) -> None:
    """A schema may ask for the name of a special token as text, and the answer has it."""

    async def test(site: Site, model: Model) -> None:
        for schema in (
            {"const": name},
            {"enum": [name]},
            {"type": "string", "pattern": f"^{name.replace('|', chr(92) + '|')}$"},
        ):
            got = await post(
                site, {"response_format": strict({"type": "object", "properties": {"a": schema}, "required": ["a"]})}
            )
            assert json.loads(got["choices"][0]["message"]["content"]) == {"a": name}, got
            assert got["choices"][0]["finish_reason"] == "stop"
        for form in ({"guided_choice": [name]}, {"guided_regex": name.replace("|", "\\|")},
                     {"guided_grammar": f"start: {json.dumps(name)}"}):  # fmt: skip
            got = await post(site, form)
            assert got["choices"][0]["message"]["content"] == name, (form, got)
        tag = {"type": "tag", "begin": name, "content": {"type": "const_string", "value": "x"}, "end": name}
        got = await post(site, {"response_format": {"type": "structural_tag", "format": tag}})
        assert got["choices"][0]["message"]["content"] == f"{name}x{name}"

    with_model(test)


@pytest.mark.parametrize(
    "text", ["</tool_call>", "<tool_call>", "</tool_call><tool_call>{}", "[TOOL_CALLS]", '"</tool_call>\\"']
)
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_mark_inside_arguments_is_text(template: str, text: str) -> None:
    """A mark of the call format inside of a call's arguments is read as text."""
    tool = {"name": "w", "parameters": {"type": "object", "properties": {"c": {"const": text}}, "required": ["c"]}}

    async def test(site: Site, model: Model) -> None:
        got = await post(site, {"tools": [{"type": "function", "function": tool}], "tool_choice": NAMED})
        (call,) = got["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"c": text} and not got["choices"][0]["message"]["content"]

    with_model(test, template)


# --- calls ------------------------------------------------------------------------------------------------------------


def leaked(text: str) -> bool:
    return any(mark in text for mark in ("<", "tool", "{", "name", "[", "TOOL"))


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_cut_call_leaks_no_marks(template: str) -> None:
    """A call cut by max_tokens leaves no marks in the content, streamed or not."""

    async def test(site: Site, model: Model) -> None:
        for max_tokens in (1, 3, 9, 12, 20, 35, 50, 60, 70, 200):
            body = {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": max_tokens}
            (choice,) = (await post(site, body))["choices"]
            if choice["finish_reason"] == "tool_calls":
                break
            assert choice["finish_reason"] == "length" and not choice["message"]["content"], choice
            events = [
                json.loads(line[6:])
                for line in (await post(site, {**body, "stream": True})).split("\n\n")
                if "{" in line
            ]
            assert not "".join(one["delta"].get("content") or "" for event in events for one in event["choices"])
            assert events[-1]["choices"][0]["finish_reason"] in ("length", "tool_calls")  # each draws its own arguments
            anthropic = {"tools": [{"name": "w", "input_schema": WEATHER["parameters"]}], "max_tokens": max_tokens,
                         "tool_choice": {"type": "tool", "name": "w"}, "seed": None}  # fmt: skip
            anthropic = {key: value for key, value in anthropic.items() if value is not None}
            async with site.client() as client:
                sent = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **anthropic}
                got = (await client.post("/v1/messages", json=sent)).json()
                called = any(block["type"] == "tool_use" for block in got["content"])
                # A call that was cut is shown as far as it went; the reason says that it is not whole.
                assert got["stop_reason"] == "max_tokens" or (called and got["stop_reason"] == "tool_use"), got
                assert not [block for block in got["content"] if block["type"] == "text"], got
                choice = {"type": "function", "name": "w"}
                sent = {"model": MODEL, "input": "x", "max_output_tokens": max_tokens, "tool_choice": choice}
                sent |= {"tools": [{"type": "function", **WEATHER}]}
                got = (await client.post("/v1/responses", json=sent)).json()
                called = any(item["type"] == "function_call" for item in got["output"])
                assert got["status"] == "incomplete" or called, got
                texts = [
                    part["text"] for item in got["output"] if item["type"] == "message" for part in item["content"]
                ]
                assert not "".join(texts)
        else:
            pytest.fail("never whole")

    with_model(test, template)


@pytest.mark.parametrize(("call_format", "text"), [
    (HERMES, 'Well: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {'),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    (MISTRAL, 'Well: [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
    (MISTRAL_ARGS, 'Well: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
])  # fmt: skip
def test_cut_answer_content_excludes_the_call(call_format: CallFormat, text: str) -> None:
    """Content of an answer cut anywhere is a start of the text before the call."""
    for end in range(len(text)):
        reader = AnswerReader(Reading(regions_of(call_format, thinks=True), frozenset()), "s")
        got = reader.feed(text[:end], ended=True, cut=True)
        assert "Well:".startswith(got.content), (end, got)


def test_incomplete_call_at_end_is_content() -> None:
    """Text that only looks like the start of a call is content if the model ends there."""
    for call_format, text in (
        (HERMES, "1 < 2 and <too"),
        (MISTRAL, "see [TOOL"),
        (LLAMA, '{"json": 1}'),
        (LLAMA, "<|pyth"),
    ):
        reader = AnswerReader(Reading(regions_of(call_format, thinks=False), frozenset()), "s")
        assert reader.feed(text, ended=True).content == text


@pytest.mark.parametrize("stop", ["}", "Paris", '"', "name", "{"])
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_stop_strings_are_ignored_in_calls(template: str, stop: str) -> None:
    """A stop string inside of a call does not end it."""

    async def test(site: Site, model: Model) -> None:
        for choice in (NAMED, "required"):
            got = await post(
                site, {"tools": [TOOL], "tool_choice": choice, "stop": [stop], "parallel_tool_calls": False}
            )
            (one,) = got["choices"]
            (call,) = one["message"]["tool_calls"]
            assert one["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"])["c"] in (
                "Paris",
                "a}b",
            )

    with_model(test, template)


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_named_tool_choice_gives_one_call(template: str) -> None:
    """A named tool choice, or one without parallel calls, gives exactly one call."""

    async def test(site: Site, model: Model) -> None:
        model.goes_on = 1.0
        several = 0
        for seed in range(6):
            for choice, parallel in ((NAMED, None), (NAMED, True), ("required", False)):
                body = {"tools": [TOOL], "tool_choice": choice, "seed": seed, "max_tokens": 300}
                got = await post(site, body if parallel is None else {**body, "parallel_tool_calls": parallel})
                assert len(got["choices"][0]["message"]["tool_calls"]) == 1, got
            got = await post(site, {"tools": [TOOL], "tool_choice": "required", "seed": seed, "max_tokens": 300})
            several += len(got["choices"][0]["message"].get("tool_calls", ())) > 1
        assert several

    with_model(test, template)


# --- what the grammar cannot express ----------------------------------------------------------------------------------


def odd(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"e": {"type": "string", "pattern": pattern, "maxLength": 3}}, "required": ["e"],
            "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_lax_answer_is_checked_against_schema(stream: bool) -> None:
    """An answer without strict that breaks its schema ends with answer_does_not_match."""

    async def test(site: Site, model: Model) -> None:
        tool = {"name": "f", "parameters": odd("^(?!.*)x")}
        asked = {"name": "x", "schema": odd("^(?!.*)x")}
        for form in (
            {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": asked}},
        ):
            got = await post(site, {**form, "stream": stream})
            assert "answer_does_not_match" in json.dumps(got) and "$.e does not match 'pattern'" in json.dumps(got)
            if stream:
                assert "[DONE]" not in got and '"finish_reason":"' not in got
            fits = json.loads(json.dumps(form).replace("^(?!.*)x", "^(?!xyzzy)"))
            got = await post(site, {**fits, "stream": stream})
            assert "error" not in got and "finish_reason" in json.dumps(got)
            cut = await post(site, {**form, "stream": stream, "max_tokens": 2})
            assert "length" in json.dumps(cut) and "error" not in cut

    with_model(test)


def test_strict_refusal_names_keyword_and_path() -> None:
    """The refusal of a strict schema names the keyword and its path."""

    async def test(site: Site, model: Model) -> None:
        tool = {"name": "f", "parameters": odd("^(?!x)"), "strict": True}
        for form in (
            {"tools": [TOOL, {"type": "function", "function": tool}]},
            {"response_format": strict(odd("a$b"))},
        ):
            error = (await post(site, form))["error"]
            assert error["code"] == "invalid_value" and "'pattern' at $.properties.e" in error["message"], error

    with_model(test)


def test_odd_schema_leaves_others_unchanged() -> None:
    """Only patterns that cannot be expressed are left out of the grammar of several tools."""

    async def test(site: Site, model: Model) -> None:
        tools = [
            {"type": "function", "function": {"name": f"f{n}", "parameters": odd(pattern)}}
            for n, pattern in enumerate(["a$b", "^[bc]{2}$", r"\bx", "(", "a.*$b"])
        ]
        await post(site, {"tools": tools, "tool_choice": "auto"})
        grammar = site.cluster.submits[-1][0].sampling.grammar
        assert "^[bc]{2}$" in grammar and not any(bad in grammar for bad in ("a$b", "\\bx", "a.*$b"))

    with_model(test)


def test_form_without_answer_is_refused() -> None:
    """A form that no answer matches is refused, and nothing is submitted."""

    async def test(site: Site, model: Model) -> None:
        got = await post(site, {"guided_regex": r"a[^\s\S]"})
        assert got["error"]["code"] == "invalid_value" and "no answer matches" in got["error"]["message"], got
        assert not site.cluster.submits

    with_model(test)


def test_failed_grammar_is_not_retried() -> None:
    """A request whose grammar fails on a worker is not submitted again."""

    async def test(site: Site, model: Model) -> None:
        def fail(submit: Submit, choice: int) -> list[int]:
            site.cluster.backend.coordinator_message(
                site.cluster,
                Interrupted(submit.request_id, submit.attempt, Interrupt.GRAMMAR, "no token continues it"),
                b"",
            )
            return []

        site.cluster.answer = fail
        got = await post(site, {"guided_regex": "ab"})
        assert got["error"]["code"] == "grammar_failed" and "no token continues it" in got["error"]["message"]
        assert len(site.cluster.submits) == 1

    with_model(test)


def test_end_token_inside_grammar_is_masked() -> None:
    """No token is allowed where a grammar asks for the end token before its own end."""
    tok = tokenizer(TEMPLATES["in words"])
    compiler = Compiler(make_tokenizer(tok.serialized(), tok.facts.vocab_size, tok.facts.eos_ids), tok.facts.vocab_size)
    matcher = compiler.matcher(
        f'%llguidance {{}}\nstart: "a" <[{tiny_models.EOS}]> "b"', tok.encode("a", add_special_tokens=False)
    )
    assert not np.isfinite(matcher.mask(np.zeros(tok.facts.vocab_size, np.float32))).any()
