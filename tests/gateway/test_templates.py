"""Chat templates come with models: they see the messages and nothing else, and what they do wrong is a 400."""

import pytest

from gateway.text import tokenizer as tokenizers
from gateway.text.tokenizer import TemplateError
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
