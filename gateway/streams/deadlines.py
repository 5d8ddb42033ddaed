"""The time of the next check of each live stream, in a heap with lazy deletion. Pure.

An entry is valid while its time equals its stream's `scheduled_at`.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from gateway.streams.state import Stream

_SPARE = 64


class StreamDeadlines:
    def __init__(self, streams: Mapping[str, Stream]) -> None:
        """`streams`: by id, those that live; their owner changes it."""
        self._streams = streams
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def next(self) -> float | None:
        """The earliest deadline of a live stream."""
        while self._heap:
            at, stream_id = self._heap[0]
            stream = self._streams.get(stream_id)
            if stream is not None and stream.scheduled_at == at:
                return at
            heappop(self._heap)
        return None

    def set(self, stream: Stream, at: float) -> None:
        """Look at it then, or at an earlier time set before."""
        if stream.scheduled_at is not None and stream.scheduled_at <= at:
            return
        stream.scheduled_at = at
        if len(self._heap) > 4 * len(self._streams) + _SPARE:
            self._heap = [(s.scheduled_at, s.id) for s in self._streams.values() if s.scheduled_at is not None]
            heapify(self._heap)
        else:
            heappush(self._heap, (at, stream.id))

    def pop_due(self, now: float) -> Stream | None:
        """The stream whose deadline is earliest, if that has passed; it has none any more."""
        at = self.next()
        if at is None or at > now:
            return None
        stream = self._streams[heappop(self._heap)[1]]
        stream.scheduled_at = None
        return stream
