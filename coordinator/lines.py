"""What can run next, in order: the same structure for a tenant's requests and for the tenants of a ring.

The next one is the last of the first block: to take it touches no other, where a heap's `heappop` compares a dozen that lie
anywhere in memory. To find a place for one touches a row of numbers, and what stands there only between equals. Pure.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Protocol, TypeVar

BLOCK_MAX = 1024
"""Children."""
Key = tuple[float, Any]
"""Of a child: its `due`, negated, and its `tie`."""


class Child(Protocol):
    due: float
    """The least goes first. As long as it stands in a line, what it was when it came."""

    @property
    def tie(self) -> Any:
        """Between equals, the greatest goes first."""


C = TypeVar("C", bound=Child)
_tie = attrgetter("tie")


class Block(list[C]):
    """Children in order, the next one last; to take it is to `pop` it."""

    __slots__ = ("dues",)

    def __init__(self, children: Iterable[C] = ()) -> None:
        super().__init__(children)
        self.dues = array("d", [-child.due for child in self])
        """Negated. Those behind the last child belong to such as were popped: a pop does not touch this, `where` clears up."""

    def split(self) -> "Block[C]":
        """Returns those that go later."""
        half = len(self) // 2
        later = Block(self[:half])
        del self.dues[:half], self[:half]
        return later

    def where(self, child: C, due: float) -> int:
        """Where it stands, or is to; `due`: its own, negated."""
        dues, size = self.dues, len(self)
        del dues[size:]
        index = bisect_left(dues, due)
        if index < size and dues[index] == due:
            tie = child.tie
            if tie > self[index].tie:  # mostly it goes after all its equals, as they had their turn before it
                return bisect_left(self, tie, index + 1, bisect_right(dues, due, index), key=_tie)
        return index


_NONE: list[Any] = []


class Line(Block[C]):
    """What of one node of the fair queue can run at one place: a lane of entries or, above, a ring of its children's lines.

    It is its own first block. As one of a ring's it stands there under `due`, a round.
    """

    __slots__ = ("above", "bounds", "due", "later", "node", "place", "size")

    def __init__(self, node: Any, place: int) -> None:
        super().__init__()
        self.node, self.place = node, place
        self.size = 0
        """How many can run."""
        self.above: Any = None
        """The ring it stands in."""
        self.due = 0.0
        self.later: list[Block[C]] | None = None
        """Blocks behind the first, the next one last, ..."""
        self.bounds: list[Key] = _NONE
        """... and for each the greatest key that belongs there. Most have none, and no list then."""

    def add(self, child: C, due: float) -> None:
        """`due`: its own, negated."""
        block = self._block_of(child)[1] if self.later else self
        index = block.where(child, due)
        block.dues.insert(index, due)
        block.insert(index, child)
        if len(block) > BLOCK_MAX:
            self._split(block)

    def _split(self, block: Block[C]) -> None:
        if self.later is None:
            self.later, self.bounds = [], []
        at, later = self._block_of(block[0])[0], block.split()
        self.later.insert(at, later)
        self.bounds.insert(at, (-later[-1].due, later[-1].tie))

    def extract(self, child: C) -> None:
        at, block = self._block_of(child)
        index = block.where(child, -child.due)
        del block.dues[index], block[index]
        if not block:
            if block is self:
                self.come_forward()
            else:
                assert self.later is not None
                del self.later[at], self.bounds[at]

    def drop(self) -> None:
        """The next one."""
        self.pop()
        if not self:
            self.come_forward()

    def come_forward(self) -> None:
        """The first block is empty: the one behind it takes its place."""
        if self.later:
            block = self.later.pop()
            self.bounds.pop()
            self[:], self.dues = block, block.dues

    def _block_of(self, child: C) -> tuple[int, Block[C]]:
        """Where a child is or is to be, and the block's place among the later ones; behind them for the first."""
        if not self.later:
            return 0, self
        at = bisect_left(self.bounds, (-child.due, child.tie))
        return at, self.later[at] if at < len(self.later) else self
