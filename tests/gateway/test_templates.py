"""Chat templates come with models: they see the messages and nothing else, and what they do wrong is a 400."""

from typing import Any

import pytest

from gateway.http.errors import ApiError
from gateway.openai.forms import Chat
from gateway.openai.request_types import ChatRequest, validate
from gateway.text import tokenizer as tokenizers
from gateway.text.template_facts import TemplateError
from gateway.text.tokenizer import ModelTokenizer
from tests.gateway.tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({}) }}",
        "{{ ''.format_map.__self__.__class__.__base__.__subclasses__() }}",
        "{{ range(1000000000) | list }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].nothing.more }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('not these') }}",
    ],
)
def test_bad_template_is_a_template_error(template: str) -> None:
    """A template that reaches outside or fails raises TemplateError."""
    one = byte_level()
    one._hf.chat_template = template
    with pytest.raises(TemplateError):
        one.apply_template(MESSAGES)


def test_template_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose output is longer than allowed raises TemplateError."""
    monkeypatch.setattr(tokenizers, "_TEMPLATE_CHARS_MAX", 1_000)
    one = byte_level()
    one._hf.chat_template = "{% for _ in range(500) %}{{ messages[0].content }}{% endfor %}"
    assert len(one.apply_template(MESSAGES)) == 1_000
    one._hf.chat_template += "!"
    with pytest.raises(TemplateError, match="more than"):
        one.apply_template(MESSAGES)


PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
CALLS = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "ARGUMENTS{% endfor %}{% endfor %}"
)
TEXTS = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
OBJECTS = CALLS.replace("ARGUMENTS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CUT = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    source = byte_level()._hf
    source.chat_template = template
    one = ModelTokenizer(source, byte_level().facts)
    request = validate(ChatRequest, {"model": "m", "messages": messages, **fields})
    return Chat.of(request, one.template).rendered(one)


def test_template_gets_the_content_that_it_shows() -> None:
    """Each role's content is a list of parts where the template reads only that, and a string elsewhere."""
    turns = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "C"},
    ]
    assert rendered(PARTS_ONLY, [*turns, {"role": "user", "content": [{"type": "text", "text": "D"}]}]) == (
        "[system] A[user] B[assistant] C[user] D"
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [("Hello", "does not show the text"), ("{{ messages[0].x.y }}", "has no attribute"), ("{% if %}", "Expected an")],
)
def test_useless_template_refuses_chat(template: str, why: str) -> None:
    """A template that shows no text, or fails whatever it gets, is found when the model is loaded."""
    source = byte_level()._hf
    source.chat_template = template
    assert why in ModelTokenizer(source, byte_level().facts).template.fault
    with pytest.raises(ApiError, match=why):
        rendered(template, MESSAGES)


SKIPS = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages if m.role != 'ROLE' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("role", "messages"),
    [
        ("system", [{"role": "system", "content": "S"}, *MESSAGES]),
        ("system", [{"role": "developer", "content": [{"type": "text", "text": "S"}]}, *MESSAGES]),
        ("assistant", [*MESSAGES, {"role": "assistant", "content": "A"}, *MESSAGES]),
        (
            "tool",
            [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [CUT]},
                {"role": "tool", "tool_call_id": "c1", "content": "R"},
            ],
        ),
    ],
)
def test_dropped_role_is_refused(role: str, messages: list[dict[str, Any]]) -> None:
    """A template that drops the text of a role in silence is found when the model is loaded; other chats are served."""
    template = SKIPS.replace("ROLE", role)
    assert rendered(template, MESSAGES) == "<user>Hi"
    with pytest.raises(ApiError, match=f"does not show messages of the role '{role}'"):
        rendered(template, messages)


def test_tools_need_no_system_role() -> None:
    """Tools go into the user's message if the template has no system, and what crossdock writes keeps roles in turns."""
    assert rendered(GEMMA, MESSAGES, tools=[TOOL]).endswith("\n\nHi")
    calls = [{**CUT, "id": name} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"is {name}"} for name in "ab"]
    history: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": calls},
        *results,
        {"role": "user", "content": "So?"},
    ]
    text = rendered(GEMMA, history, tools=[TOOL])
    assert [text.count(f"<{role}>") for role in ("user", "assistant")] == [2, 1]
    assert text.endswith("is b\n</tool_response>\nSo?") and '"arguments":{"city": "Par}' in text
    with pytest.raises(ApiError, match="System role"):
        rendered(GEMMA, [{"role": "system", "content": "x"}, *MESSAGES])


@pytest.mark.parametrize(("template", "shown"), [(TEXTS, '{"city": "Par'), (OBJECTS, 'arguments={"city": "Par')])
def test_cut_arguments_are_shown(template: str, shown: str) -> None:
    """A call that the model was cut off in stays in the history as it is."""
    history: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [CUT]},
        {"role": "tool", "tool_call_id": "c1", "content": "R"},
    ]
    assert rendered(template, history, tools=[TOOL]).endswith(f"<assistant>{shown}<tool>R")
