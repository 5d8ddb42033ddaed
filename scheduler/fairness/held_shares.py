"""The share of each tenant in decode, and the choice of streams that give way where another tenant has less than its share.
Pure.

The measure of a stream is the part of its worker that it takes: of its sequences or of its blocks, whichever is more (the
dominant resource of Ghodsi et al., NSDI 2011). At each level of the fair queue (priority class, organisation, user) the one
that holds most for its weight gives way to the one whose request waits, unless it has about as much already, or would have
more afterwards. So the room held approaches the weights of the tenants that want more, no room goes back and forth, and a
tenant that is alone may have everything.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from scheduler.fairness.fair_node import Path

Key = tuple[str, int]
"""A request's id and attempt."""
NEAR_ENOUGH = 0.85
"""No stream is interrupted if the waiting tenant holds more than this part of what the other holds, each for its weight."""
LOOKED_AT_MAX = 16
"""Streams of one tenant, at one event."""


class _Node:
    __slots__ = ("children", "held", "order", "streams", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.held = 0
        """Millionths of a decode worker."""
        self.children: dict[str, _Node] = {}
        """Those that hold something."""
        self.order: list[tuple[float, str]] = []
        """Their names, by what they hold for their weight."""
        self.streams: dict[tuple[int, Key], int] = {}
        """Millionths of its decode worker that each stream of a tenant holds; oldest first."""


class HeldShares:
    """A change costs a step at each level."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._root = _Node(1.0)
        self.freed = 0
        """Millionths of a worker that came free since `Pool.freed_per_s` was last called, without streams that gave way."""

    def add(self, path: Path, worker: int, key: Key, held: int) -> None:
        """An attempt of this tenant holds so many millionths of a worker from now on."""
        self._count(path, held).streams[worker, key] = held

    def remove(self, path: Path, worker: int, key: Key) -> None:
        tenant = self._root
        for name in path:
            tenant = tenant.children[name]
        held = tenant.streams.pop((worker, key))
        self.freed += held
        self._count(path, -held)

    def streams(self) -> dict[tuple[int, Key], int]:
        """Returns what each stream holds, in millionths of its worker; for checks."""
        nodes, found = [self._root], dict[tuple[int, Key], int]()
        for node in nodes:
            nodes += node.children.values()
            found |= node.streams
            assert node.held == sum(child.held for child in node.children.values()) + sum(node.streams.values())
            assert [name for _, name in node.order] == sorted(
                node.children, key=lambda n: (node.children[n].held / node.children[n].weight, n)
            )
        return found

    def who_gives_way(
        self, path: Path, wanted: Callable[[int], int], soon: float = 0.0
    ) -> Iterator[tuple[int, Key, int]]:
        """Yields streams of the tenant that holds most for its weight, with their workers and what they hold, newest first.
        Leaves out streams whose end would leave that tenant with less than `path` would then hold. Yields none if what `path`
        lacks is at most `soon`, which comes free by itself. `wanted(worker)` is what the request would hold there."""
        most, depth = self._root, 0
        own: _Node | None = most
        while most is own and most.order:  # the one with most is the tenant's own: look further down
            above = most
            most, own = above.children[above.order[-1][1]], above.children.get(path[depth])
            depth += 1
        if most is own:
            return
        own_held, weight = (own.held, own.weight) if own else (0, self._weight(path[:depth]))
        most_held = most.held / most.weight
        lacks = (most_held - own_held / weight) / (1 / most.weight + 1 / weight)
        if own_held / weight > NEAR_ENOUGH * most_held or lacks <= soon:
            return
        tenant = most
        while tenant.order:
            tenant = tenant.children[tenant.order[-1][1]]
        for (worker, key), held in islice(reversed(tenant.streams.items()), LOOKED_AT_MAX):
            if (most.held - held) / most.weight >= (own_held + wanted(worker)) / weight:
                yield worker, key, held

    def lacks(self, path: Path) -> float:
        """Returns which part of all that is held a tenant has less than its share, beside the one that holds most for its
        weight."""
        most, depth = self._root, 0
        own: _Node | None = most
        while most is own and most.order:
            above = most
            most, own = above.children[above.order[-1][1]], above.children.get(path[depth])
            depth += 1
        if most is own:
            return 0.0
        own_held, weight = (own.held, own.weight) if own else (0, self._weight(path[:depth]))
        lacks = (most.held / most.weight - own_held / weight) / (1 / most.weight + 1 / weight)
        return max(lacks, 0.0) / self._root.held

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._weigh_below(self._root, ())

    def _weigh_below(self, node: _Node, path: Path) -> None:
        for name, child in node.children.items():
            child.weight = self._weight((*path, name))
            self._weigh_below(child, (*path, name))
        node.order = sorted((child.held / child.weight, name) for name, child in node.children.items())

    def _count(self, path: Path, held: int) -> _Node:
        above = self._root
        above.held += held
        for depth, name in enumerate(path, 1):
            node = above.children.get(name)
            if node is None:
                node = above.children[name] = _Node(self._weight(path[:depth]))
            else:
                del above.order[bisect_left(above.order, (node.held / node.weight, name))]
            node.held += held
            if node.held:
                insort(above.order, (node.held / node.weight, name))
            else:
                del above.children[name]
            above = node
        return above

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
