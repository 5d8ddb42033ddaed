"""Tokens to text as they come, and stop strings. Pure.

A token may end in the middle of a character, so only text that later tokens cannot change is emitted. The prefix window is the
idea of Hugging Face TGI (`prefix_offset`, `read_offset`). The `DecodeStream` of `tokenizers` cannot emit the text that it
still holds at the end, and it raises if a decoder takes text back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.text.regions import CONTENT, NO_REGIONS, Event, RegionParser, Regions

Decode = Callable[[Sequence[int]], str]

_WINDOW_TOKENS_MAX = 24  # no character or word piece spans so many tokens
CONTEXT_TOKENS = 6  # Kept in front of new tokens, for decoders that treat the first token of a text in their own way
BROKEN = "�"
_HELD_MAX = 3  # tokens that wait for their character; a byte-fallback decoder shows a run of bytes as broken


class Detokenizer:
    """Decodes one text token by token. The results of all `push` calls and of `finish`, joined, are the decoding of the whole
    text, behind the text that it continues."""

    def __init__(self, decode: Decode, special_ids: frozenset[int], behind: Sequence[int] = ()) -> None:
        """`behind`: the last tokens of the text that this one continues, without special tokens."""
        self._decode = decode
        self._special_ids = special_ids
        self._window = list(behind)
        text = decode(self._window) if behind else ""
        self._given = len(text.rstrip(BROKEN))  # Characters of the window's text already given out
        self._undecided = text if self._given < len(text) else ""  # until new tokens complete its last character
        self._broken_tokens = 0  # Tokens since the text last ended in a whole character

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        if token in self._special_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text.rstrip(BROKEN))
        self._broken_tokens = self._broken_tokens + 1 if certain < len(text) else 0
        if self._broken_tokens > _HELD_MAX:
            certain = max(certain, len(text) - _HELD_MAX)
        if self._undecided and certain > self._given:
            self._decide(text)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._window) >= _WINDOW_TOKENS_MAX and not 1 <= self._broken_tokens <= _HELD_MAX:
            self._shrink(text)
        return new

    def finish(self) -> str:
        """The rest of the text, broken characters included."""
        text = self._decode(self._window)
        self._decide(text)
        return text[self._given :]

    def _decide(self, text: str) -> None:
        """A broken character that new tokens did not complete belongs to the text before."""
        if text.startswith(self._undecided):
            self._given = max(self._given, len(self._undecided))
        self._undecided = ""

    def _shrink(self, text: str) -> None:
        """Remove the window's oldest tokens at a place where the rest still decodes to the same text, so not inside a
        character."""
        whole = self._given == len(text)
        for cut in range(len(self._window) - CONTEXT_TOKENS, len(self._window)):
            right = self._decode(self._window[cut:])
            if whole:
                # Some decoders strip the first space, so the context may decode to a shorter text than before. Only its length
                # is used.
                fits, given = bool(right) and text.endswith(right), len(right)
            else:
                # A broken character, perhaps to be completed, is at the end: left and right must read as before.
                left = self._decode(self._window[:cut])
                fits, given = left + right == text and len(left) <= self._given, self._given - len(left)
            if fits:
                self._window, self._given = self._window[cut:], given
                return


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`keeps_stop`: a stop string that is found is part of the text."""
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.found = ""  # The stop string that ended the text; empty: none yet

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string; sets `found` where one is complete."""
        assert not self.found
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # Take the stop string that ends first, so that the answer does not depend on how the text was cut into pieces.
            end, at, self.found = min(found)
            self._held = ""
            return text[: end if self._keeps_stop else at]
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that starts `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str
    stop: str = ""  # The stop string that it ends with; empty: none


class Assembler:
    """One choice's text: detokenized, and cut at the first stop string of its content. There is none in thoughts and calls."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
        regions: Regions = NO_REGIONS,
    ) -> None:
        """`min_tokens`: stop strings are looked for only after this many tokens. `regions`: parts of the text that are not
        searched for them."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, keeps_stop=keeps_stop)
        self._parser = RegionParser(regions if stops else NO_REGIONS)
        self._unmatched = min_tokens

    def push(self, token: int) -> TextPiece:
        new, armed = self._detokenizer.push(token), not self._unmatched
        self._unmatched -= not armed
        return TextPiece(self._matched(self._parser.feed(new), armed=armed) if new else "", self._matcher.found)

    def finish(self) -> TextPiece:
        text = self._matched(self._parser.feed(self._detokenizer.finish()))
        if not self._matcher.found:
            text += self._matched(self._parser.finish())
        return TextPiece(text if self._matcher.found else text + self._matcher.finish(), self._matcher.found)

    def _matched(self, events: list[Event], *, armed: bool = True) -> str:
        """The text that is certain to come before any stop string. `armed`: stop strings are looked for in it."""
        found = ""
        for event in events:
            text = event.get("text", "")
            if event["field"] == CONTENT and armed:
                found += self._matcher.push(text)
                if self._matcher.found:
                    break
            else:
                found += self._matcher.finish() + text
        return found
