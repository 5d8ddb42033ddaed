"""Tools of /v1/responses → those of chat. Pure.

Besides their functions, agents send tools that OpenAI runs or that only its models know. These tools are left out if functions
remain, since a model need not call a tool that it is offered. The answer's `tools` are those that were kept.
"""

from collections.abc import Iterator
from typing import Any, Final

from gateway.http.errors import bad_value
from gateway.openai.request_types import NAME_CHARS_MAX, TOOLS_MAX

Item = dict[str, Any]
_HINTS: Final = {"type", "defer_loading", "output_schema", "allowed_callers", "async"}


def kept(tools: list[Item] | None) -> list[Item]:
    """Functions, and namespaces that hold some."""
    found = [tool for tool in tools or () if tool.get("type") == "function"]
    return found + [tool for tool in tools or () if tool.get("type") == "namespace"]


def name_of(item: Item) -> Any:
    """Returns the name by which the model knows a function, or the function of a call. Functions in different namespaces may
    have the same name."""
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str) or not namespace:
        return name
    whole = f"{namespace}__{name}"
    return whole if len(whole) <= NAME_CHARS_MAX else name


def namespaces(tools: list[Item] | None) -> dict[str, Item]:
    """Name for the model → `name` and `namespace` of an answer's call, for functions in namespaces."""
    inside = [tool for _, tool in _functions(tools or []) if "namespace" in tool]
    return {name_of(tool): {"name": tool.get("name"), "namespace": tool["namespace"]} for tool in inside}


def places(tools: list[Item] | None) -> dict[str, str]:
    """Parameters of `chat_tools`, as regular expressions → those of the request, for errors."""
    return {rf"tools\[{at}\](\.function)?": param for at, (param, _) in enumerate(_functions(tools or []))}


def chat_tools(tools: list[Item]) -> list[Item]:
    """Raises `ApiError`."""
    if len(tools) > TOOLS_MAX:
        raise bad_value("tools", f"'tools' may hold at most {TOOLS_MAX} tools.")
    found = [_function(tool, param) for param, tool in _functions(tools)]
    if found:
        return found
    param = "tools[0].type"
    message = f"'{param}' must be \"function\": tools that this server would have to run are not supported."
    raise bad_value(param, message, "unsupported_value")


def _functions(tools: list[Item]) -> Iterator[tuple[str, Item]]:
    """(parameter, function), those in namespaces as well. Raises `ApiError`."""
    for number, tool in enumerate(tools):
        param = f"tools[{number}]"
        if tool.get("type") == "function":
            yield param, {name: value for name, value in tool.items() if name != "namespace"}
        elif tool.get("type") == "namespace":
            inner, name = tool.get("tools", []), tool.get("name")
            if not isinstance(name, str) or not isinstance(inner, list) or len(inner) > TOOLS_MAX:
                message = f"'{param}' must have a 'name', and 'tools', a list of at most {TOOLS_MAX} tools."
                raise bad_value(param, message, "invalid_type")
            for place, one in enumerate(inner):
                at = f"{param}.tools[{place}]"
                if not isinstance(one, dict):
                    raise bad_value(at, f"'{at}' must be an object.", "invalid_type")
                if one.get("type") == "function":
                    yield at, {**one, "namespace": name}


def _function(tool: Item, param: str) -> Item:
    """Raises `ApiError`."""
    callers = tool.get("allowed_callers") or ["direct"]
    for name, refused in (("async", bool(tool.get("async"))), ("allowed_callers", "direct" not in callers)):
        if refused:
            at = f"{param}.{name}"
            raise bad_value(at, f"'{at}' is not supported here: leave it out.", "unsupported_parameter")
    known = {name: value for name, value in tool.items() if name not in _HINTS and name != "namespace"}
    return {"type": "function", "function": {**known, "name": name_of(tool)}}
