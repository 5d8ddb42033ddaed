"""Properties of a chat template: those that its text tells, and which content it shows."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class TemplateFacts:
    text: str = ""  # The text of all the model's templates, where it has several
    variables: frozenset[str] = frozenset()  # Names of the variables that the template expects from its caller
    response_template: dict[str, Any] | None = None  # the model's own description of its answers
    roles_in_parts: frozenset[str] = frozenset()  # Roles whose content the template reads as a list of parts only
    shows_system: bool = True
    hidden_roles: frozenset[str] = frozenset()  # Roles whose content the template drops without an error
    fault: str = ""  # Why the model cannot chat with this template; empty: it can

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.variables

    @property
    def thinks(self) -> bool:
        """Whether the model's answers may begin with a thought."""
        fields = (self.response_template or {}).get("fields", {})
        return "</think>" in self.text or bool({"thinking", "reasoning", "reasoning_content"} & fields.keys())


def template_facts(hf_tokenizer: Any) -> TemplateFacts:
    template = hf_tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    response = getattr(hf_tokenizer, "response_template", None)
    variables = frozenset().union(*map(_variables, texts))
    return TemplateFacts("\n".join(texts), variables, response if isinstance(response, dict) else None)


_MARK: Final = "crossdock 7f3a9c"
_USER: Final = {"role": "user", "content": "x"}
_CALL: Final = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}},
}
_CONVERSATIONS: Final[dict[str, list[Any]]] = {
    "user": [{"role": "user", "content": _MARK}],
    "system": [{"role": "system", "content": _MARK}, _USER],
    "assistant": [_USER, {"role": "assistant", "content": _MARK}, _USER],
    "tool": [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]},
             {"role": "tool", "tool_call_id": _CALL["id"], "name": "f", "content": _MARK}],
}  # fmt: skip
"""Role → a conversation in which a message of that role has the mark."""


class TemplateError(Exception):
    """The chat template does not take these messages; `str()` is for the user."""


def with_content_forms(facts: TemplateFacts, render: Callable[..., str]) -> TemplateFacts:
    """Adds what the template shows of each role's content, found by rendering a mark as a string and as a part. `render`
    is `ModelTokenizer.apply_template`."""
    in_parts, shown, hidden, fault = set[str](), set[str](), set[str](), ""
    for role, conversation in _CONVERSATIONS.items():
        for roles in (in_parts, in_parts | {role}):
            try:
                if _MARK in render(as_parts(conversation, roles), [_TOOL] if role == "tool" else None):
                    shown.add(role)
                    in_parts = roles
                    break
                if role != "tool" or facts.takes_tools:  # else results are told in the user's messages
                    hidden.add(role)
            except TemplateError as error:
                fault = fault or str(error)
        if not shown:
            fault = fault or "the model's chat template does not show the text of messages"
            return replace(facts, fault=fault)
    return replace(
        facts,
        roles_in_parts=frozenset(in_parts),
        shows_system="system" in shown,
        hidden_roles=frozenset(hidden - shown),
    )


def as_parts(messages: list[dict[str, Any]], roles: Collection[str]) -> list[dict[str, Any]]:
    """The messages with the content of these roles as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["role"] in roles else message
        for message in messages
    ]


def _variables(template: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        return frozenset(find_undeclared_variables(parsed))
    except TemplateError:  # transformers' own statements, like {% generation %}
        return frozenset(_NAMES.findall(template))
