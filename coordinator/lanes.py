"""The order inside one tenant: earliest deadline, then fewest chunks left, then arrival; and nobody overtaken for ever.

A lane is what may run in one place: on any worker (not placed yet), or on the worker that already holds the prompt. Its
entries are sorted, in blocks. What leaves from elsewhere than the end stays where it stood, marked, until it comes to the end
of its block, or too much of it has gathered.

Ageing counts overtakings, not seconds: once `overtaken_max` chunks of requests that joined later (a request joins anew with
each chunk it gets) have gone first, the one that waited longest goes next. Counting is O(1) for a whole lane: the oldest's
count is the greatest, and each entry stores only by how much its own exceeds that of the next newer one.
"""

from typing import Any, Generic, TypeVar

from coordinator.lines import Block, Line

T = TypeVar("T")
ANYWHERE = 0
AGED = 0
SPARE = 64
"""What is gone and still held may be so much more than what is there; then it is cleared out."""


class Entry(Generic[T]):
    """A request with chunks left to dispatch."""

    __slots__ = ("chunks", "due", "excess", "item", "joined", "lane", "newer", "older", "seq")

    def __init__(self, item: T, lane: "Lane[T]", deadline: float, chunks: int, seq: int) -> None:
        assert chunks >= 1
        self.item, self.lane, self.due, self.chunks, self.seq = item, lane, deadline, chunks, seq
        self.joined = seq
        self.older: Entry[T] | None = None
        self.newer: Entry[T] | None = None
        self.excess = 0

    @property
    def tie(self) -> tuple[int, int]:
        return -self.chunks, -self.seq

    @property
    def leaf(self) -> Any:
        """Its tenant's node in the fair queue."""
        return self.lane.node

    @property
    def place(self) -> int:
        return self.lane.place


class Lane(Line[Any], Generic[T]):
    """Of one tenant. Made for its first entry, and gone when nothing is left in it."""

    __slots__ = ("gone", "newest", "oldest", "overtaken", "overtaken_max")

    def __init__(self, node: Any, place: int, overtaken_max: int) -> None:
        super().__init__(node, place)
        self.overtaken_max = overtaken_max
        self.gone = 0
        """Entries in the blocks that have left; the next one never has."""
        self.oldest: Entry[T] | None = None
        self.newest: Entry[T] | None = None
        self.overtaken = 0
        """How often the oldest was."""

    def overtake(self, by: Entry[T] | None) -> None:
        """Count one more for those older than `by`, or for all."""
        behind = self.newest if by is None else by.older
        if behind is not None:
            behind.excess += 1
            self.overtaken += 1

    def join(self, entry: Entry[T]) -> None:
        newest = entry.older = self.newest
        if newest is None:
            self.oldest = entry
        else:
            newest.newer = entry
        self.newest = entry
        self.size += 1
        self.add(entry, -entry.due)

    def leave(self, entry: Entry[T], *, for_good: bool) -> None:
        older, newer = entry.older, entry.newer
        if older is None:
            self.oldest = newer
            self.overtaken -= entry.excess
        else:
            older.newer = newer
            older.excess += entry.excess
        if newer is None:
            self.newest = older
        else:
            newer.older = older
        entry.older = entry.newer = None
        entry.excess = 0
        self.size -= 1
        if self[-1] is entry:
            self.pop()
            if self.gone or not self:
                self._clear_end()
        elif for_good:
            # Where it stood is cold; who comes to the end of its block clears it away.
            entry.joined = 0
            self.gone += 1
        else:
            self.extract(entry)
        if self.gone > self.size + SPARE:
            self._clear_out()

    def _clear_end(self) -> None:
        while True:
            while self.gone and self and not self[-1].joined:
                self.pop()
                self.gone -= 1
            if self or not self.later:
                return
            self.come_forward()

    def _clear_out(self) -> None:
        first, self.gone = Block(entry for entry in self if entry.joined), 0
        self[:], self.dues = first, first.dues
        if self.later:
            blocks = [Block(entry for entry in block if entry.joined) for block in self.later]
            there = [(block, bound) for block, bound in zip(blocks, self.bounds, strict=True) if block]
            self.later, self.bounds = [block for block, _ in there], [bound for _, bound in there]

    def first(self) -> Entry[T]:
        if self.overtaken >= self.overtaken_max:
            assert self.oldest is not None
            return self.oldest
        entry: Entry[T] = self[-1]
        return entry

    def order(self, entry: Entry[T]) -> tuple[int, float, int, int]:
        """The least goes first. Begins with `AGED` where it goes because it was overtaken often enough."""
        if self.oldest is entry and self.overtaken >= self.overtaken_max:
            return (AGED, 0.0, 0, entry.joined)
        return (AGED + 1, entry.due, entry.chunks, entry.seq)


def heads(own: Lane[T], free: Lane[T]) -> list[Entry[T]]:
    """What of a tenant may run on a worker next, in order: the first of those placed there and of those not placed yet.

    One that waits for room lets nothing else of its tenant in before it, but does not hold up what is placed already.
    """
    one, other = own.first(), free.first()
    return [one, other] if own.order(one) < free.order(other) else [other, one]
