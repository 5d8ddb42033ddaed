"""The order of one tenant's requests: earliest deadline, then fewest chunks left, then arrival; and none overtaken for ever.

A queue holds the entries of one tenant that have the same queue key (see `fair_queue`).

Ageing counts overtakings, not seconds: once `overtaken_max` chunks of requests that arrived later have gone first, the one
that has waited longest goes next (a request joins anew with each chunk it gets). Chunks of a request that arrived earlier do
not count. Otherwise a few long prompts would overtake so often that all requests have turns, and all finish late. Counting is
O(1) for a whole queue: the oldest's count is the greatest, and each entry stores only by how much its own exceeds that of the
next newer one.
"""

from typing import Generic, TypeVar

from scheduler.fairness.fair_node import FairNode, Rank, SortedRow

T = TypeVar("T")
Order = tuple[int, float, int, int]
AGED = 0


class Entry(Generic[T]):
    """A request with chunks left to dispatch."""

    __slots__ = ("chunks", "due", "excess", "item", "joined", "newer", "older", "queue", "rank", "seq")

    def __init__(self, item: T, queue: "TenantQueue[T]", deadline: float, chunks: int, seq: int) -> None:
        assert chunks >= 1
        self.item, self.queue, self.due, self.chunks, self.seq = item, queue, deadline, chunks, seq
        self.joined = seq
        self.older: Entry[T] | None = None
        self.newer: Entry[T] | None = None
        self.excess = 0
        self.rank: Rank | None = None

    @property
    def leaf(self) -> FairNode:
        """Its tenant's node in the fair queue."""
        node: FairNode = self.queue.node
        return node

    @property
    def key(self) -> int:
        """The queue key under which it waits."""
        return self.queue.key


class TenantQueue(SortedRow, Generic[T]):
    """Entries of one tenant under one queue key. Made for its first entry, and gone when nothing is left in it."""

    __slots__ = ("_overtaken_max", "newest", "oldest", "overtaken")

    def __init__(self, node: FairNode, key: int, overtaken_max: int) -> None:
        super().__init__(node, key)
        self._overtaken_max = overtaken_max
        self.oldest: Entry[T] | None = None
        self.newest: Entry[T] | None = None
        self.overtaken = 0  # how often the oldest entry was overtaken

    def overtake(self, by: Entry[T]) -> None:
        """Count one more overtaking for entries that joined before `by`, or for all if `by` is in another queue, unless the
        oldest arrived later."""
        if self.oldest is None or self.oldest.seq >= by.seq:
            return
        behind = by.older if by.queue is self else self.newest
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
        self.add((entry.due, entry.chunks, entry.seq, entry))

    def leave(self, entry: Entry[T]) -> None:
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
        self.discard(entry)

    def first(self) -> Entry[T]:
        if self.overtaken >= self._overtaken_max:
            assert self.oldest is not None
            return self.oldest
        entry: Entry[T] = self.heap[0][3]
        return entry

    def order(self, entry: Entry[T]) -> Order:
        """Returns the sort key; the least goes first. It begins with `AGED` if the entry goes because it was overtaken often
        enough."""
        if self.oldest is entry and self.overtaken >= self._overtaken_max:
            return (AGED, 0.0, 0, entry.seq)
        return (AGED + 1, entry.due, entry.chunks, entry.seq)
