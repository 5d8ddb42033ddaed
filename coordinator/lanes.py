"""The order inside one tenant: earliest deadline, then fewest chunks left, then arrival; and nobody overtaken for ever.

A lane is what may run in one place: on any worker (not placed yet), or on the worker that already holds the prompt. Its
entries are sorted, in blocks. The next one is the last of the front block: to take it touches no other, where a heap's
`heappop` compares a dozen that lie anywhere in memory. What leaves from elsewhere stays where it stood, marked, until it comes
to the end of its block, or too much of it has gathered.

Ageing counts overtakings, not seconds: once `overtaken_max` chunks of requests that joined later (a request joins anew with
each chunk it gets) have gone first, the one that waited longest goes next. Counting is O(1) for a whole lane: the oldest's
count is the greatest, and each entry stores only by how much its own exceeds that of the next newer one.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ANYWHERE = 0
AGED = 0
BLOCK_MAX = 128
"""Entries."""
SPARE = 64
"""What is gone and still held by a lane or a heap may be so much more than what is there; then it is cleared out."""


class Entry(Generic[T]):
    """A request with chunks left to dispatch."""

    __slots__ = ("chunks", "deadline", "excess", "item", "joined", "lane", "newer", "older", "seq")

    def __init__(self, item: T, lane: "Lane[T]", deadline: float, chunks: int, seq: int) -> None:
        assert chunks >= 1
        self.item, self.lane, self.deadline, self.chunks, self.seq = item, lane, deadline, chunks, seq
        self.joined = seq
        self.older: Entry[T] | None = None
        self.newer: Entry[T] | None = None
        self.excess = 0

    @property
    def leaf(self) -> Any:
        """Its tenant's node in the fair queue."""
        return self.lane.node

    @property
    def place(self) -> int:
        return self.lane.place


Key = tuple[float, int, int]


def _key(entry: Entry[Any]) -> Key:
    """The greatest goes first."""
    return -entry.deadline, -entry.chunks, -entry.seq


class Block(list[Entry[T]]):
    """Entries in order, the next one last."""

    __slots__ = ("dues",)

    def __init__(self, dues: "array[float]", entries: Iterable[Entry[T]] = ()) -> None:
        super().__init__(entries)
        self.dues = dues
        """Their deadlines, negated: one finds a place without touching the entries."""

    def add(self, entry: Entry[T]) -> None:
        index = self._where(entry)
        self.dues.insert(index, -entry.deadline)
        self.insert(index, entry)

    def take(self, entry: Entry[T]) -> None:
        index = self._where(entry)
        del self.dues[index], self[index]

    def drop(self) -> None:
        """The next one."""
        self.pop()
        self.dues.pop()

    def clear_out(self) -> None:
        self[:] = [entry for entry in self if entry.joined]
        self.dues = array("d", [-entry.deadline for entry in self])

    def split(self) -> "Block[T]":
        """Returns those that go later."""
        half = len(self) // 2
        later = Block(self.dues[:half], self[:half])
        del self.dues[:half], self[:half]
        return later

    def _where(self, entry: Entry[T]) -> int:
        dues, due = self.dues, -entry.deadline
        index = bisect_left(dues, due)
        if index < len(dues) and dues[index] == due:
            return bisect_left(self, _key(entry), index, key=_key)
        return index


class Line:
    """What of one node of the fair queue can run at one place: a lane of entries or, above, a ring of its children's lines."""

    __slots__ = ("above", "node", "place", "size", "slot")

    def __init__(self, node: Any, place: int) -> None:
        self.node, self.place = node, place
        self.size = 0
        self.above: Any = None
        """The ring it stands in, ..."""
        self.slot: Any = None
        """... and what stands for it in that ring's heap; any other is void."""

    def __lt__(self, _: "Line") -> bool:
        """Between a void slot and one in its stead, any order does."""
        return False


class Lane(Line, Generic[T]):
    """Of one tenant. Made for its first entry, and gone when nothing is left in it."""

    __slots__ = ("bounds", "front", "gone", "later", "newest", "oldest", "overtaken", "overtaken_max")

    def __init__(self, node: Any, place: int, overtaken_max: int) -> None:
        super().__init__(node, place)
        self.overtaken_max = overtaken_max
        self.front = Block[T](array("d"))
        self.later: list[Block[T]] = []
        """Blocks behind it, the next one last, ..."""
        self.bounds: list[Key] = []
        """... and for each the greatest key that belongs there."""
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
        at, block = self._block_of(entry)
        block.add(entry)
        if len(block) > BLOCK_MAX:
            self.later.insert(at, block.split())
            self.bounds.insert(at, _key(self.later[at][-1]))

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
        if self.front[-1] is entry:
            self.front.drop()
            self._come_forward()
        elif for_good:
            # Where it stood is cold; who comes to the end of its block clears it away.
            entry.joined = 0
            self.gone += 1
        else:
            at, block = self._block_of(entry)
            block.take(entry)
            if not block:
                del self.later[at], self.bounds[at]
        if self.gone > self.size + SPARE:
            self._clear_out()

    def _come_forward(self) -> None:
        front = self.front
        while True:
            while front and not front[-1].joined:
                front.drop()
                self.gone -= 1
            if front or not self.later:
                return
            front = self.front = self.later.pop()
            self.bounds.pop()

    def _clear_out(self) -> None:
        for block in (self.front, *self.later):
            block.clear_out()
        there = [(block, bound) for block, bound in zip(self.later, self.bounds, strict=True) if block]
        self.later, self.bounds = [block for block, _ in there], [bound for _, bound in there]
        self.gone = 0

    def _block_of(self, entry: Entry[T]) -> tuple[int, Block[T]]:
        """Where an entry is or is to be, and the block's place among the later ones; behind them for the front."""
        later = self.later
        at = bisect_left(self.bounds, _key(entry)) if later else 0
        return at, later[at] if at < len(later) else self.front

    def first(self) -> Entry[T]:
        if self.overtaken >= self.overtaken_max:
            assert self.oldest is not None
            return self.oldest
        return self.front[-1]

    def order(self, entry: Entry[T]) -> tuple[int, float, int, int]:
        """The least goes first. Begins with `AGED` where it goes because it was overtaken often enough."""
        if self.oldest is entry and self.overtaken >= self.overtaken_max:
            return (AGED, 0.0, 0, entry.joined)
        return (AGED + 1, entry.deadline, entry.chunks, entry.seq)


def heads(own: Lane[T] | None, free: Lane[T] | None) -> list[Entry[T]]:
    """What of a tenant may run on a worker next, in order: the first of those placed there and of those not placed yet.

    One that waits for room lets nothing else of its tenant in before it, but does not hold up what is placed already.
    """
    if own is None or free is None:
        only = own or free
        return [only.first()] if only is not None else []
    one, other = own.first(), free.first()
    return [one, other] if own.order(one) < free.order(other) else [other, one]
