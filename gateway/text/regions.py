"""Finds the regions of an answer's text while it arrives: thoughts, calls and the content between them. Pure.

The events are those of transformers' `ResponseParser`, and also contain the marks. Only fixed marks are supported, and the
time is linear. A mark inside a JSON string of a call is part of the string.
"""

from dataclasses import dataclass
from typing import Any, Final

CONTENT: Final = "content"
CALLS: Final = "tool_calls"
THINKING: Final = "thinking"
Event = dict[str, Any]


@dataclass(frozen=True)
class Region:
    field: str
    open: tuple[str, ...]  # marks that open it; none: a brace at the answer's start does
    close: tuple[str, ...] = ()  # marks that end it; none: the answer's end. One in `open` too opens the next.


@dataclass(frozen=True)
class Regions:
    """The regions that answers of one form can have."""

    all: tuple[Region, ...]
    begun: Region | None = None  # The region that the prompt has already opened, if any


NO_REGIONS: Final = Regions(())


class RegionParser:
    """The parser of one answer."""

    def __init__(self, regions: Regions) -> None:
        self._marked = [region for region in regions.all if region.open]
        self._bare = next((region for region in regions.all if not region.open), None)
        self._region = regions.begun
        self._in_string = self._escaped = False
        self._held = ""  # Text that is held back because it may be the start of a mark
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Returns the events that this text makes certain. Each has `type` and `field`. All but the starts and ends of regions
        also have `text`."""
        self._events = []
        self._held += text
        while self._held and self._step():
            pass
        return self._events

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Returns the events of the answer's end. `cut`: the answer was cut off, so an incomplete mark at its end counts as a
        mark."""
        self._events = []
        held, self._held = self._held, ""
        if held and cut:
            self._emit("mark", self._region.field if self._region else CONTENT, held)
        elif held:
            self._chunk(held)
        self._close()
        return self._events

    # --- steps --------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Process the next piece of the held text. Returns whether another step is possible without more text."""
        if self._region is not None:
            return self._inside(self._region)
        if self._bare is not None and (blank := len(self._held) - len(self._held.lstrip())):
            self._chunk(self._take(blank))
            return True
        if self._bare is not None and self._held[0] == "{":
            self._open(self._bare, "")
            return True
        self._bare = self._bare if _may_be(self._held, self._opening) else None
        return self._outside()

    @property
    def _opening(self) -> list[str]:
        return [mark for region in self._marked for mark in region.open]

    def _outside(self) -> bool:
        found = [(at, -len(mark), mark, region) for region in self._marked for mark in region.open
                 if (at := self._held.find(mark)) >= 0]  # fmt: skip
        if not found:
            self._chunk(self._take(len(self._held) - _overlap(self._held, self._opening)))
            return False
        at, _, mark, region = min(found, key=lambda one: one[:2])
        self._chunk(self._take(at))
        self._open(region, self._take(len(mark)))
        return True

    def _inside(self, region: Region) -> bool:
        at = self._end_of(region) if region.field == CALLS else self._plain_end_of(region)
        self._chunk(self._take(at))
        mark = next((mark for mark in region.close if self._held.startswith(mark)), None)
        if mark is None:
            return False
        if mark not in region.open:
            self._emit("mark", region.field, self._take(len(mark)))
        self._close()
        return True

    def _plain_end_of(self, region: Region) -> int:
        """Returns where a mark begins that ends the region, or where the start of such a mark may be."""
        found = [at for mark in region.close if (at := self._held.find(mark)) >= 0]
        return min(found) if found else len(self._held) - _overlap(self._held, region.close)

    def _end_of(self, region: Region) -> int:
        """Returns the same as `_plain_end_of`, but ignores marks inside JSON strings."""
        for at, char in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif any(mark[0] == char for mark in region.close):
                rest = self._held[at : at + max(map(len, region.close))]
                if any(rest.startswith(mark) or mark.startswith(rest) for mark in region.close):
                    return at
        return len(self._held)

    # --- events -------------------------------------------------------------------------------------------------------

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _emit(self, kind: str, field: str, text: str) -> None:
        self._events.append({"type": kind, "field": field, "text": text})

    def _chunk(self, text: str) -> None:
        if text:
            self._emit("region_chunk", self._region.field if self._region else CONTENT, text)

    def _open(self, region: Region, mark: str) -> None:
        self._region, self._bare = region, None
        self._in_string = self._escaped = False
        self._emit("mark", region.field, mark)
        self._events.append({"type": "region_open", "field": region.field})

    def _close(self) -> None:
        if self._region is not None:
            self._events.append({"type": "region_close", "field": self._region.field})
        self._region = None


def _overlap(text: str, marks: "list[str] | tuple[str, ...]") -> int:
    """Length of the longest end of `text` that begins a mark."""
    longest = max(map(len, marks), default=1) - 1
    tail = text[-longest:] if longest else ""
    return next((len(tail) - at for at in range(len(tail)) if any(mark.startswith(tail[at:]) for mark in marks)), 0)


def _may_be(text: str, marks: list[str]) -> bool:
    """Whether the text begins a mark."""
    return any(mark.startswith(text) for mark in marks)
