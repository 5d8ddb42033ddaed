"""The streams that a keeper holds: their submissions, the time at which to look at each next, and their ends. Pure."""

from heapq import heapify, heappop, heappush

from gateway.streams.final_messages import LastWords
from gateway.streams.state import Stream, Submission
from gateway.streams.types import (
    Action,
    Ended,
    Failure,
    SendCancel,
    StreamLimits,
)
from proto.errors import CancelReason


class Held:
    def __init__(self, limits: StreamLimits | None = None) -> None:
        self.limits = limits or StreamLimits()
        self.streams: dict[str, Stream] = {}
        self.submissions: dict[str, Submission] = {}
        self.link_up = False
        self._coordinator_incarnation = 0
        self._settled_at = 0.0
        self._draining = False
        self._words = LastWords(self.limits.last_words_max)
        self._now = 0.0
        self._heap: list[tuple[float, str]] = []
        self._out: list[Action] = []

    def next_deadline(self) -> float | None:
        while self._heap:
            at, stream_id = self._heap[0]
            stream = self.streams.get(stream_id)
            if stream is not None and stream.scheduled_at == at:
                return at
            heappop(self._heap)
        return None

    def _schedule(self, stream: Stream) -> None:
        """Have `_tick` look at the stream at its deadline, or earlier: deadlines that move back are found out then."""
        if stream.id not in self.streams:
            return
        at = stream.deadline(self.limits, self.link_up, self._coordinator_incarnation)
        if stream.scheduled_at is None or at < stream.scheduled_at:
            stream.scheduled_at = at
            if len(self._heap) > 4 * len(self.streams) + 64:
                self._heap = [(s.scheduled_at, s.id) for s in self.streams.values() if s.scheduled_at is not None]
                heapify(self._heap)
            else:
                heappush(self._heap, (at, stream.id))

    def _cancel(self, submission: Submission, reason: CancelReason) -> None:
        if not submission.sent:
            return
        word = submission.last_word(reason)
        self._words.add(word, self._now)
        if self.link_up and reason is not CancelReason.ANSWERED:
            self._out.append(SendCancel(word))

    def _drop(self, submission: Submission) -> None:
        del self.submissions[submission.request_id]
        submission.stream.submissions.remove(submission)

    def _forget(self, stream: Stream, reason: CancelReason) -> None:
        for submission in list(stream.submissions):
            self._cancel(submission, reason)
            self._drop(submission)
        del self.streams[stream.id]

    def _fail(self, stream: Stream, failure: Failure) -> None:
        self._forget(stream, CancelReason.ABANDONED)
        self._out.append(Ended(stream.id, failure))
