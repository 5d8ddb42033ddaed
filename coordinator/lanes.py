"""The order inside one tenant: earliest deadline, then fewest chunks left, then arrival; and nobody overtaken for ever.

A lane is what may run in one place: on any worker (not placed yet), or on the worker that already holds the prompt.
Ageing counts overtakings, not seconds: once `overtaken_max` chunks of requests that joined later (a request joins anew with
each chunk it gets) have gone first, the one that waited longest goes next. Counting is O(1) for a whole lane: the oldest's
count is the greatest, and each entry stores only by how much its own exceeds that of the next newer one.
"""

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ANYWHERE = 0
AGED = 0
SPARE = 64
"""Outdated entries that a heap may hold beside as many as it has valid ones; then they are cleared out."""


class Entry(Generic[T]):
    """A request with chunks left to dispatch."""

    __slots__ = ("chunks", "deadline", "excess", "item", "joined", "lane", "leaf", "newer", "older", "seq")

    def __init__(self, item: T, leaf: Any, deadline: float, chunks: int) -> None:
        self.item, self.leaf, self.deadline, self.chunks = item, leaf, deadline, chunks
        self.seq = self.joined = 0
        self.lane = ANYWHERE
        self.older: Entry[T] | None = None
        self.newer: Entry[T] | None = None
        self.excess = 0


class _Lane(Generic[T]):
    __slots__ = ("heap", "newest", "oldest", "overtaken", "size")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int, int, Entry[T]]] = []
        self.oldest: Entry[T] | None = None
        self.newest: Entry[T] | None = None
        self.overtaken = 0
        """How often the oldest was."""
        self.size = 0

    def overtake(self, by: Entry[T] | None) -> None:
        """Count one more for those older than `by`, or for all."""
        behind = self.newest if by is None else by.older
        if behind is not None:
            behind.excess += 1
            self.overtaken += 1

    def join(self, entry: Entry[T]) -> None:
        entry.older, entry.newer = self.newest, None
        if self.newest is None:
            self.oldest = entry
        else:
            self.newest.newer = entry
        self.newest = entry
        self.size += 1
        if len(self.heap) > 2 * self.size + SPARE:
            # Those that left far behind the head, as cancelled ones do, would stay with all they hold.
            self.heap = [slot for slot in self.heap if slot[4].joined == slot[3]]
            heapify(self.heap)
        heappush(self.heap, (entry.deadline, entry.chunks, entry.seq, entry.joined, entry))

    def leave(self, entry: Entry[T]) -> None:
        self.size -= 1
        if entry.older is None:
            self.oldest = entry.newer
            self.overtaken -= entry.excess
        else:
            entry.older.newer = entry.newer
            entry.older.excess += entry.excess
        if entry.newer is None:
            self.newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None
        entry.excess = entry.joined = 0

    def first(self, overtaken_max: int) -> Entry[T]:
        """A lane is gone when nothing is left in it."""
        if self.overtaken >= overtaken_max:
            assert self.oldest is not None
            return self.oldest
        heap = self.heap
        while True:
            _, _, _, joined, entry = heap[0]
            if entry.joined == joined:
                return entry
            heappop(heap)


class Lanes(Generic[T]):
    """The entries of one tenant."""

    __slots__ = ("_joins", "_lanes", "_max", "size")

    def __init__(self, overtaken_max: int) -> None:
        assert overtaken_max >= 1
        self._max = overtaken_max
        self._lanes: dict[int, _Lane[T]] = {}
        self._joins = 0
        self.size = 0

    def add(self, item: T, leaf: Any, deadline: float, chunks: int) -> Entry[T]:
        assert chunks >= 1
        entry = Entry(item, leaf, deadline, chunks)
        self._join(entry, ANYWHERE)
        self.size += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        self._leave(entry)
        self.size -= 1

    def count_turn(self, entry: Entry[T], place: int) -> None:
        """`entry` gets a chunk on `place`: whoever joined before it and could have run there is overtaken."""
        lanes = self._lanes
        if len(lanes) == 1:
            lanes[entry.lane].overtake(entry)
            return
        for number in {ANYWHERE, place}:
            lane = lanes.get(number)
            if lane is not None:
                lane.overtake(entry if number == entry.lane else None)

    def move(self, entry: Entry[T], place: int) -> None:
        """It waits on `place` for its next chunk, as the newest there."""
        if entry.lane != place:
            self._leave(entry)
            self._join(entry, place)
            return
        # Without losing the lane, should there be nothing else in it.
        self._lanes[place].leave(entry)
        self._join(entry, place)

    def heads(self, place: int, anywhere: bool) -> list[Entry[T]]:
        """What may run on `place` next, in order: the first of those placed there and the first of those not placed yet.

        One that waits for room lets nothing else of its tenant in before it, but does not hold up what is placed already.
        """
        most = self._max
        own = self._lanes.get(place)
        free = self._lanes.get(ANYWHERE) if anywhere else None
        if own is None or free is None:
            only = own or free
            return [only.first(most)] if only is not None else []
        one, other = own.first(most), free.first(most)
        return [one, other] if self.order(one) < self.order(other) else [other, one]

    def order(self, entry: Entry[T]) -> tuple[int, float, int, int]:
        """The least goes first. Begins with `AGED` where it goes because it was overtaken often enough."""
        lane = self._lanes[entry.lane]
        if lane.oldest is entry and lane.overtaken >= self._max:
            return (AGED, 0.0, 0, entry.joined)
        return (AGED + 1, entry.deadline, entry.chunks, entry.seq)

    def _join(self, entry: Entry[T], number: int) -> None:
        self._joins += 1
        entry.joined, entry.lane = self._joins, number
        entry.seq = entry.seq or entry.joined
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane()
        lane.join(entry)

    def _leave(self, entry: Entry[T]) -> None:
        lane = self._lanes[entry.lane]
        lane.leave(entry)
        if lane.oldest is None:
            del self._lanes[entry.lane]
