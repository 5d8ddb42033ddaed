"""The forms in which models write tool calls and thoughts: how each form is recognised from the chat template, constrained and
read. Pure.

If a model comes with a response template for `transformers`, its answers are read with that template instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.structured.lark import Grammar
from gateway.text.regions import CALLS, THINKING, Region, Regions
from gateway.tools.request import Tool

THINK, END_OF_THOUGHT = "<think>", "</think>"
_THOUGHT: Final = Region(THINKING, (THINK,), (END_OF_THOUGHT,))


@dataclass(frozen=True, eq=False)
class CallFormat:
    """One form of tool calls."""

    name: str
    marks: tuple[str, ...]  # Marks that may be special tokens. They are kept in the text while an answer is read.
    regions: tuple[Region, ...]  # Where calls are
    opening: str  # The text that the first call begins with
    closing: str
    arguments: str  # The key of a call's arguments; empty: NAME[ARGS]{…}
    in_list: bool = False  # All calls stand in one JSON list behind one opening
    separator: str = ""  # The separator between two calls, where it is not white space

    def call(self, tool: Tool, grammar: Grammar) -> str:
        """Raises `SchemaError` and `TooLarge`."""
        schema = tool.parameters if tool.parameters is not None else {"type": "object"}
        arguments = grammar.json({**schema, "type": "object"}, strict=tool.strict, call=tool.name)
        if not self.arguments:
            return f"{grammar.literal(tool.name + '[ARGS]', own=True)} {arguments}"
        head = f'{{"name": "{tool.name}", "{self.arguments}": '
        return f"{grammar.literal(head)} {arguments} {grammar.literal('}')}"

    def required(self, tools: Sequence[Tool], grammar: Grammar, *, several: bool) -> str:
        """Calls and nothing else. Raises `SchemaError` and `TooLarge`."""
        opening = f"{grammar.literal(self.opening, own=True)} " if self.opening else ""
        one = grammar.rule(opening + self._body(tools, grammar, several=several))
        if not several or self.in_list:
            return one
        between = grammar.literal(self.separator, own=True) if self.separator else grammar.regex(r"\n{0,2}")
        return f"{one} ({between} {one})*"

    def optional(self, tools: Sequence[Tool], grammar: Grammar, *, several: bool) -> str:
        """Text, calls, or both. Raises `SchemaError` and `TooLarge`."""
        if not self.opening:
            # These calls have no mark. An answer that begins with a brace is a call, and any other answer is text.
            text = grammar.regex(r"([^{ \n](.|\n)*)?")
            return grammar.either([text, self.required(tools, grammar, several=several)])
        one = grammar.rule(f"{grammar.up_to(self.opening, own=True)} {self._body(tools, grammar, several=several)}")
        if not several or self.in_list:
            return grammar.either([one, grammar.any_text()])
        return f"{one}* {grammar.any_text()}"

    def _body(self, tools: Sequence[Tool], grammar: Grammar, *, several: bool) -> str:
        """The part that follows the opening."""
        call = grammar.either([self.call(tool, grammar) for tool in tools])
        if self.in_list:
            more = f" ({grammar.literal(', ')} {call})*" if several else ""
            return f"{grammar.literal('[')} {call}{more} {grammar.literal(']')}"
        if not self.closing:
            return call
        space = grammar.regex(r"[ \n]{0,4}")
        return f"{space} {call} {space} {grammar.literal(self.closing, own=True)}"


HERMES: Final = CallFormat(
    "hermes",
    ("<tool_call>", "</tool_call>"),
    (Region(CALLS, ("<tool_call>",), ("</tool_call>",)),),
    opening="<tool_call>",
    closing="</tool_call>",
    arguments="arguments",
)
LLAMA: Final = CallFormat(
    "llama",
    ("<|python_tag|>",),
    (Region(CALLS, ("<|python_tag|>",)), Region(CALLS, ())),
    opening="",
    closing="",
    arguments="parameters",
    separator="; ",
)
MISTRAL: Final = CallFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    (Region(CALLS, ("[TOOL_CALLS]",)),),
    opening="[TOOL_CALLS]",
    closing="",
    arguments="arguments",
    in_list=True,
)
MISTRAL_ARGS: Final = CallFormat(
    "mistral_args",
    ("[TOOL_CALLS]", "[ARGS]"),
    (Region(CALLS, ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),),
    opening="[TOOL_CALLS]",
    closing="",
    arguments="",
)


def format_of(template: str) -> CallFormat | None:
    """The form in which a model with this chat template writes calls; None: it is none of these."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and not any(mark in template for mark in ("<function=", "<arg_key>", "<parameter=")):
        return HERMES
    return LLAMA if "<|python_tag|>" in template else None


def regions_of(calls: CallFormat | None, *, thinks: bool, begun: bool = False) -> Regions:
    """`begun`: the prompt has begun a thought."""
    own = calls.regions if calls is not None else ()
    return Regions((_THOUGHT, *own) if thinks else own, _THOUGHT if begun else None)


def thought(grammar: Grammar, *, begun: bool) -> str:
    """The rule for text before the answer: the rest of a thought that the prompt has begun, or a whole one, or none."""
    space = grammar.regex(r"[ \n]{0,8}")
    rest = f"{grammar.up_to(END_OF_THOUGHT, own=True)} {space}"
    return grammar.rule(rest if begun else f"({grammar.literal(THINK, own=True)} {rest})?")
