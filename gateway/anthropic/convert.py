"""A request to /v1/messages → one to /v1/chat/completions. Pure."""

from typing import Any, Final

import msgspec

from gateway.anthropic.types import CountRequest, MessagesRequest, OutputConfig
from gateway.http.errors import bad_value
from gateway.openai.renamed import renamed
from gateway.openai.request_types import PARTS_MAX, ChatRequest, validate

Json = dict[str, Any]
NAMES: Final = {
    "messages.*": "messages",  # there are more or fewer of them
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    "reasoning_effort": "output_config.effort",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}
"""Fields of chat, and what they are made of here."""
_SAME: Final = ("model", "temperature", "top_p", "top_k", "stream")
_TOOL_FIELDS: Final = {"type", "name", "description", "input_schema", "strict", "cache_control"}
_ASKING_FOR_NOTHING: Final[tuple[Any, ...]] = (None, False, [], ["direct"])
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
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
    if request.output_config is not None:
        fields |= _output(request.output_config)
    if request.thinking is not None and request.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    with renamed(NAMES):
        return validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _output(asked: OutputConfig) -> Json:
    found: Json = {} if asked.effort is None else {"reasoning_effort": asked.effort}
    if asked.format is not None:
        schema = {"name": "output", "schema": asked.format.schema_, "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found


def _add(messages: list[Json], message: Json, param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant") or set(message) - {"role", "content"}:
        why = "a message has a 'role', user or assistant, and a 'content'"
        raise bad_value(f"{param}.role", f"Invalid value for '{param}': {why}.")
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
    """Of a string, or of text blocks. `cache_control` of a block is a hint that nothing depends on. Raises `ApiError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value(param, f"'{param}' must be a string or a list of text blocks.", "invalid_type")
    if len(content) > PARTS_MAX:
        raise bad_value(param, f"'{param}' may have at most {PARTS_MAX} blocks.")
    texts = []
    for number, block in enumerate(content):
        at = f"{param}[{number}]"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _refused(block.get("type") if isinstance(block, dict) else None, at)
        texts.append(_block_text(block, at))
    return "\n".join(texts)


def _tool(tool: Json, param: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        message = f"'{param}.type' must be \"custom\": tools that this server would have to run are not supported."
        raise bad_value(f"{param}.type", message, "unsupported_value")
    for key in tool.keys() - _TOOL_FIELDS:
        if tool[key] not in _ASKING_FOR_NOTHING:
            name = f"{param}.{key[:100]}"
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
    elif kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise bad_value("tool_choice.type", "'tool_choice.type' must be auto, any, none or tool.", "unsupported_value")
    one = choice.get("disable_parallel_tool_use")
    return {"tool_choice": chosen} | ({} if one is None else {"parallel_tool_calls": not one})
