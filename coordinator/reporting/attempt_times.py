"""Notes how far each traced attempt gets and when, for its gateway, which makes spans of it. It reads the core's events and
actions, as the event log does, and changes nothing.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from coordinator.events import Action, Event, Received, Send, StateChanged
from proto.limits import MAX_CHUNKS_PER_STEP
from proto.messages import AttemptTimes, ChunkTimes, HandedOver, Step, StepDone
from scheduler.lifecycle import TERMINAL, RequestState
from scheduler.request import Request

CHUNKS_MAX: Final = MAX_CHUNKS_PER_STEP  # of one attempt; later ones are left out


class _Open(msgspec.Struct):
    """An attempt that has not ended."""

    gateway: int
    began: float
    times: AttemptTimes
    chunks: list[ChunkTimes]

    def ms(self, now: float) -> float:
        return 1000 * (now - self.began)

    def computed(self, start: int, now: float) -> None:
        """Note that a chunk was computed: one of the last, since they are computed in the order in which they were sent."""
        for number in reversed(range(len(self.chunks))):
            sent = self.chunks[number]
            if sent.done_ms:
                return
            if sent.start == start:
                self.chunks[number] = msgspec.structs.replace(sent, done_ms=self.ms(now))
                return

    def note(self, **fields: object) -> None:
        self.times = msgspec.structs.replace(self.times, **fields)


class AttemptClock:
    def __init__(self, requests: Mapping[str, Request]) -> None:
        """`requests`: the core's, by id."""
        self._requests = requests
        self._open: dict[str, _Open] = {}

    def on_event(self, event: Event, now: float) -> None:
        """Look at an event before the core handles it."""
        if not self._open or not isinstance(event, Received):
            return
        message = event.message
        if isinstance(message, StepDone):
            for chunk in message.computed:
                if (attempt := self._of(chunk.request_id, chunk.attempt)) is not None:
                    attempt.computed(chunk.start, now)
        elif isinstance(message, HandedOver) and (attempt := self._of(message.request_id, message.attempt)) is not None:
            attempt.note(transfer_ms=message.transfer_ms)

    def on_action(self, action: Action, now: float) -> list[Send]:
        """Look at an action of the core. Returns the times of attempts that it ends, for their gateways."""
        if isinstance(action, StateChanged):
            return self._on_state(action, now)
        if self._open and isinstance(action, Send) and isinstance(action.message, Step):
            for chunk in action.message.chunks:
                attempt = self._of(chunk.request_id, chunk.attempt)
                if attempt is not None and len(attempt.chunks) < CHUNKS_MAX:
                    attempt.chunks.append(ChunkTimes(chunk.start, chunk.length, attempt.ms(now)))
        return []

    def _on_state(self, changed: StateChanged, now: float) -> list[Send]:
        request_id, state = changed.request_id, changed.state
        if state is RequestState.QUEUED:
            return self._came(request_id, now)
        attempt = self._of(request_id, changed.attempt)
        if attempt is None:
            return []
        request = self._requests.get(request_id)
        if state is RequestState.PLACED and request is not None:
            prefill, _, decode = changed.why.partition(" + ")
            where = {"prefill": prefill, "decode": decode or prefill, "cached_tokens": request.cached_tokens}
            attempt.note(waits=request.waited, **where)
        elif state is RequestState.HANDING_OVER:
            attempt.note(computed_ms=attempt.ms(now))
        elif state is RequestState.DECODING:
            attempt.note(handed_over_ms=attempt.ms(now))
        elif state in TERMINAL or state is RequestState.INTERRUPTED:
            return [self._end(request_id, f"{state.value}: {changed.why}", now)]
        return []

    def _came(self, request_id: str, now: float) -> list[Send]:
        request = self._requests.get(request_id)
        ended = [self._end(request_id, "submitted again", now)] if request_id in self._open else []
        if request is not None and request.submit.traced:
            times = AttemptTimes(request_id, request.attempt, target_ms=request.first_token_ms)
            self._open[request_id] = _Open(request.gateway_incarnation, now, times, [])
        return ended

    def _end(self, request_id: str, outcome: str, now: float) -> Send:
        attempt = self._open.pop(request_id)
        attempt.note(ended_ms=attempt.ms(now), outcome=outcome[:200], chunks=tuple(attempt.chunks))
        return Send(attempt.gateway, attempt.times)

    def _of(self, request_id: str, number: int) -> _Open | None:
        found = self._open.get(request_id)
        return found if found is not None and found.times.attempt == number else None
