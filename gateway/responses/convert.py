"""A request to /v1/responses → one to /v1/chat/completions. Pure."""

from typing import Any, Final

import msgspec

from gateway.http.errors import bad_value, renamed
from gateway.openai.request_types import PARTS_MAX, TOOLS_MAX, ChatRequest, SharedFields, validate
from gateway.responses.tools import chat_tools, name_of
from gateway.responses.types import ResponsesRequest

Item = dict[str, Any]
NAMES: Final = {
    "messages.*": "input",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}  # Fields of chat, and what they are made of here
_SAME: Final = (*SharedFields.model_fields, "parallel_tool_calls", "chat_template_kwargs")
_TEXTS: Final = ("input_text", "output_text", "text")
_CALLS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
    "custom_tool_call": ("", "input"),
}  # calls of clients' tools without `arguments`: the tool's name, and the field of its input
_RESULTS: Final = {
    "function_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "custom_tool_call_output": "output",
    "tool_search_output": "tools",
}
_DROPPED: Final = ("web_search_call", "mcp_list_tools")  # calls that another server ran, without results
_SYSTEM: Final = ("system", "developer")
_REFUSED: Final = {
    "input_image": "images are not supported: this server reads text",
    "input_audio": "audio is not supported: this server reads text",
    "input_file": "files are not supported: send their text",
    "compaction": "only the server that wrote it can read it; send the conversation's items",
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
        fields["tools"] = chat_tools(request.tools)
    fields["tool_choice"] = _choice(request.tool_choice)
    with renamed(NAMES):
        return validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _add(messages: list[Item], item: Item, param: str) -> None:
    """Add one item after the messages before it. Successive calls and thoughts go into one message of the assistant."""
    match item.get("type", "message"):
        case "message":
            role, text = item.get("role"), _text(item.get("content"), f"{param}.content")
            if role == "assistant":
                _assistants(messages)["content"].append(text)
            elif role in _SYSTEM and messages and messages[-1]["role"] in _SYSTEM:
                messages[-1]["content"] += f"\n\n{text}"  # many chat templates know one at most
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            _call(messages, item, name_of(item), item.get("arguments"))
        case str(kind) if kind in _CALLS:
            name, field = _CALLS[kind]
            given = {field: item.get(field)} if kind == "custom_tool_call" else item.get(field) or {}
            arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
            _call(messages, item, name or name_of(item), arguments)
        case str(kind) if kind in _RESULTS:
            field = _RESULTS[kind]
            result = item.get(field)
            if kind != "function_call_output" and not isinstance(result, str) and not _is_text(result):
                result = msgspec.json.encode(result).decode()
            content = _text(result, f"{param}.{field}")
            messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": content})
        case "reasoning":
            thought = _text(item.get("content") or [], f"{param}.content", "reasoning_text")
            if thought:
                _assistants(messages).setdefault("reasoning_content", []).append(thought)
        case kind if kind in _DROPPED:
            pass
        case other:
            why = _REFUSED.get(str(other), "it must be message, function_call, function_call_output or reasoning")
            raise bad_value(f"{param}.type", f"Invalid value for '{param}.type': {why}.", "unsupported_value")


def _is_text(parts: Any) -> bool:
    return isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") in _TEXTS for part in parts)


def _call_id(item: Item) -> Any:
    return item.get("call_id") or item.get("id")


def _call(messages: list[Item], item: Item, name: Any, arguments: Any) -> None:
    call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistants(messages).setdefault("tool_calls", []).append(call)


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
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
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


def _choice(choice: str | Item | None) -> str | Item | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": name_of(choice)}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(tool) if isinstance(tool, dict) else tool for tool in choice["tools"][: TOOLS_MAX + 1]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice
