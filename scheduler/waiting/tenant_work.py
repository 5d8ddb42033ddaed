"""Work that is not done yet, by tenant: how much of it a new request has to wait for, and which tenant has most of it. Pure.

The fair queue serves tenants in proportion to their weights while they have work, at each level (priority class,
organisation, user). So until a tenant has got an amount `x` for its weight, each of the others has got as much for its own, or
all it wanted, whichever is less. Another tenant's work does not count beyond that, however much it is. Of its own tenant's
work, only what has a deadline counts for a request with a deadline, because that goes first.

Tenants are grouped by the power of two of what they want for their weight. The group with the same power as `x` is counted as a
whole, with the most that it can get. So a query costs a few steps for each level, for any number of tenants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.fairness.fair_node import Path

UNCOMPUTED, WAITING, IN_LINE, SIZE = KINDS = range(4)
"""The kinds of work: prompt tokens that are not computed, of waiting and placed requests; the expected cost of requests that
wait for a place, as in `Prices`; the same with those that were told when to come back; and what counts in an overload (see
`WaitingLine`). All are whole numbers, so that nothing is left over."""


@dataclass(slots=True, eq=False)
class _Group:
    """Those among the children of a node that want about the same for their weight."""

    weight: float = 0.0
    work: int = 0
    members: dict["_Node", None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Node:
    path: Path
    weight: float
    above: "_Node | None"
    work: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    urgent: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    """A tenant's work of requests with a deadline or a target for the first token."""
    groups: list[dict[int, _Group]] = field(default_factory=lambda: [{} for _ in KINDS])
    """The children that have work, by kind and by the binary order of what they want for their weight."""

    def changed(self, child: "_Node", kind: int, before: int, after: int) -> None:
        """Group a child anew."""
        groups, weight = self.groups[kind], child.weight
        old, new = int(before / weight).bit_length(), int(after / weight).bit_length()
        if old == new and before and after:
            groups[old].work += after - before
            return
        if before:
            group = groups[old]
            group.weight -= weight
            group.work -= before
            del group.members[child]
            if not group.members:
                del groups[old]
        if after:
            group = groups.get(new) or groups.setdefault(new, _Group())
            group.weight += weight
            group.work += after
            group.members[child] = None

    def until(self, kind: int, work: float, weight: float, has: int) -> float:
        """Returns the work that all children get until one with this weight has got `work`. `has`: what is counted of it."""
        each, total = work / weight, work
        own = int(has / weight).bit_length() if has else -1
        for order, group in self.groups[kind].items():
            others, there = group.weight, group.work
            if order == own:
                others, there = others - weight, there - has
            total += there if each >= 1 << order else min(there, max(others, 0.0) * each)
        return total


class TenantWork:
    """A change costs one step for each level."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._root = _Node((), 1.0, None)
        self._nodes: dict[Path, _Node] = {}  # those that have work

    def total(self, kind: int) -> int:
        return self._root.work[kind]

    def add(self, path: Path, amounts: Sequence[int], *, urgent: bool = False) -> None:
        """Add work of each kind to a tenant; negative: take it off. `urgent`: of a request with a deadline."""
        changes = [(kind, amount) for kind, amount in enumerate(amounts) if amount]
        if not changes:
            return
        leaf = node = self._nodes.get(path) or self._join(path)
        if urgent:
            for kind, amount in changes:
                leaf.urgent[kind] += amount
        while True:
            above, work = node.above, node.work
            for kind, amount in changes:
                before = work[kind]
                after = work[kind] = before + amount
                assert after >= 0
                if above is not None:
                    above.changed(node, kind, before, after)
            if above is None:
                break
            node = above
        while leaf.above is not None and not any(leaf.work):
            del self._nodes[leaf.path]
            leaf = leaf.above

    def of(self, path: Path, kind: int, *, urgent: bool = False) -> int:
        """A tenant's own work; `urgent`: only what goes before a new request with a deadline."""
        node = self._nodes.get(path)
        return 0 if node is None else node.urgent[kind] if urgent else node.work[kind]

    def per_weight(self, path: Path, kind: int, more: float = 0.0) -> float:
        """Returns the work that a tenant at some level would have for its weight with so much more."""
        return (self.of(path, kind) + more) / self._weight(path)

    def before(self, path: Path, kind: int, work: float, *, urgent: bool = False, apart: bool = False) -> float:
        """Returns the work that is done until a new request of this tenant is done, including its own `work`. `apart`: work of
        other priority classes is done elsewhere."""
        work += self.of(path, kind, urgent=urgent)
        node = self._nodes.get(path)
        for depth in range(len(path), int(apart), -1):
            above = self._nodes.get(path[: depth - 1]) if depth > 1 else self._root
            if above is not None:
                weight, has = (node.weight, node.work[kind]) if node else (self._weight(path[:depth]), 0)
                work = above.until(kind, work, weight, has)
            node = above
        return work

    def largest(self, path: Path, kind: int) -> Path | None:
        """The child of a node with the most work for its weight, to within a factor of two; None if none has any."""
        node = self._nodes.get(path)
        if node is None or not (groups := node.groups[kind]):
            return None
        return next(iter(groups[max(groups)].members)).path

    def reweigh(self, weights: Mapping[str, float]) -> None:
        before, self._weights = self._weights, weights
        for name in () if before == weights else before.keys() | weights.keys():
            node = self._nodes.get(tuple(name.split("/", 2)))
            if node is not None and node.weight != (weight := self._weight(node.path)):
                assert node.above is not None
                for kind in KINDS:
                    node.above.changed(node, kind, node.work[kind], 0)
                node.weight = weight
                for kind in KINDS:
                    node.above.changed(node, kind, 0, node.work[kind])

    def _join(self, path: Path) -> _Node:
        node = self._root
        for own in (path[:depth] for depth in range(1, len(path) + 1)):
            node = self._nodes.get(own) or self._nodes.setdefault(own, _Node(own, self._weight(own), node))
        return node

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
