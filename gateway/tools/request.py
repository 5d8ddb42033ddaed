"""`tools`, `tool_choice` and `parallel_tool_calls` of a request. Pure."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.http.errors import bad_value
from gateway.http.json_text import values_bytes

TOOLS_MAX: Final = 512  # OpenAI takes 128. Anthropic's clients send more, as soon as some MCP servers are configured.
TOOLS_BYTES_MAX: Final = 16 << 20  # schemas of all tools in memory; chat templates write them in one blocking step
NAME_CHARS_MAX: Final = 128  # Anthropic's bound; OpenAI's is 64. The names of MCP tools are long.
_NAME: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{NAME_CHARS_MAX}}}")
_TYPES: Final = (
    ("description", str, "a string"),
    ("parameters", dict, "a JSON schema"),
    ("strict", bool, "true or false"),
)
_FUNCTION_FIELDS: Final = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any] | None  # A JSON schema; None: any object
    strict: bool

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        parameters = self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools that the model may, or must, call."""

    offered: tuple[Tool, ...]  # All that the model is told of
    allowed: tuple[Tool, ...]  # Those that it may call; none with `tool_choice` "none"
    must_call: bool
    parallel: bool  # Several in one answer


def tools_of(fields: dict[str, Any]) -> Tools | None:
    """None: there are no tools. `fields` has the request's, without those that are None. Raises `ApiError`."""
    choice, parallel = fields.get("tool_choice"), fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise bad_value("parallel_tool_calls", "'parallel_tool_calls' must be true or false.", "invalid_type")
    value = fields.get("tools", [])
    if not isinstance(value, list):
        raise bad_value("tools", "'tools' must be a list.", "invalid_type")
    if not value:
        if choice not in (None, "none", "auto"):
            raise bad_value("tool_choice", "'tool_choice' asks for a call, and there are no 'tools'.")
        return None
    if len(value) > TOOLS_MAX:
        raise bad_value("tools", f"'tools' may hold at most {TOOLS_MAX} tools.")
    if values_bytes(msgspec.json.encode(value)) > TOOLS_BYTES_MAX:
        raise bad_value("tools", f"'tools' has too many values: they would take more than {TOOLS_BYTES_MAX} bytes.")
    offered = tuple(_tool(one, f"tools[{number}]") for number, one in enumerate(value))
    for name, count in Counter(tool.name for tool in offered).items():
        if count > 1:
            raise bad_value("tools", f"'tools' has two functions of the name {name!r}.")
    allowed, must_call = _chosen(choice, offered)
    # A function that is named is called once, as OpenAI does.
    several = parallel is not False and _named(choice) is None
    return Tools(offered, allowed, must_call, several)


def _tool(value: Any, param: str) -> Tool:
    if not isinstance(value, dict):
        raise bad_value(param, f"'{param}' must be an object.", "invalid_type")
    if value.get("type") != "function":
        message = f"'{param}.type' must be \"function\": tools that this server would have to run are not supported."
        raise bad_value(f"{param}.type", message, "unsupported_value")
    _only(value, {"type", "function", "cache_control"}, param)  # the last is a hint
    param = f"{param}.function"
    function = value.get("function")
    if not isinstance(function, dict):
        raise bad_value(param, f"'{param}' must be an object.", "invalid_type")
    _only(function, _FUNCTION_FIELDS, param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_value(
            f"{param}.name", f"'{param}.name' must be 1 to {NAME_CHARS_MAX} letters, digits, underscores, dashes."
        )
    for key, kind, words in _TYPES:
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise bad_value(f"{param}.{key}", f"'{param}.{key}' must be {words}.", "invalid_type")
    types = parameters.get("type", "object") if parameters else "object"
    if "object" not in (types if isinstance(types, list) else [types]):
        raise bad_value(f"{param}.parameters", f"'{param}.parameters' must be the schema of an object.")
    return Tool(name, function.get("description") or "", parameters, bool(function.get("strict")))


def _chosen(choice: Any, offered: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bool]:
    """(allowed, must_call)"""
    if choice is None or choice == "auto":
        return offered, False
    if choice == "none":
        return (), False
    if choice == "required":
        return offered, True
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, offered)
    name = _named(choice)
    if name is None:
        message = '\'tool_choice\' must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}.'
        raise bad_value("tool_choice", message, "invalid_type")
    return _of_name(name, offered), True


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function" or choice.keys() - {"type", "function"}:
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) and function.keys() == {"name"} else None
    return name if isinstance(name, str) else None


def _allowed(choice: dict[str, Any], offered: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], bool]:
    content = choice.get("allowed_tools")
    if not isinstance(content, dict) or content.get("mode") not in ("auto", "required"):
        message = '\'tool_choice.allowed_tools.mode\' must be "auto" or "required".'
        raise bad_value("tool_choice.allowed_tools", message)
    tools = content.get("tools")
    names = [_named(one) for one in tools] if isinstance(tools, list) and len(tools) <= TOOLS_MAX else []
    if not names or None in names:
        raise bad_value("tool_choice.allowed_tools", "'tool_choice.allowed_tools.tools' must be a list of functions.")
    allowed = tuple(tool for name in dict.fromkeys(names) for tool in _of_name(str(name), offered))
    return allowed, content["mode"] == "required"


def _of_name(name: str, offered: tuple[Tool, ...]) -> tuple[Tool, ...]:
    found = tuple(tool for tool in offered if tool.name == name)
    if not found:
        raise bad_value("tool_choice", f"'tool_choice' names a function that is not in 'tools': {name[:64]!r}.")
    return found


def _only(value: dict[str, Any], known: set[str], param: str) -> None:
    for key in value.keys() - known:
        name = f"{param}.{key[:100]}"
        raise bad_value(name, f"Unknown parameter: '{name}'.", "unknown_parameter")
