"""Work that is not done yet, by tenant, and what of it a new request has to wait for. Pure.

The fair queue serves tenants in proportion to their weights while they have work, at each level (priority class,
organisation, user). So until a tenant has got an amount `x` for its weight, each of the others has got as much for its own, or
all it wanted, whichever is less. Another tenant's backlog does not count beyond that, however large. Of its own tenant's work,
only what has a deadline counts for a request with a deadline, because that goes first.

How much the others want is kept by powers of two. Those of the same power as `x` count as if they wanted as much as they
can, together: so a question costs a few steps for each level, however many tenants there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.fairness.fair_node import Path


@dataclass(slots=True)
class _Size:
    """Those among the children of a node that want about the same for their weight."""

    count: int = 0
    weight: float = 0.0
    work: int = 0


@dataclass(slots=True)
class _Node:
    weight: float
    work: int = 0
    urgent: int = 0
    """Requests with a deadline, or with a target for the first token."""
    sizes: dict[int, _Size] = field(default_factory=dict)
    """Its children that have work, by the binary order of what they want for their weight."""

    @property
    def order(self) -> int:
        return int(self.work / self.weight).bit_length()

    def count(self, child: "_Node", sign: int) -> None:
        """A child comes to want what it does, or no more."""
        if not child.work:
            return
        order = child.order
        size = self.sizes.get(order)
        if size is None:
            size = self.sizes[order] = _Size()
        size.count += sign
        size.weight += sign * child.weight
        size.work += sign * child.work
        if not size.count:
            del self.sizes[order]

    def until(self, child: "_Node", work: float) -> float:
        """The work that all children get until this one, whether it is among them or not, has got so much."""
        each, total = work / child.weight, work
        own = child.order if child.work else -1
        for order, size in self.sizes.items():
            weight, wanted = size.weight, size.work
            if order == own:
                weight, wanted = weight - child.weight, wanted - child.work
            total += wanted if each >= 1 << order else min(wanted, max(weight, 0.0) * each)
        return total


class WorkAhead:
    """A change costs one step for each level. Work is counted in whole numbers, so that nothing is left over."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._root = _Node(1.0)
        self._nodes: dict[Path, _Node] = {}
        """Those that have work."""

    @property
    def work(self) -> int:
        return self._root.work

    def add(self, path: Path, work: int, *, urgent: bool) -> None:
        """So much more, or less if negative. `urgent`: of a request with a deadline."""
        if not work:
            return
        above = self._root
        above.work += work
        for depth in range(1, len(path) + 1):
            own = path[:depth]
            node = self._nodes.get(own)
            if node is None:
                node = self._nodes[own] = _Node(self._weight(own))
            above.count(node, -1)
            node.work += work
            node.urgent += work if urgent else 0
            assert node.work >= node.urgent >= 0
            above.count(node, 1)
            if not node.work:
                del self._nodes[own]
            above = node

    def before(self, path: Path, work: float, *, urgent: bool) -> float:
        """Work that is done until a new request of this tenant is, its own of so much included."""
        leaf = self._nodes.get(path)
        if leaf is not None:
            work += leaf.urgent if urgent else leaf.work
        for depth in range(len(path), 0, -1):
            node = self._nodes.get(path[:depth]) or _Node(self._weight(path[:depth]))
            above = self._root if depth == 1 else self._nodes.get(path[: depth - 1])
            if above is not None:
                work = above.until(node, work)
        return work

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        for node in (self._root, *self._nodes.values()):
            node.sizes.clear()
        for path, node in self._nodes.items():
            node.weight = self._weight(path)
            (self._nodes[path[:-1]] if len(path) > 1 else self._root).count(node, 1)

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
