"""Tool calls and thoughts: what templates get, how answers are read, in whatever pieces they come."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from gateway.http.errors import ApiError
from gateway.openai.forms import Chat
from gateway.openai.request_types import ChatRequest, validate
from gateway.text.regions import Regions
from gateway.text.template_facts import TemplateFacts
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from gateway.tools.call_reader import Arguments, CallBegun, CallReader
from gateway.tools.conversation import template_options
from gateway.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, CallFormat, format_of, regions_of
from gateway.tools.reader import AnswerReader, Reading
from runtime.grammar.compiler import Compiler, make_tokenizer
from tests import tiny_models

CALL = {"name": "get_weather", "arguments": {"city": 'O"slo', "days": [1, {"n": 2}]}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}


def pieces(text: str, source: random.Random) -> list[str]:
    cuts = sorted(source.sample(range(len(text) + 1), min(len(text), source.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("\n" + json.dumps(CALL) + "\n", [("get_weather", CALL["arguments"])]),
        ('[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [("f", {"a": 1}), ("g", {})]),
        ('{"name": "f", "parameters": {"a": "}"}}; {"name": "g", "parameters": {}}', [("f", {"a": "}"}), ("g", {})]),
        ('get_weather[ARGS]{"city": "]["}', [("get_weather", {"city": "]["})]),
        ('{"arguments": {"z": 1}, "name": "late"}', [("late", {"z": 1})]),
        ('{"name": "s", "arguments": "{\\"k\\": 1}"}', [("s", {"k": 1})]),
        ('{"id": "123", "name": "n", "arguments": {"name": "inner"}}', [("n", {"name": "inner"})]),
    ],
    ids=["one", "list", "llama", "args", "name last", "as a string", "other keys"],
)
def test_calls_are_read_in_any_pieces(text: str, calls: list[Any]) -> None:
    """Names and arguments of calls are read from pieces of any size."""
    source = random.Random(1)
    for _ in range(100):
        reader, found = CallReader(), list[list[str]]()
        for part in pieces(text, source):
            for event in reader.feed(part):
                if isinstance(event, CallBegun):
                    found.append([event.name, ""])
                else:
                    assert isinstance(event, Arguments)
                    found[-1][1] += event.text
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def read(reading: Reading, text: str, source: random.Random) -> tuple[str, str, list[list[str]]]:
    """(content, reasoning, calls as names and texts of arguments)"""
    reader, content, reasoning, calls = AnswerReader(reading, "s"), "", "", list[list[str]]()
    parts = pieces(text, source)
    for number, part in enumerate(parts):
        got = reader.feed(part, ended=number == len(parts) - 1)
        content, reasoning = content + got.content, reasoning + got.reasoning
        for call in got.calls:
            if "id" in call:
                calls.append([call["function"]["name"], call["function"]["arguments"]])
            else:
                calls[call["index"]][1] += call["function"]["arguments"]
    return content, reasoning, calls


BODY = json.dumps(CALL)
ARGUMENTS = json.dumps(CALL["arguments"])
LLAMA_BODY = BODY.replace('"arguments"', '"parameters"')


@pytest.mark.parametrize(
    ("call_format", "text", "content", "reasoning", "calls"),
    [
        (HERMES, f"Let me see.\n<tool_call>\n{BODY}\n</tool_call>", "Let me see.", "", 1),
        (HERMES, f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call>", "", "", 2),
        (HERMES, f"<think>\nhm <b></think>\n\nWell: <tool_call>{BODY}</tool_call>", "Well:", "hm <b>", 1),
        (HERMES, "a <tool_call>nonsense</tool_call> b", "a nonsense b", "", 0),
        (HERMES, "1 < 2 and <too", "1 < 2 and <too", "", 0),
        (LLAMA, LLAMA_BODY, "", "", 1),
        (LLAMA, f"<|python_tag|>{LLAMA_BODY}; {LLAMA_BODY}", "", "", 2),
        (LLAMA, "No call: {}", "No call: {}", "", 0),
        (MISTRAL, f"[TOOL_CALLS][{BODY}, {BODY}]", "", "", 2),
        (MISTRAL_ARGS, f"Hm. [TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", "Hm.", "", 2),
    ],
)  # fmt: skip
def test_answers_are_split_into_parts(
    call_format: CallFormat, text: str, content: str, reasoning: str, calls: int
) -> None:
    """An answer is split into content, reasoning and calls in each call format."""
    source = random.Random(2)
    for _ in range(60):
        got = read(Reading(regions_of(call_format, thinks=True), frozenset()), text, source)
        assert (got[0], got[1].strip()) == (content, reasoning)
        assert [(name, json.loads(arguments)) for name, arguments in got[2]] == [
            ("get_weather", CALL["arguments"])
        ] * calls


def test_thought_begun_in_prompt_is_read() -> None:
    """A thought that the prompt has begun is read as reasoning, and its tokens are counted."""
    reading = Reading(
        regions_of(None, thinks=True, begun=True), frozenset(), thought_ends=frozenset({9}), thought_begun=True
    )
    assert read(reading, "so\n</think>\n\nYes.", random.Random(3))[:2] == ("Yes.", "so\n")
    reader = AnswerReader(reading, "s")
    for text, tokens in (("so", (1, 2)), (" it is</think>", (3, 9)), ("Yes.", (4, 5)), ("", ())):
        reader.feed(text, tokens)
    assert reader.reasoning_tokens == 4


def test_own_response_template_is_used() -> None:
    """A model's own response template is used to read its answers."""
    template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "[T]", "close": "[/T]"},
            "content": {},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+)\(",
                "close": ")",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    reading = Reading(Regions(()), frozenset(), own=template, prefix="<|user|>x<|assistant|>")
    got = read(reading, '[T]hm[/T]Now CALL f({"a": 1})', random.Random(4))
    assert (got[0].strip(), got[1], got[2]) == ("Now", "hm", [["f", '{"a": 1}']])


@pytest.mark.parametrize("arguments", ["{bad", "[" * 5_000], ids=["no JSON", "too deep"])
def test_unreadable_call_is_content(arguments: str) -> None:
    """A call that the model's own response template cannot read is content."""
    calls = {"open": "CALL ", "close": ";", "repeats": True, "content": "json"}
    template = {"start_anchor": "<|a|>", "fields": {"content": {"optional": False}, "tool_calls": calls}}
    reading = Reading(Regions(()), frozenset(), own=template, prefix="<|a|>")
    for seed in range(20):
        got = read(reading, f"CALL {arguments}; and more", random.Random(seed))
        assert got[0].endswith(f"{arguments}; and more") and not got[2]
    name = '{"name": "f", "arguments": {}}'
    assert read(reading, f"CALL {name};", random.Random(1)) == ("", "", [["f", "{}"]])


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} <tool_call><function=x>", None),
        ("{{ tools }} <|python_tag|>", LLAMA),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ("{{ tools }} [TOOL_CALLS] x [ARGS]", MISTRAL_ARGS),
    ],
)
def test_template_tells_the_call_format(template: str, found: CallFormat | None) -> None:
    """The call format of a model is recognised from its chat template."""
    assert format_of(template) is found


def made(tools: list[Any] | None = None, template: str = tiny_models.CHAT_TEMPLATE, **body: Any) -> Chat:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    request = validate(ChatRequest, body if tools is None else {**body, "tools": tools})
    return Chat.of(request, tokenizer(template).template)


def tokenizer(template: str = tiny_models.CHAT_TEMPLATE) -> ModelTokenizer:
    fast = tiny_models.tokenizer()
    fast.add_tokens(
        [AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    fast.chat_template = template
    return ModelTokenizer(fast, ModelFacts(4096, tiny_models.VOCAB, frozenset({tiny_models.EOS})))


KNOWS_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{{ messages[-1].content }}"
THINKS = (
    "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_tools_go_to_template_or_text() -> None:
    """Tools go to a template that takes them, and otherwise into the system message."""
    assert made([TOOL], KNOWS_TOOLS).described_tools[0]["function"]["name"] == "get_weather"
    chat = made([TOOL])
    assert not chat.described_tools
    assert chat.messages[0]["role"] == "system" and '"get_weather"' in chat.messages[0]["content"]
    assert made([TOOL], tool_choice="none").messages == [{"role": "user", "content": "x"}]


def test_earlier_calls_and_results_are_shown() -> None:
    """Earlier calls and results go to a template that takes tools, and otherwise become text."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    knows = made([TOOL], KNOWS_TOOLS, messages=messages).messages
    assert knows[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert knows[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    told = made([TOOL], messages=messages).messages
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert '<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo"}}' in told[2]["content"]
    assert "rain" in told[3]["content"]


def test_template_options_are_checked() -> None:
    """Options that a template takes are passed to it, and unknown ones are refused."""
    facts = TemplateFacts("", frozenset({"messages", "enable_thinking"}))
    assert template_options(facts, {"enable_thinking": False}, None) == {"enable_thinking": False}
    assert template_options(facts, None, "none") == {"enable_thinking": False}
    assert template_options(facts, None, "low") == {"enable_thinking": True}
    takes = replace(facts, variables=frozenset({"reasoning_effort"}))
    assert template_options(takes, None, "low") == {"reasoning_effort": "low"}
    for kwargs, effort in (({"other": 1}, None), ({"messages": []}, None)):
        with pytest.raises(ApiError):
            template_options(facts, kwargs, effort)
    assert template_options(TemplateFacts(), None, "high") == {}, "a hint, as far as a template takes it"


# --- grammars ---------------------------------------------------------------------------------------------------------


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is an answer."""
    made = tokenizer()
    compiler = Compiler(make_tokenizer(made.serialized(), tiny_models.VOCAB, [tiny_models.EOS]), tiny_models.VOCAB)
    matcher = compiler.matcher(grammar, made.encode(text, add_special_tokens=False))
    return matcher.is_complete


GOOD = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
BAD = '{"name": "get_weather", "arguments": {"city": 5}}'
STOP = '{"name": "stop", "arguments": {}}'


def wrapped(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({}, ["Hello.", wrapped(GOOD), "So:\n" + wrapped(GOOD, STOP)], [wrapped(BAD), wrapped('{"name": "no"}')]),
        ({"tool_choice": "required"}, [wrapped(GOOD), wrapped(STOP, GOOD)], ["", "Hello.", wrapped(BAD)]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [wrapped(GOOD), wrapped(STOP)],
            [wrapped(GOOD, STOP)],
        ),
        ({"parallel_tool_calls": False}, ["Hello.", "So: " + wrapped(GOOD)], [wrapped(GOOD, STOP)]),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, [wrapped(STOP)], [wrapped(GOOD)]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}}},
            [wrapped(STOP)],
            [wrapped(GOOD)],
        ),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', wrapped(GOOD)], ["Hello."]),
    ],
    ids=["auto", "required", "one", "at most one", "named", "allowed", "or a form"],
)  # fmt: skip
def test_call_grammar_accepts_right_calls_only(body: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    """The grammar of a tool choice accepts right answers and refuses wrong ones."""
    grammar = made([TOOL, OTHER], **body).form("x", tokenizer()).grammar
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize("call_format", [LLAMA, MISTRAL, MISTRAL_ARGS], ids=lambda one: one.name)
def test_other_call_formats_have_grammars(call_format: CallFormat) -> None:
    """The grammars of the other call formats accept right calls and refuse wrong ones."""
    marks = {LLAMA: "<|python_tag|>", MISTRAL: "[TOOL_CALLS]", MISTRAL_ARGS: "[TOOL_CALLS][ARGS]"}
    template = "{{ tools }}" + marks[call_format]
    call = {
        LLAMA: GOOD.replace("arguments", "parameters"),
        MISTRAL: f"[TOOL_CALLS][{GOOD}, {STOP}]",
        MISTRAL_ARGS: '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]stop[ARGS]{}',
    }[call_format]
    required = made([TOOL, OTHER], template, tool_choice="required").form("x", tokenizer()).grammar
    optional = made([TOOL, OTHER], template).form("x", tokenizer()).grammar
    assert accepts(required, call) and accepts(optional, call) and accepts(optional, "Hello.")
    assert not accepts(required, "Hello.") and not accepts(required, call.replace('"Oslo"', "5"))


def test_thought_may_precede_a_form() -> None:
    """A thought may come before the answer's form if the prompt leaves it open."""
    chat = made(None, THINKS + "</think>", response_format={"type": "json_object"})
    free, begun = chat.form("x", tokenizer()), chat.form("x<think>\n", tokenizer())
    none = chat.form("x<think></think>\n\n", tokenizer())
    assert accepts(free.grammar, '{"a": 1}') and accepts(free.grammar, '<think>so {</think>\n\n{"a": 1}')
    assert not accepts(free.grammar, "<think>so")
    assert accepts(begun.grammar, 'so</think>{"a": 1}') and not accepts(begun.grammar, '{"a": 1}')
    assert accepts(none.grammar, "{}") and not accepts(none.grammar, "<think></think>{}")
    assert begun.reading is not None and begun.reading.thought_begun and none.reading is None
