"""The tenants of the fair queue at each level, and the rings in which they have their turns. Pure."""

from heapq import heapreplace

from coordinator.fairness.sorted_row import SortedRow

Path = tuple[str, ...]


class Ring(SortedRow):
    """The children of one node that have something under one queue key, in the order of their turns.

    Its members are the children's lines under that key. A child's turn only makes its round grow, so its rank here is brought
    up to date when it comes first.
    """

    __slots__ = ("_ranks",)

    def __init__(self, node: "SchedulingClass", key: int) -> None:
        super().__init__(node, key)
        self._ranks = 0

    def enter(self, line: SortedRow) -> None:
        line.above = self
        alone: SortedRow | None = self.heap[0][3] if self.size == 1 else None
        self._ranks += 1
        self.add((line.node.round, line.node.position, self._ranks, line))
        if alone is not None:
            self.refresh(alone)

    def first(self) -> SortedRow:
        """Whose turn comes first."""
        heap = self.heap
        while True:
            rank = heap[0]
            line: SortedRow = rank[3]
            node: SchedulingClass = line.node
            if rank[0] == node.round:
                return line
            # As in `refresh`, without the calls: this runs for every chunk, level and key.
            self._ranks += 1
            line.rank = (node.round, node.position, self._ranks, line)
            heapreplace(heap, line.rank)
            self.clear()

    def refresh(self, line: SortedRow) -> None:
        """Put it where it belongs by its node's round. Alone, it may stay: the next one that enters makes up for it. A
        priority class has a ring for each prefill worker, and mostly stands there alone."""
        if self.size == 1:
            return
        self._ranks += 1
        self.replace((line.node.round, line.node.position, self._ranks, line))


class SchedulingClass:
    """A tenant at some level: a priority class, an organisation or a user. At the bottom its lines are lanes of entries;
    above, rings of its children's lines."""

    __slots__ = ("children", "lines", "now", "owed", "parent", "path", "position", "round", "weight")

    def __init__(self, path: Path, weight: float, parent: "SchedulingClass | None", position: int) -> None:
        assert weight > 0, path
        self.path, self.weight, self.parent, self.position = path, weight, parent, position
        self.round = 0.0
        """Of the parent's ring: when this node's turn comes."""
        self.owed = 0.0
        """Corrections not yet charged: they count with the next chunk."""
        self.now = 0.0
        """The round this node's own ring has come to."""
        self.lines: dict[int, SortedRow] = {}
        """By queue key, where it has something to run."""
        self.children: dict[str, SchedulingClass] = {}

    @property
    def busy(self) -> bool:
        """Whether it has something to run somewhere."""
        return bool(self.lines)
