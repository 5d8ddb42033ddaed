"""The form of an answer by its request: structured output, tool calls, thoughts. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gateway.http.errors import bad_value
from gateway.openai.request_types import ChatRequest, CompletionRequest, GenerationRequest
from gateway.structured.lark import NOTHING, Grammar, Relaxed, Schema, TooLarge, next_relaxed
from gateway.structured.request import WantedForm, wanted
from gateway.structured.schema import SchemaError
from gateway.text.regions import NO_REGIONS, Regions
from gateway.text.template_facts import TemplateError, TemplateFacts
from gateway.text.tokenizer import ModelTokenizer
from gateway.tools.conversation import (
    call_format,
    tells_in_words,
    template_messages,
    template_options,
    with_whole_calls,
)
from gateway.tools.formats import END_OF_THOUGHT, MISTRAL, MISTRAL_ARGS, THINK, CallFormat, regions_of, thought
from gateway.tools.reader import Reading, regions_of_template
from gateway.tools.request import Tools, tools_of
from proto import limits


@dataclass(frozen=True)
class Form:
    grammar: str = ""  # The grammar of the answer; empty: anything
    param: str = ""  # The field that asks for it
    reading: Reading | None = None  # None: the answer is text as it comes
    schemas: tuple[Schema, ...] = ()  # The schemas that the answer, or the calls in it, must match
    relaxed: Relaxed = NOTHING
    write: "Callable[[Relaxed], Form] | None" = None  # The same form with less of its schemas in the grammar

    def after(self, verdict: str) -> "Form":
        """The form to try next, since the grammar was refused. Raises `ApiError`."""
        left = next_relaxed(self.schemas, self.relaxed, verdict)
        if left is None or self.write is None:
            explained = next((text for one in self.schemas if (text := one.explained(verdict)) != verdict), verdict)
            raise bad_value(self.param, f"Invalid value for '{self.param}': {explained}.")
        return self.write(left)

    @property
    def checks(self) -> dict[str, Any]:
        """Schemas that are only partly in the grammar, so answers are checked against them. The key is the name of the called
        function, or "" for the answer itself."""
        return {one.call: one.schema for one in self.schemas if not one.is_whole}

    @property
    def regions(self) -> Regions:
        return self.reading.regions if self.reading is not None else NO_REGIONS

    @property
    def kept_tokens(self) -> frozenset[int]:
        """Special tokens that are text while the answer is read."""
        return self.reading.keep if self.reading is not None else frozenset()


ANY_FORM: Final = Form()


def completion_form(request: CompletionRequest, tokenizer: ModelTokenizer) -> Form:
    """Raises `ApiError`."""
    asked = wanted(_given(request))
    if asked is None:
        return ANY_FORM
    ignore_eos, keeps_special = bool(request.ignore_eos), request.skip_special_tokens is False

    def write(relaxed: Relaxed) -> Form:
        grammar = _grammar(tokenizer, relaxed, keeps_special)
        text = _checked(ignore_eos, tokenizer, grammar.text(asked.expression(grammar)), asked.param)
        return Form(text, asked.param, None, tuple(grammar.schemas), relaxed, write)

    return write(NOTHING)


def _grammar(tokenizer: ModelTokenizer, relaxed: Relaxed, keeps_special: bool) -> Grammar:
    split = partial(tokenizer.split_special, shown=not keeps_special)
    return Grammar(split, relaxed, split_own=tokenizer.split_special)


def _given(request: GenerationRequest) -> dict[str, Any]:
    return {name: value for name in request.model_fields_set if (value := getattr(request, name)) is not None}


def _checked(ignore_eos: bool, tokenizer: ModelTokenizer, grammar: str, param: str) -> str:
    """Raises `ApiError`."""
    if len(grammar) > limits.MAX_GRAMMAR_CHARS:
        message = f"'{param}' makes a grammar of more than {limits.MAX_GRAMMAR_CHARS} characters."
        raise bad_value(param, message)
    if ignore_eos:
        raise bad_value("ignore_eos", f"'ignore_eos' does not go with '{param}', which says where the answer ends.")
    if not tokenizer.facts.eos_ids:
        raise bad_value(param, f"'{param}' is not supported: the model has no token that ends an answer.")
    return grammar


@dataclass(frozen=True)
class Chat:
    """A chat request, as the model's template gets it."""

    request: ChatRequest
    facts: TemplateFacts
    tools: Tools | None
    wanted: WantedForm | None
    messages: list[dict[str, Any]]
    options: dict[str, Any]  # Options for the chat template

    @classmethod
    def of(cls, request: ChatRequest, facts: TemplateFacts) -> "Chat":
        """Raises `ApiError`."""
        fields = _given(request)
        tools, asked = tools_of(fields), wanted(fields)
        if tools is not None and tools.must_call:
            asked = None  # the form is of text, and a call that must be has none
        options = template_options(facts, request.chat_template_kwargs, request.reasoning_effort)
        return cls(request, facts, tools, asked, template_messages(request.messages, tools, facts), options)

    @property
    def described_tools(self) -> list[dict[str, Any]]:
        """The tools for a chat template that takes them; without those, they are in the messages."""
        if self.tools is None or not self.tools.allowed or tells_in_words(self.facts):
            return []
        return [tool.described() for tool in self.tools.offered]

    def rendered(self, tokenizer: ModelTokenizer) -> str:
        """The prompt's text. Raises `ApiError`."""
        if not tokenizer.has_chat_template:
            raise bad_value("messages", "The model has no chat template: use /v1/completions.")
        if self.facts.fault:
            raise bad_value("messages", f"The model cannot chat, use /v1/completions: {self.facts.fault}.")
        whole = with_whole_calls(self.messages)
        for messages in (self.messages, *([whole] if whole != self.messages else [])):
            try:
                return tokenizer.apply_template(messages, self.described_tools, **self.options)
            except TemplateError as error:
                refused = error
        raise bad_value("messages", f"{refused}.") from None

    @property
    def text_bytes(self) -> int:
        return sum(len(message["content"].encode()) for message in self.messages)

    def form(self, prompt: str, tokenizer: ModelTokenizer) -> Form:
        """Returns the form of the answer. `prompt` is the rendered text. It may end inside a thought, or with an empty
        thought. Raises `ApiError`."""
        end = prompt.rstrip()
        begun, thinks = end.endswith(THINK), self.facts.thinks and not end.endswith(END_OF_THOUGHT)
        calls = call_format(self.facts) if self.tools is not None and self.tools.allowed else None
        reading = self._reading(prompt, tokenizer, calls, begun=begun, thinks=thinks)
        keeps_special, ignore_eos = self.request.skip_special_tokens is False, bool(self.request.ignore_eos)
        tools, asked = self.tools, self.wanted

        def write(relaxed: Relaxed) -> Form:
            grammar = _grammar(tokenizer, relaxed, keeps_special)
            expression, param = _expression(tools, asked, grammar, calls)
            if not expression:
                return Form(reading=reading)
            if thinks:
                expression = f"{thought(grammar, begun=begun)} {expression}"
            text = _checked(ignore_eos, tokenizer, grammar.text(expression), param)
            return Form(text, param, reading, tuple(grammar.schemas), relaxed, write)

        return write(NOTHING)

    def _reading(
        self, prompt: str, tokenizer: ModelTokenizer, calls: CallFormat | None, *, begun: bool, thinks: bool
    ) -> Reading | None:
        own = self.facts.response_template
        offered = self.tools is not None and bool(self.tools.allowed)
        if not offered and not thinks:
            return None
        marks = [THINK, END_OF_THOUGHT, *(calls.marks if calls is not None else ())]
        keep = frozenset(found for mark in marks if (found := tokenizer.mark_id(mark)) is not None)
        ends = frozenset(found for found in [tokenizer.mark_id(END_OF_THOUGHT)] if found is not None)
        short_ids = calls in (MISTRAL, MISTRAL_ARGS)
        if own is not None:
            kept = tokenizer.special_ids - tokenizer.facts.eos_ids
            regions, tools = regions_of_template(own), tuple(self.described_tools)
            return Reading(regions, kept, ends, begun, own, prompt, short_ids=short_ids, tools=tools)
        return Reading(regions_of(calls, thinks=thinks, begun=begun), keep, ends, begun, short_ids=short_ids)


def _expression(
    tools: Tools | None, asked: WantedForm | None, grammar: Grammar, calls: CallFormat | None
) -> tuple[str, str]:
    """Returns (grammar expression of the answer after its thoughts, field that asks for it). An empty expression allows any
    text. Raises `ApiError`."""
    if tools is None or not tools.allowed:
        return (asked.expression(grammar), asked.param) if asked is not None else ("", "")
    if calls is None:
        if tools.must_call or asked is not None:
            message = "With this model's form of tool calls, they cannot be asked for, nor combined with another form."
            raise bad_value("tool_choice" if tools.must_call else "tools", message, "unsupported_value")
        return "", ""
    try:
        if tools.must_call:
            return calls.required(tools.allowed, grammar, several=tools.parallel), "tools"
        if asked is not None:
            required = calls.required(tools.allowed, grammar, several=tools.parallel)
            return grammar.either([asked.expression(grammar), required]), asked.param
        return calls.optional(tools.allowed, grammar, several=tools.parallel), "tools"
    except (SchemaError, TooLarge) as error:
        raise bad_value("tools", f"Invalid value for 'tools': {error}.") from None
