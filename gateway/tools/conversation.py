"""The inputs of a chat template: messages with tool calls and their results, tools, and the template's own options. Pure."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.http.errors import bad_value
from gateway.http.json_text import parse_inner, values_bytes
from gateway.text.template_facts import TemplateFacts
from gateway.tools.formats import HERMES, CallFormat, format_of
from gateway.tools.request import Tool, Tools

KWARGS_MAX: Final = 16
KWARGS_BYTES_MAX: Final = 16_384
ARGUMENTS_BYTES_MAX: Final = 16 << 20  # memory of all calls' arguments, beside the characters of their strings
_OURS: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
_SWITCHES: Final = ("enable_thinking", "thinking")  # templates know one at most; clients send both
_CALLS_IN_WORDS: Final = (
    "You can call functions. Each line here describes one, as JSON:\n{tools}\n"
    "To call one, answer with its name and its arguments in this form, and nothing else:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}\n</tool_call>'
)  # Words for models whose chat template knows no tools


def tells_in_words(facts: TemplateFacts) -> bool:
    """Returns whether tools, calls and results are written into the text of messages. This is so if the template has no tools,
    or if the form of its calls is not known."""
    return not facts.takes_tools or (format_of(facts.text) is None and facts.response_template is None)


def call_format(facts: TemplateFacts) -> CallFormat | None:
    """Returns the form of the model's calls, or None if only the model's own response template defines it."""
    return HERMES if tells_in_words(facts) else format_of(facts.text)


def template_options(facts: TemplateFacts, kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """`chat_template_kwargs` and `reasoning_effort` as the template takes them. An option that the template does not know is
    refused, unless it turns off what the model does not do. Raises `ApiError`."""
    name = "chat_template_kwargs"
    options = dict(kwargs or {})
    if len(options) > KWARGS_MAX or len(msgspec.json.encode(options)) > KWARGS_BYTES_MAX:
        raise bad_value(name, f"'{name}' may have at most {KWARGS_MAX} fields and {KWARGS_BYTES_MAX} bytes.")
    switch = next((one for one in _SWITCHES if one in facts.variables), None)
    for key in list(options):
        param = f"{name}.{key[:100]}"
        if key in _OURS:
            raise bad_value(param, f"'{param}' is not allowed: the request itself says it.")
        if key in facts.variables:
            continue
        value = options.pop(key)
        if key in _SWITCHES and switch is not None:
            options.setdefault(switch, value)
        elif key == "reasoning_effort":
            effort = effort or value
        elif value or facts.thinks:
            message = f"'{param}' has no effect: the model's chat template does not use {key[:100]!r}."
            raise bad_value(param, message, "unsupported_parameter")
    if effort is None:
        return options
    if "reasoning_effort" in facts.variables:
        options.setdefault("reasoning_effort", effort)
    elif switch is not None:
        options.setdefault(switch, effort != "none")
    return options


def template_messages(messages: Sequence[Any], tools: Tools | None, facts: TemplateFacts) -> list[dict[str, Any]]:
    """`messages` are `gateway.openai.request_types.ChatMessage`. Raises `ApiError`."""
    in_words = tells_in_words(facts)
    found, called, arguments_bytes = list[dict[str, Any]](), set[str](), 0
    before_is_own = False  # the last message is the user's and made here; many templates want roles to alternate
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        _check(message, param)
        arguments_bytes += sum(values_bytes(call.function.arguments.encode()) for call in message.calls())
        if arguments_bytes > ARGUMENTS_BYTES_MAX:
            raise bad_value(f"{param}.tool_calls", "The arguments of all calls together have too many values.")
        if message.role == "tool":
            if message.tool_call_id not in called:
                text = f"'{param}.tool_call_id' answers no call of a message before it."
                raise bad_value(f"{param}.tool_call_id", text)
        else:
            called |= {call.id for call in message.calls()}
        is_own = in_words and message.role == "tool"
        shown = _in_words(message) if in_words else _as_it_is(message)
        if found and shown["role"] == found[-1]["role"] == "user" and (is_own or before_is_own):
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{shown['content']}"}
        else:
            found.append(shown)
        before_is_own = is_own
    if tools is not None and tools.allowed and in_words:
        _describe(found, tools.offered, facts)
    return found


_OF_ANSWERS: Final = (
    "tool_calls", "reasoning_content", "reasoning", "refusal", "annotations", "audio", "function_call",
)  # fmt: skip


def _check(message: Any, param: str) -> None:
    if message.content is None and message.role != "assistant":
        text = f"Invalid value for '{param}.content': it must be a string or a list of text parts."
        raise bad_value(f"{param}.content", text, "invalid_type")
    for name in _OF_ANSWERS if message.role != "assistant" else ():
        if getattr(message, name):
            raise bad_value(f"{param}.{name}", f"'{param}.{name}' is for the role 'assistant'.")
    if (message.role == "tool") != (message.tool_call_id is not None):
        raise bad_value(f"{param}.tool_call_id", f"'{param}.tool_call_id' goes with the role 'tool'.")


def _arguments(call: Any) -> Any:
    """A call's arguments as an object, which templates expect. Arguments that are none stay the text that they are: the model
    was cut off in the middle of them."""
    try:
        arguments = parse_inner(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else call.function.arguments


def with_whole_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes arguments as objects only: cut arguments become an object's one value."""

    def whole(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = function["arguments"]
        return {**call, "function": {**function, "arguments": {"arguments": text}}} if isinstance(text, str) else call

    return [
        {**message, "tool_calls": list(map(whole, message["tool_calls"]))} if "tool_calls" in message else message
        for message in messages
    ]


def _as_it_is(message: Any) -> dict[str, Any]:
    found = _plain(message)
    if calls := message.calls():
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in calls
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    if thought := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = thought
    return found


def _plain(message: Any) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role  # templates know the older name
    return {"role": role, "content": message.text(), **({"name": message.name} if message.name else {})}


def _in_words(message: Any) -> dict[str, Any]:
    """The message for a template that knows no tools: calls and results as text of the roles that it knows."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text()}\n</tool_response>"}
    found = _plain(message)
    texts = [found["content"]]
    for call in message.calls():
        arguments = _arguments(call)
        shown = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        name = msgspec.json.encode(call.function.name).decode()
        texts.append(f'<tool_call>\n{{"name":{name},"arguments":{shown}}}\n</tool_call>')
    return found | {"content": "\n".join(texts).lstrip("\n") if len(texts) > 1 else texts[0]}


def _describe(messages: list[dict[str, Any]], tools: Sequence[Tool], facts: TemplateFacts) -> None:
    """Put the tools into the system's message, or into the user's first if the template has no system."""
    lines = "\n".join(msgspec.json.encode(tool.described()["function"]).decode() for tool in tools)
    text = _CALLS_IN_WORDS.format(tools=lines)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if not facts.shows_system and first is not None:
        messages[first] = {**messages[first], "content": f"{text}\n\n{messages[first]['content']}"}
    elif messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system" if facts.shows_system else "user", "content": text})
