"""A request to /v1/responses → one to /v1/chat/completions. Pure."""

from typing import Any, Final

from gateway.http.errors import bad_value
from gateway.openai.renamed import renamed
from gateway.openai.request_types import PARTS_MAX, TOOLS_MAX, ChatRequest, validate
from gateway.responses.types import ResponsesRequest

Item = dict[str, Any]
NAMES: Final = {
    "messages.*": "input",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"(tools\[\d+\])\.function": r"\1",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of chat, and what they are made of here."""
_SAME: Final = (
    "model", "stream", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "priority", "service_tier",
    "deadline_ms", "cache_salt", "user", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
_TEXTS: Final = ("input_text", "output_text", "text")
_REFUSED: Final = {
    "input_image": "images are not supported: this server reads text",
    "input_audio": "audio is not supported: this server reads text",
    "input_file": "files are not supported: send their text",
    "item_reference": "items are not kept one by one; send the item, or use 'previous_response_id'",
}


def input_items(request: ResponsesRequest) -> list[Item]:
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def as_chat(request: ResponsesRequest, items: list[Item]) -> ChatRequest:
    """`items`: those of the conversation before, and the request's own. Raises `ApiError`."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "".join(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {"messages": messages, "max_completion_tokens": request.max_output_tokens}
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format(request.text.format)
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools)]
    fields["tool_choice"] = _choice(request.tool_choice)
    with renamed(NAMES):
        return validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _add(messages: list[Item], item: Item, param: str) -> None:
    """One item behind the messages before it: calls and thoughts belong to one message of the assistant."""
    match item.get("type", "message"):
        case "message":
            role, text = item.get("role"), _text(item.get("content"), f"{param}.content")
            if role == "assistant":
                _assistants(messages)["content"].append(text)
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistants(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _text(item.get("output"), f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case "reasoning":
            thought = _text(item.get("content") or [], f"{param}.content", "reasoning_text")
            if thought:
                _assistants(messages).setdefault("reasoning_content", []).append(thought)
        case other:
            why = _REFUSED.get(str(other), "it must be message, function_call, function_call_output or reasoning")
            raise bad_value(f"{param}.type", f"Invalid value for '{param}.type': {why}.", "unsupported_value")


def _assistants(messages: list[Item]) -> Item:
    """The assistant's message at the end. Its texts are lists until all are there."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _text(content: Any, param: str, *kinds: str) -> str:
    """Raises `ApiError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value(param, f"'{param}' must be a string or a list of text parts.", "invalid_type")
    if len(content) > PARTS_MAX:
        raise bad_value(param, f"'{param}' may have at most {PARTS_MAX} parts.")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (kinds or _TEXTS) or not isinstance(part.get("text"), str):
            at = f"{param}[{number}]"
            why = _REFUSED.get(str(kind), "it must be a text part")
            raise bad_value(at, f"Invalid value for '{at}': {why}.", "unsupported_value")
        texts.append(part["text"])
    return "\n".join(texts)


def _format(asked: Item) -> Item:
    if asked.get("type") != "json_schema":
        return asked
    schema = {name: value for name, value in asked.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Item, param: str) -> Item:
    if tool.get("type") != "function":
        message = f"'{param}.type' must be \"function\": tools that this server would have to run are not supported."
        raise bad_value(f"{param}.type", message, "unsupported_value")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | Item | None) -> str | Item | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(tool) if isinstance(tool, dict) else tool for tool in choice["tools"][: TOOLS_MAX + 1]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice
