"""The tenants of the fair queue at each level, and the rings in which they have their turns. Pure."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

Rank = tuple[Any, ...]
"""The key by which members are compared, with a number that is unique in the row, and then the member itself."""
SPARE = 64  # how many dead ranks a heap may hold beyond its live ones


class SortedRow:
    """The entries that wait under one queue key of one node, least first: a heap with lazy deletion.

    A member's present rank is in its attribute `rank`. A rank in the heap that is not its member's present one is dead: it is
    taken out when it comes first, or when half of the heap is dead. So leaving costs O(1), and the first of the heap is
    always alive.
    """

    __slots__ = ("above", "heap", "key", "node", "rank", "size")

    def __init__(self, node: Any, key: int) -> None:
        self.node, self.key = node, key
        self.above: Any = None  # the ring of which it is a member
        self.rank: Rank | None = None
        self.heap: list[Rank] = []
        self.size = 0

    def add(self, rank: Rank) -> None:
        rank[-1].rank = rank
        self.size += 1
        heappush(self.heap, rank)

    def discard(self, member: Any) -> None:
        member.rank = None
        self.size -= 1
        self.clear()

    def replace(self, rank: Rank) -> None:
        """Give a member another rank."""
        rank[-1].rank = rank
        heappush(self.heap, rank)
        self.clear()

    def clear(self) -> None:
        """Take dead ranks out, so that the first one is alive."""
        heap = self.heap
        while heap and heap[0][-1].rank is not heap[0]:
            heappop(heap)
        if len(heap) > 2 * self.size + SPARE:
            heap[:] = [rank for rank in heap if rank[-1].rank is rank]
            heapify(heap)


Path = tuple[str, ...]
SCANNED_MAX = 16  # children that `FairNode.first` looks at in the order of their turns, before it asks its rings


class Ring(SortedRow):
    """The children of one node that have something under one queue key, in the order of their turns.

    Its members are the children's rows under that key. A child's round only grows with its turns, so its rank here is updated
    when it comes first.
    """

    __slots__ = ("_ranks",)

    def __init__(self, node: "FairNode", key: int) -> None:
        super().__init__(node, key)
        self._ranks = 0

    def enter(self, row: SortedRow) -> None:
        row.above = self
        self._ranks += 1
        self.add((row.node.round, row.node.position, self._ranks, row))

    def first(self) -> SortedRow:
        """The row whose turn comes first."""
        while True:
            rank = self.heap[0]
            row: SortedRow = rank[3]
            if rank[0] == row.node.round:
                return row
            self.refresh(row)

    def refresh(self, row: SortedRow) -> None:
        """Update a row's rank by its node's round."""
        self._ranks += 1
        self.replace((row.node.round, row.node.position, self._ranks, row))


class FairNode:
    """A tenant at some level: a priority class, an organisation or a user. At the bottom its rows are queues of entries;
    above, rings of its children's rows."""

    __slots__ = ("children", "name", "now", "order", "owed", "parent", "path", "position", "round", "rows", "weight")

    def __init__(self, path: Path, weight: float, parent: "FairNode | None", position: int) -> None:
        assert weight > 0, path
        self.path, self.weight, self.parent, self.position = path, weight, parent, position
        self.name = path[-1] if path else ""
        self.round = 0.0  # the round of the parent's ring in which this node's turn comes
        self.owed = 0.0  # corrections not yet charged: they count with the next chunk
        self.now = 0.0  # the round this node's own ring has come to
        self.rows: dict[int, SortedRow] = {}  # the rows in which it has something to run, by queue key
        self.children: dict[str, FairNode] = {}
        self.order: list[tuple[float, int, FairNode]] = []
        """Children that have something to run, in the order of their turns: round, position, child."""

    @property
    def busy(self) -> bool:
        """Whether it has something to run somewhere."""
        return bool(self.rows)

    def set_round(self, turn: float) -> None:
        """Set the round in which its turn comes."""
        if turn == self.round:
            return
        if self.parent is None or not self.rows:
            self.round = turn
            return
        order = self.parent.order
        del order[bisect_left(order, (self.round, self.position))]
        self.round = turn
        insort(order, (turn, self.position, self))

    def add_row(self, key: int, row: SortedRow) -> None:
        if not self.rows and self.parent is not None:
            insort(self.parent.order, (self.round, self.position, self))
        self.rows[key] = row

    def drop_row(self, key: int) -> None:
        del self.rows[key]
        if not self.rows and self.parent is not None:
            order = self.parent.order
            del order[bisect_left(order, (self.round, self.position))]

    def first(self, keys: Sequence[int]) -> "FairNode":
        """The child whose turn comes first, of those with something under one of these keys; this node has a ring for each.

        Ranks in a ring are brought up to date one after the other. With many workers a tenant waits under many keys, and each
        of its turns outdates its rank under all of them. Usually one of the first children has one of the keys, so no rank is
        needed. If none has, few other children have, and few ranks need an update.
        """
        order = self.order
        if len(order) == 1:
            return order[0][2]
        rings: list[Any] = [self.rows[key] for key in keys]
        lowest = order[-1][0]
        for ring in rings:
            lowest = min(lowest, ring.heap[0][0])
        at = bisect_left(order, (lowest,)) if lowest > order[0][0] else 0
        for _, _, child in order[at : at + SCANNED_MAX]:
            rows = child.rows
            for key in keys:
                if key in rows:
                    return child
        nodes: list[FairNode] = [ring.first().node for ring in rings]
        return min(nodes, key=lambda node: (node.round, node.position))
