"""Finds the requests of an event log that waited longest for their first token, took longest, or stood still longest, and
those that did not get their whole answer. Pure.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappush, heappushpop
from itertools import count
from typing import Final

import msgspec

from coordinator.core import Core
from coordinator.events import Action, Event, Received, StateChanged
from proto.messages import Submit
from scheduler.lifecycle import TERMINAL, RequestState


class FeltRequest(msgspec.Struct):
    """One request, in seconds. The coordinator does not see tokens: the first one is drawn once the prompt is computed."""

    request: str
    tenant: str
    priority_class: str
    prompt_tokens: int
    submitted_s: float  # since the recording began
    waited_s: float = 0.0  # queued, all its attempts together
    ttft_s: float | None = None  # None: it had no token
    gap_s: float = 0.0  # the longest hand-over or interruption of its answer
    duration_s: float = 0.0  # until it ended, or the event log did
    outcome: str = ""  # its outcome, or its state at the end of the event log
    why: str = ""


RANKS: Final[dict[str, Callable[[FeltRequest], float]]] = {
    "ttft": lambda row: row.duration_s if row.ttft_s is None else row.ttft_s,
    "duration": lambda row: row.duration_s,
    "gap": lambda row: row.gap_s,
    "queue": lambda row: row.waited_s,
}


class _Live:
    def __init__(self, row: FeltRequest, now: float) -> None:
        self.row, self.came_at = row, now
        self.queued_at: float | None = None
        self.silent_at: float | None = None  # since when its client gets no token, though it had one

    def moved(self, state: RequestState, now: float) -> None:
        row = self.row
        if self.queued_at is not None:
            row.waited_s = round(row.waited_s + now - self.queued_at, 6)
        self.queued_at = now if state is RequestState.QUEUED else None
        if state in (RequestState.HANDING_OVER, RequestState.DECODING):
            row.ttft_s = round(now - self.came_at, 6) if row.ttft_s is None else row.ttft_s
            self.heard(now)
        if state is RequestState.HANDING_OVER or (state is RequestState.INTERRUPTED and row.ttft_s is not None):
            self.silent_at = now if self.silent_at is None else self.silent_at
        if state in TERMINAL:
            self.heard(now)
        row.duration_s = round(now - self.came_at, 6)

    def heard(self, now: float) -> None:
        if self.silent_at is not None:
            self.row.gap_s = max(self.row.gap_s, round(now - self.silent_at, 6))
            self.silent_at = None


class Felt:
    """The `most` requests with the largest rank, and the last as many that did not finish. An `Observer`."""

    def __init__(self, started: float, most: int, rank: str = "ttft") -> None:
        """`rank`: a key of `RANKS`."""
        self._started, self._most, self._rank = started, most, RANKS[rank]
        self._live: dict[str, _Live] = {}
        self._top: list[tuple[float, int, FeltRequest]] = []
        self._number = count()
        self._unfinished: deque[FeltRequest] = deque(maxlen=most)
        self._now = started
        self._submit: Submit | None = None  # of the present event
        self.requests = self.unfinished = 0

    def before(self, core: Core, event: Event, now: float) -> None:
        self._now = now
        message = event.message if isinstance(event, Received) else None
        self._submit = message if isinstance(message, Submit) else None

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StateChanged):
                self._moved(core, action, now)

    def finish(self) -> tuple[list[FeltRequest], list[FeltRequest]]:
        """Returns the requests by rank, largest first, and the last that did not finish, latest first."""
        for live in self._live.values():
            live.moved(RequestState(live.row.outcome), self._now)
            live.heard(self._now)
            self._keep(live.row)
        self._live.clear()
        return [row for _, _, row in sorted(self._top, reverse=True)], list(reversed(self._unfinished))

    def _moved(self, core: Core, moved: StateChanged, now: float) -> None:
        live = self._live.get(moved.request_id)
        if live is None:
            submit = self._submit
            if submit is None or submit.request_id != moved.request_id:
                return
            row = FeltRequest(
                submit.request_id,
                submit.tenant,
                core.accounts.path(submit)[0],
                submit.prompt_tokens,
                round(now - self._started, 6),
            )
            live = self._live[submit.request_id] = _Live(row, now)
            self.requests += 1
        live.moved(moved.state, now)
        live.row.outcome, live.row.why = moved.state.value, moved.why
        if moved.state in TERMINAL:
            del self._live[moved.request_id]
            self._keep(live.row)
            if moved.state is not RequestState.FINISHED:
                self.unfinished += 1
                self._unfinished.append(live.row)

    def _keep(self, row: FeltRequest) -> None:
        entry = (self._rank(row), next(self._number), row)
        if len(self._top) < self._most:
            heappush(self._top, entry)
        else:
            heappushpop(self._top, entry)
