"""Splits a chat answer while it arrives into thoughts, text and tool calls. `gateway.text.regions` finds these parts. If the
model has its own response template, transformers' parser does."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.text.regions import CALLS, THINKING, Region, RegionParser, Regions
from gateway.tools.call_reader import CallBegun, CallReader

_THOUGHTS: Final = frozenset({"thinking", "reasoning", "reasoning_content"})


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    regions: Regions  # those of a model's own template, only if their marks are fixed texts
    keep: frozenset[int]  # Special tokens that are text here: the marks of calls and thoughts
    thought_ends: frozenset[int] = frozenset()  # the token that ends a thought, if it is one
    thought_begun: bool = False  # The prompt has begun one
    own: dict[str, Any] | None = None  # The model's response template: it says what the parts of a call are
    prefix: str = ""  # the prompt, for the model's response template: its end may begin the answer
    short_ids: bool = False  # Calls have short ids: Mistral's templates take nine letters and digits only
    tools: tuple[dict[str, Any], ...] = ()


@dataclass
class Parts:
    """The additions of one piece of an answer to each part of the message."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # Deltas, as OpenAI defines them

    def delta(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.content:
            found["content"] = self.content
        if self.calls:
            found["tool_calls"] = self.calls
        return found


class AnswerReader:
    """The reader of one choice."""

    def __init__(self, reading: Reading, seed: str) -> None:
        """`seed` names the choice among all: the ids of its calls are made of it."""
        self._reading = reading
        self._seed = seed
        self._has_calls = any(region.field == CALLS for region in reading.regions.all) or reading.own is not None
        self._parser: Any = RegionParser(reading.regions) if reading.own is None else _own_parser(reading, reading.own)
        self._unread = ""  # Text of a region of calls that is open, where the template reads it as a whole
        self._calls: CallReader | None = None
        self._parts = Parts()
        self._blank = {"content": True, "reasoning": True}  # only white space so far
        self._held = {"content": "", "reasoning": ""}
        self._raw: str | None = ""  # Text of the present region of calls; None once a call was found in it
        self.calls = 0
        self.ends_in_call = False  # the answer ended inside a call
        self.reasoning_tokens = 0
        self._thinking = reading.thought_begun

    def feed(self, text: str, tokens: Iterable[int] = (), *, ended: bool = False, cut: bool = False) -> Parts:
        """Read the next piece of the answer. `ended`: the answer is complete. `cut`: the model did not end it, so text that
        may begin a call counts as a call."""
        self._parts = Parts()
        was_thinking = self._thinking
        if self._parser is None:
            self._give("content", text)
        else:
            self._parse(text, ended=ended, cut=cut and self._has_calls)
        if ended and self._calls is not None:
            self._end_calls(cut=cut)
        self._count(list(tokens), was_thinking)
        return self._parts

    def _parse(self, text: str, *, ended: bool, cut: bool) -> None:
        unread = self._unread + text
        try:
            self._take(self._parser.feed(text))
            if ended and self._calls is not None:
                self.ends_in_call = self._reading.own is not None or not self._calls.is_between
            if ended and cut and self._calls is not None:
                self._end_calls(cut=True)
            elif ended and self._reading.own is None:
                self._take(self._parser.finish(cut=cut))
            elif ended and not cut:
                _, events = self._parser.finalize()
                self._take(events)
        except (ValueError, LookupError, RecursionError):
            # These calls do not match the model's template. Treat them and all text after them as content.
            self._parser = self._calls = None
            self._give("content", unread)
        else:
            self._unread = unread if self._reading.own is not None and self._calls is not None else ""

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "mark":
                continue
            if name == CALLS:
                self._take_calls(event)
            elif name in _THOUGHTS:
                self._thinking = kind != "region_close"
                if kind == "region_chunk":
                    self._give("reasoning", event["text"])
            elif kind == "region_chunk":
                self._give("content", event["text"])

    def _give(self, part: str, text: str) -> None:
        """Add text to a part. White space at the start is dropped. White space at the end of content is held back until more
        text comes, if calls are possible."""
        text = self._held[part] + text
        if self._blank[part]:
            text = text.lstrip()
        kept = text.rstrip() if part == "content" and self._has_calls else text
        self._held[part] = text[len(kept) :]
        self._blank[part] &= not kept
        if part == "content":
            self._parts.content += kept
        else:
            self._parts.reasoning += kept

    # --- calls ------------------------------------------------------------------------------------------------------------

    def _take_calls(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "region_open":
            self._calls, self._raw = CallReader(), ""
        elif self._reading.own is not None:
            if kind == "region_close":
                self._whole_calls(event["value"])
                self._calls = None
        elif kind == "region_chunk":
            assert self._calls is not None
            self._raw = None if self._raw is None else self._raw + event["text"]
            for found in self._calls.feed(event["text"]):
                self._raw = None
                if isinstance(found, CallBegun):
                    self._begin(found.name)
                elif self._parts.calls and self._parts.calls[-1]["index"] == self.calls - 1:
                    self._parts.calls[-1]["function"]["arguments"] += found.text
                else:
                    self._parts.calls.append({"index": self.calls - 1, "function": {"arguments": found.text}})
        else:
            self._end_calls()

    def _end_calls(self, *, cut: bool = False) -> None:
        raw = self._raw or ""
        if not cut or (raw.startswith("{") and not _may_be_call(raw)):
            self._give("content", raw)  # it was no call
        self._calls, self._raw = None, ""

    def _begin(self, name: str) -> None:
        digest = hashlib.blake2b(f"{self._seed} {self.calls}".encode(), digest_size=12).hexdigest()
        call_id = digest[:9] if self._reading.short_ids else f"call_{digest}"
        function = {"name": name, "arguments": ""}
        self._parts.calls.append({"index": self.calls, "id": call_id, "type": "function", "function": function})
        self.calls += 1

    def _whole_calls(self, value: Any) -> None:
        """Calls as the model's own template gives them."""
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, dict) else {}
            name, arguments = function.get("name"), function.get("arguments", function.get("parameters", {}))
            if isinstance(name, str):
                self._begin(name)
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                self._parts.calls[-1]["function"]["arguments"] = text

    # --- counting ---------------------------------------------------------------------------------------------------------

    def _count(self, tokens: list[int], was_thinking: bool) -> None:
        """Count the tokens of thoughts, including the marks around them. Count up to the token that ends a thought. If the
        piece has no such token, count all of its tokens."""
        if not (was_thinking or self._thinking or self._parts.reasoning):
            return
        last = next((at for at in range(len(tokens), 0, -1) if tokens[at - 1] in self._reading.thought_ends), None)
        self.reasoning_tokens += len(tokens) if self._thinking or last is None else last


def _may_be_call(raw: str) -> bool:
    """Whether the text begins as our grammars write calls."""
    head = '{"name": "'
    return raw.startswith(head) or head.startswith(raw)


def _own_parser(reading: Reading, template: dict[str, Any]) -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    # Make every field optional: an answer may end early, because of a token limit or a stop string.
    fields = {name: {**field, "optional": True} for name, field in template["fields"].items()}
    whole: Any = {**template, "fields": fields}
    return ResponseParser(whole, prefix=reading.prefix, tools=list(reading.tools) or None)


def regions_of_template(template: dict[str, Any]) -> Regions:
    """Returns the regions of a model's response template whose marks are fixed texts."""
    found = [
        Region(CALLS if name == CALLS else THINKING, opens, _texts(field.get("close")))
        for name, field in template["fields"].items()
        if name != "content" and (opens := _texts(field.get("open")))
    ]
    return Regions(tuple(found))


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
