"""Finds lost, repeated and changed tokens in the answers that users got under faults. Pure.

An answer is compared with the one that the same request got undisturbed, by token ids or, where the server sends none, by
characters.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from launcher.load.figures import tails
from launcher.load.records import INTERRUPTED, OK, RequestRecord

AGREEING: Final = 16
"""Tokens or characters that must agree after a difference, for the rest to count as the same answer."""
START_S: Final = 1.0  # after a kill, in which a gap that it causes begins
KINDS: Final = ("greedy", "seeded")
_ID: Final = re.compile(r"\b(?=[\w-]*\d)[\w-]{12,}")


@dataclass
class AnswerDifference:
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    cut_off: int = 0  # that were missing at the end of a stream that failed


def difference(expected: Sequence[Any], seen: Sequence[Any], *, whole: bool) -> AnswerDifference:
    """Compares an answer with the expected one. `whole`: its stream ended well, so that a missing end is lost."""
    found = AnswerDifference()
    at = seen_at = 0
    while at < len(expected) and seen_at < len(seen):
        if expected[at] == seen[seen_at]:
            at, seen_at = at + 1, seen_at + 1
            continue
        what, count = _next_difference(expected[at:], seen[seen_at:], seen[:seen_at], whole=whole)
        setattr(found, what, getattr(found, what) + count)
        at += count if what != "repeated" else 0
        seen_at += count if what != "lost" else 0
    if surplus := seen[seen_at:]:
        what = "repeated" if _repeats(seen[:seen_at], surplus) else "changed"
        setattr(found, what, getattr(found, what) + len(surplus))
    missing = len(expected[at:])
    found.lost += missing if whole else 0
    found.cut_off = 0 if whole else missing
    return found


def _next_difference(
    expected: Sequence[Any], seen: Sequence[Any], before: Sequence[Any], *, whole: bool
) -> tuple[str, int]:
    """Returns the smallest difference after which the two agree; all the rest is changed if there is none."""
    for count in range(1, max(len(expected), len(seen))):
        if _agree(expected, seen[count:], whole=whole) and _repeats(before, seen[:count]):
            return "repeated", count
        if _agree(expected[count:], seen, whole=whole):
            return "lost", count
        if _agree(expected[count:], seen[count:], whole=whole):
            return "changed", count
    return "changed", max(len(expected), len(seen)) if whole else len(seen)


def _agree(expected: Sequence[Any], seen: Sequence[Any], *, whole: bool) -> bool:
    """Whether the two begin alike for long enough, or are alike to the end."""
    length = min(AGREEING, len(seen))
    if length < AGREEING and whole and len(expected) != len(seen):
        return False
    return length > 0 and expected[:length] == seen[:length]


def _repeats(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) >= len(after) and before[len(before) - len(after) :] == after


@dataclass
class PlayedStream:
    """One request of the run, and the answer it got."""

    number: int  # of the request that it repeats
    record: RequestRecord
    text: str = ""
    ids: list[int] = field(default_factory=list)

    def add(self, text: str, ids: list[int]) -> None:
        self.text += text
        self.ids += ids

    def answer(self, *, by_ids: bool) -> Sequence[Any]:
        return self.ids if by_ids else self.text

    @property
    def kind(self) -> str:
        return KINDS[self.number % 2]

    def waits(self) -> Iterator[tuple[float, float]]:
        """Yields begin and end of each wait for a chunk of tokens; the first begins when the request is sent."""
        if self.record.first_s is None:
            return
        yield self.record.sent_s, self.record.first_s
        at = self.record.first_s
        for gap_ms in self.record.gaps_ms:
            yield at, at + gap_ms / 1000
            at += gap_ms / 1000


@dataclass
class Kill:
    """One run of the kill command. Times are seconds since the run began."""

    at_s: float
    error: str = ""  # of the command
    answered_s: float | None = None  # when a request that was sent after the command had ended was answered


@dataclass
class ContinuityRun:
    """The measurements: two undisturbed answers to each request, then those under kills."""

    undisturbed: list[PlayedStream] = field(default_factory=list)
    streams: list[PlayedStream] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    interrupted: bool = False


def figures(run: ContinuityRun) -> dict[str, Any]:
    """Returns the figures of a run. Streams that the end of the run cut off do not count."""
    streams = [stream for stream in run.streams if stream.record.outcome != INTERRUPTED]
    by_ids = all(stream.ids for stream in run.undisturbed)
    expected: dict[int, Sequence[Any]] = {}
    unsteady = set()
    for stream in run.undisturbed:
        answer = stream.answer(by_ids=by_ids)
        if answer != expected.setdefault(stream.number, answer):
            unsteady.add(stream.number)
    found = [
        (stream, difference(expected[stream.number], stream.answer(by_ids=by_ids), whole=stream.record.outcome == OK))
        for stream in streams
    ]
    return {
        "compared": "token ids" if by_ids else "text",
        "requests": len(expected),
        "unsteady_requests": len(unsteady),
        "changed_without_kill": sum(
            1
            for stream, what in found
            if what.changed and stream.number not in unsteady and not _met(stream, run.kills)
        ),
        "streams": {kind: _counts([one for one in found if one[0].kind == kind], unsteady) for kind in KINDS},
        "errors": dict(Counter(_message(one.record) for one in streams if one.record.outcome != OK).most_common()),
        "kills": len(run.kills),
        "failed_kills": [kill.error for kill in run.kills if kill.error],
        **_times(run.undisturbed, streams, run.kills),
    }


def _counts(found: Sequence[tuple[PlayedStream, AnswerDifference]], unsteady: set[int]) -> dict[str, int]:
    judged = [what for stream, what in found if stream.number not in unsteady]
    return {
        "streams": len(found),
        "tokens": sum(stream.record.tokens for stream, _ in found),
        "errors": sum(1 for stream, _ in found if stream.record.outcome != OK),
        "judged": len(judged),
        **{name: sum(getattr(what, name) for what in judged) for name in ("lost", "repeated", "changed", "cut_off")},
    }


def _message(record: RequestRecord) -> str:
    """Returns the error as its user sees it, without ids, so that equal errors are counted together."""
    return f"{record.outcome}: {_ID.sub('…', record.detail)}".removesuffix(": ")


def _met(stream: PlayedStream, kills: Sequence[Kill]) -> bool:
    return any(stream.record.sent_s <= kill.at_s <= stream.record.ended_s for kill in kills)


def _times(
    undisturbed: Sequence[PlayedStream], streams: Sequence[PlayedStream], kills: Sequence[Kill]
) -> dict[str, Any]:
    """Returns times in seconds. A stream is interrupted by a kill after which it waits longer for tokens than any undisturbed
    stream did."""
    quiet = [_longest(stream) for stream in undisturbed]
    usual = [max((one[part] for one in quiet), default=0.0) for part in (0, 1)]
    goes_on = [_going_on(streams, kills, number, usual) for number in range(len(kills))]
    return {
        "longest_gap_undisturbed_s": tails([one[1] for one in quiet]),
        "longest_gap_s": tails([_longest(stream)[1] for stream in streams if stream.record.gaps_ms]),
        "new_request_s": tails([kill.answered_s - kill.at_s for kill in kills if kill.answered_s and not kill.error]),
        "interrupted_streams": sum(map(len, goes_on)),
        "all_go_on_s": tails([max(one) for one in goes_on if one]),
    }


def _longest(stream: PlayedStream) -> tuple[float, float]:
    """Returns the time to the first token, and the longest gap after it."""
    waits = [end - begin for begin, end in stream.waits()] or [0.0]
    return waits[0], max(waits[1:], default=0.0)


def _going_on(
    streams: Sequence[PlayedStream], kills: Sequence[Kill], number: int, usual: Sequence[float]
) -> list[float]:
    """Returns, for each stream that a kill interrupted and that went on, how long after the kill it did."""
    kill = kills[number]
    until = kills[number + 1].at_s if number + 1 < len(kills) else float("inf")
    late = min(until, max(kill.at_s + START_S, kill.answered_s or 0.0))
    found = []
    for stream in streams:
        ends = [
            end - kill.at_s
            for index, (begin, end) in enumerate(stream.waits())
            if begin <= late and end > kill.at_s and end - begin > usual[min(index, 1)]
        ]
        if ends and stream.record.sent_s <= kill.at_s:
            found.append(max(ends))
    return found
