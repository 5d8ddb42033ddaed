"""Work that is not done yet, by tenant, and how much of it a new request has to wait for. Pure.

The fair queue serves tenants in proportion to their weights while they have work, at each level (priority class,
organisation, user). So until a tenant has got an amount `x` for its weight, each of the others has got as much for its own, or
all it wanted, whichever is less. Another tenant's backlog does not count beyond that, however large. Of its own tenant's work,
only what has a deadline counts for a request with a deadline, because that goes first.

Tenants are grouped by the power of two of what they want. The group with the same power as `x` is counted as a whole, with the
most that it can get. So a query costs a few steps for each level, for any number of tenants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.fairness.fair_node import Path


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
    urgent: int = 0  # work of requests with a deadline or a target for the first token
    sizes: dict[int, _Size] = field(default_factory=dict)
    """Its children that have work, by the binary order of what they want for their weight."""

    @property
    def order(self) -> int:
        return int(self.work / self.weight).bit_length()

    def count(self, child: "_Node", sign: int) -> None:
        """Add a child's work to its size group (`sign` 1), or take it out (-1)."""
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
        """Returns the work that all children get until `child`, which need not be one of them, has got `work`."""
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
        self._nodes: dict[Path, _Node] = {}  # those that have work

    @property
    def work(self) -> int:
        return self._root.work

    def add(self, path: Path, work: int, *, urgent: bool) -> None:
        """Add `work` to a tenant; negative: take it off. `urgent`: of a request with a deadline."""
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

    def of(self, path: Path, *, urgent: bool) -> int:
        """A tenant's own work that goes before a new request of it."""
        leaf = self._nodes.get(path)
        return 0 if leaf is None else leaf.urgent if urgent else leaf.work

    def before(self, path: Path, work: float, *, urgent: bool, apart: bool = False) -> float:
        """Returns the work that is done until a new request of this tenant is done, including its own `work`. `apart`: work of
        other priority classes is done elsewhere."""
        work += self.of(path, urgent=urgent)
        for depth in range(len(path), int(apart), -1):
            node = self._nodes.get(path[:depth]) or _Node(self._weight(path[:depth]))
            above = self._root if depth == 1 else self._nodes.get(path[: depth - 1])
            if above is not None:
                work = above.until(node, work)
        return work

    def reweigh(self, weights: Mapping[str, float]) -> None:
        before, self._weights = self._weights, weights
        if before == weights:
            return
        for name in before.keys() | weights.keys():
            path = tuple(name.split("/", 2))
            node = self._nodes.get(path)
            if node is not None and node.weight != self._weight(path):
                above = self._nodes[path[:-1]] if len(path) > 1 else self._root
                above.count(node, -1)
                node.weight = self._weight(path)
                above.count(node, 1)

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
