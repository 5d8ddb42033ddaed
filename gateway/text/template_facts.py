"""Properties of a chat template that are known without running it."""

import re
from dataclasses import dataclass
from typing import Any

_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class TemplateFacts:
    text: str = ""
    """The text of all the model's templates, where it has several."""
    variables: frozenset[str] = frozenset()
    """Names of the variables that the template expects from its caller."""
    response_template: dict[str, Any] | None = None
    """The model's own description of its answers, from which transformers reads them; None if it has none."""

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


def _variables(template: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        return frozenset(find_undeclared_variables(parsed))
    except TemplateError:  # transformers' own statements, like {% generation %}
        return frozenset(_NAMES.findall(template))
