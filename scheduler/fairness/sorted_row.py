"""The entries that wait under one queue key of one node of the fair queue, least first: a heap with lazy deletion. Pure.

A member's present rank is in its attribute `rank`. A rank in the heap that is not its member's present one is dead: it is taken
out when it comes first, or when half of the heap is dead. So leaving costs O(1), and the first of the heap is always alive.
"""

from heapq import heapify, heappop, heappush
from typing import Any

Rank = tuple[Any, ...]
"""The key by which members are compared, with a number that is unique in the row, and then the member itself."""
SPARE = 64  # how many dead ranks a heap may hold beyond its live ones


class SortedRow:
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
