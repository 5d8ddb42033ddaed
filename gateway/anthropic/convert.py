"""A request to /v1/messages → one to /v1/chat/completions. Pure."""

from typing import Any, Final

import msgspec

from gateway.anthropic.types import CountRequest, MessagesRequest, OutputConfig, OutputFormat
from gateway.http.errors import bad_value, renamed
from gateway.openai.request_types import PARTS_MAX, ChatRequest, validate

Json = dict[str, Any]
NAMES: Final = {
    "messages.*": "messages",  # there are more or fewer of them
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",  # or `output_format`
    "reasoning_effort": "output_config.effort",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}  # Maps fields of a chat request to the fields of this API from which they are made
_SAME: Final = ("model", "temperature", "top_p", "top_k", "stream")
_TOOL_FIELDS: Final = {"type", "name", "description", "input_schema", "strict"}
_TOOL_HINTS: Final = {
    "cache_control": dict,
    "eager_input_streaming": bool,
    "defer_loading": bool,
    "input_examples": list,
}  # checked, without effect: each tool is shown, and its arguments are streamed as they come
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS: Final = {"disabled": "none", "enabled": "high"}  # what `thinking` stands for; Anthropic's own is high
_REFUSED: Final = {
    "image": "images are not supported: this server reads text",
    "document": "documents are not supported: send their text",
    "audio": "audio is not supported: this server reads text",
}


def as_chat(request: CountRequest) -> ChatRequest:
    """Raises `ApiError`."""
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for number, message in enumerate(request.messages):
        _add(messages, message, f"messages[{number}]")
    if messages[-1]["role"] == "assistant":
        why = "The last message must be the user's: an answer whose beginning is given is not supported."
        raise bad_value("messages", why, "unsupported_value")
    fields: Json = {name: getattr(request, name, None) for name in _SAME} | {"messages": messages}
    if isinstance(request, MessagesRequest):
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
        fields["user"] = request.metadata and request.metadata.user_id
    else:
        fields["max_completion_tokens"] = 1
    if request.tools:
        fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        fields |= _choice(request.tool_choice)
    if request.thinking is not None and request.thinking.type in _EFFORTS:
        fields["reasoning_effort"] = _EFFORTS[request.thinking.type]
    asked = request.output_config or OutputConfig()
    fields |= _output(asked.format or request.output_format, asked.effort, fields.get("reasoning_effort"))
    with renamed(NAMES):
        return validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _output(asked: OutputFormat | None, effort: str | None, of_thinking: str | None) -> Json:
    """An `effort` overrides the effort that `thinking` stands for, except that `thinking` "disabled" overrides `effort`."""
    found: Json = {"reasoning_effort": of_thinking if of_thinking == "none" else effort or of_thinking}
    if asked is not None:
        schema = {"name": "output", "schema": asked.schema_, "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found


def _add(messages: list[Json], message: Json, param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        messages.append({"role": role, "content": _text(content, f"{param}.content")})
        return
    if role not in ("user", "assistant"):
        why = "a message has a 'role', user, assistant or system, and a 'content'"
        raise bad_value(f"{param}.role", f"Invalid value for '{param}.role': {why}.", "unsupported_value")
    for name in message.keys() - {"role", "content"} if role == "user" else ():  # an answer has more than the two
        at = f"{param}.{name[:100]}"
        raise bad_value(at, f"Unknown parameter: '{at}'.", "unknown_parameter")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise bad_value(f"{param}.content", f"'{param}.content' must be a string or a list of blocks.", "invalid_type")
    if len(content) > PARTS_MAX:
        raise bad_value(f"{param}.content", f"'{param}.content' may have at most {PARTS_MAX} blocks.")
    texts: list[str] = []
    thoughts: list[str] = []
    own: Json = {"role": role, "content": ""}
    for number, block in enumerate(content):
        at = f"{param}.content[{number}]"
        match (block.get("type"), role):
            case ("text", _):
                texts.append(_block_text(block, at))
            case ("tool_use", "assistant"):
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                function = {"name": block.get("name"), "arguments": arguments}
                call = {"id": block.get("id"), "type": "function", "function": function}
                own.setdefault("tool_calls", []).append(call)
            case ("tool_result", "user"):
                result = _text(block.get("content") or "", f"{at}.content")
                if block.get("is_error") is True:
                    result = f"Error: {result}"  # chat templates have no field for it
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case ("thinking", "assistant"):
                thought = block.get("thinking")
                if not isinstance(thought, str):
                    raise bad_value(f"{at}.thinking", f"'{at}.thinking' must be a string.", "invalid_type")
                thoughts.append(thought)
            case ("redacted_thinking", "assistant"):
                pass  # only the server that wrote the block can read it
            case (kind, _):
                raise _refused(kind, at)
    own["content"] = "\n".join(texts)
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    if texts or len(own) > 2 or role == "assistant":
        messages.append(own)


def _refused(kind: Any, at: str) -> Exception:
    why = _REFUSED.get(str(kind), "this kind of block is not supported here")
    return bad_value(f"{at}.type", f"Invalid value for '{at}.type': {why}.", "unsupported_value")


def _block_text(block: Json, at: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise bad_value(f"{at}.text", f"'{at}.text' must be a string.", "invalid_type")
    return text


def _text(content: Any, param: str) -> str:
    """The text of a string, or of text blocks. `cache_control` of a block is a hint that nothing depends on. Raises
    `ApiError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value(param, f"'{param}' must be a string or a list of text blocks.", "invalid_type")
    if len(content) > PARTS_MAX:
        raise bad_value(param, f"'{param}' may have at most {PARTS_MAX} blocks.")
    texts = []
    for number, block in enumerate(content):
        at = f"{param}[{number}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(_block_text(block, at))
            case "search_result" if param.startswith("messages"):
                texts += [f"{block.get('title')} ({block.get('source')})", _text(block.get("content"), f"{at}.content")]
            case "tool_reference" if param.startswith("messages"):
                texts.append(f"The tool {block.get('tool_name')} can be called.")
            case kind:
                raise _refused(kind, at)
    return "\n".join(texts)


def _tool(tool: Json, param: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        message = f"'{param}.type' must be \"custom\": tools that this server would have to run are not supported."
        raise bad_value(f"{param}.type", message, "unsupported_value")
    for key in tool.keys() - _TOOL_FIELDS:
        name, value = f"{param}.{key[:100]}", tool[key]
        if key in _TOOL_HINTS and not isinstance(value, _TOOL_HINTS[key] | None):
            kind = _TOOL_HINTS[key].__name__
            raise bad_value(name, f"Invalid value for '{name}': it must be of the type {kind}.", "invalid_type")
        may_call = key == "allowed_callers" and isinstance(value, list) and "direct" in value
        if not (key in _TOOL_HINTS or may_call or value is None or value is False or value == []):
            raise bad_value(name, f"'{name}' is not supported here: leave it out.", "unsupported_parameter")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    if "strict" in tool:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choice(choice: Json) -> Json:
    """`tool_choice` and `parallel_tool_calls`."""
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise bad_value("tool_choice.type", "'tool_choice.type' must be auto, any, none or tool.", "unsupported_value")
    one = choice.get("disable_parallel_tool_use")
    return {"tool_choice": chosen} | ({} if one is None else {"parallel_tool_calls": not one})
