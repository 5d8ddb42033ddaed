"""Assistant messages of any server can be sent back: what a chat template can show is shown, and the rest is dropped."""

from typing import Any

import pytest

from gateway.http.errors import ApiError
from gateway.openai.forms import Chat
from gateway.openai.request_types import ChatRequest, validate
from gateway.text.template_facts import TemplateFacts

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHOWN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
KNOWS_TOOLS = TemplateFacts("{{ tools }} <tool_call>", frozenset({"messages", "tools"}))
HI = {"role": "user", "content": "Hi"}


def shown(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return Chat.of(validate(ChatRequest, {"model": "m", "messages": [HI, *messages]}), KNOWS_TOOLS).messages[1:]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": "x", "refusal": "No."}, {"content": "x"}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "No."}]},
         {"content": "a\nNo."}),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]}, {"content": "a"}),
        ({"content": []}, {"content": ""}),
        ({"content": "x", "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}]}, {"content": "x"}),
        ({"content": None, "audio": {"id": "audio_1", "transcript": "t"}}, {"content": ""}),
        ({"content": "x", "reasoning_content": "r"}, {"content": "x", "reasoning_content": "r"}),
        ({"content": "x", "reasoning": "r", "reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
         {"content": "x", "reasoning_content": "r"}),
        ({"content": None, "reasoning_content": "cut"}, {"content": "", "reasoning_content": "cut"}),
        ({"content": "x", "tool_calls": None, "function_call": None, "audio": None, "refusal": None}, {"content": "x"}),
        ({"content": "x", "tool_calls": []}, {"content": "x"}),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [SHOWN_CALL]}),
        ({"content": "", "tool_calls": [{**CALL, "index": 0, "type": None, "extra_content": {"google": {}}}]},
         {"content": "", "tool_calls": [SHOWN_CALL]}),
        ({"tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}, "output": None}}]},
         {"content": "", "tool_calls": [SHOWN_CALL]}),
        ({"tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
         {"content": "", "tool_calls": [{**SHOWN_CALL, "function": {"name": "f", "arguments": {"input": "x"}}}]}),
        ({"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
         {"content": "", "tool_calls": [{**SHOWN_CALL, "id": "f"}]}),
        ({"content": "", "tool_calls": [CALL], "function_call": {"name": "f", "arguments": "{}"}},
         {"content": "", "tool_calls": [SHOWN_CALL]}),
        ({"content": "x", "name": "bot", "id": "msg_1", "created": 1, "provider_specific_fields": {"a": 1}, "images": [],
          "thinking_blocks": None, "parsed": None, "token_ids": [1], "stop_reason": 2, "cache_control": {"type": "x"}},
         {"content": "x", "name": "bot"}),
    ],
)  # fmt: skip
def test_assistant_message_is_shown(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    """A template gets only the fields of an assistant's message that it can show."""
    assert shown({"role": "assistant", **sent}) == [{"role": "assistant", **expected}]
    told = Chat.of(
        validate(ChatRequest, {"model": "m", "messages": [HI, {"role": "assistant", **sent}]}), TemplateFacts()
    )
    assert set(told.messages[1]) <= {"role", "content", "name"}, "of a template that knows no tools"


def test_results_of_earlier_calls_are_shown() -> None:
    """Results of functions become tool results, and a result may come after a later message."""
    function = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    found = shown(function, {"role": "function", "name": "f", "content": "7"})
    assert found[1] == {"role": "tool", "tool_call_id": "f", "content": "7", "name": "f"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    late = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert shown(called, {"role": "user", "content": "wait"}, late)[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({**HI, "id": "x"}, "messages[1].id"),
        ({"role": "tool", "tool_call_id": "c", "content": "", "weight": 1}, "messages[1].weight"),
        ({"role": "assistant", "content": 5}, "messages[1].content"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "assistant", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": 5}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call.arguments"),
        ({"role": "assistant", "reasoning": {"text": "x"}}, "messages[1].reasoning"),
        ({"role": "assistant", "name": 5}, "messages[1].name"),
        ({**HI, "function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"role": "function", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "function", "name": ["f"], "content": "x"}, "messages[1].tool_call_id"),
        ({"role": ["assistant"], "content": "x"}, "messages[1].role"),
    ],
)  # fmt: skip
def test_wrong_message_field_is_named(message: Any, param: str) -> None:
    """A wrong message is refused with status 400 and the name of its field."""
    with pytest.raises(ApiError) as caught:
        shown(message)
    assert (caught.value.status, caught.value.param) == (400, param)
