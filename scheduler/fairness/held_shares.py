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
from typing import NamedTuple

from scheduler.fairness.fair_node import Path

Key = tuple[str, int]  # a request's id and attempt
NEAR_ENOUGH = 0.85
"""No stream is interrupted if the waiting tenant holds more than this part of what the other holds, each for its weight."""
LOOKED_AT_MAX = 16  # streams of one tenant, at one event


class HeldStream(NamedTuple):
    held: int  # millionths of its decode worker
    estimated: int = 0  # its sequences, if it is counted with fewer tokens than it may come to have


class HeldNode:
    """A tenant at some level that holds something."""

    __slots__ = ("children", "estimated", "held", "order", "share", "streams", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.held = 0  # millionths of a decode worker
        self.share = 0.0  # `held / weight`
        self.estimated = 0
        self.children: dict[str, HeldNode] = {}  # those that hold something
        self.order: list[tuple[float, str]] = []  # their names, by what they hold for their weight
        self.streams: dict[tuple[int, Key], HeldStream] = {}
        """The streams of a tenant, with their workers; oldest first."""


_NOTHING = HeldNode(1.0)


def _lacks(most: HeldNode, held: int, weight: float) -> float:
    """Returns how much passes from `most` to a node with `held` and `weight` until both hold the same for their weights."""
    return (most.share - held / weight) / (1 / most.weight + 1 / weight)


class HeldShares:
    """A change costs a step at each level."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self.root = HeldNode(1.0)
        self.freed = 0
        """Millionths of a worker that came free since `Pool.freed_per_s` was last called, without streams that gave way."""

    def add(self, path: Path, worker: int, key: Key, stream: HeldStream) -> None:
        """An attempt of this tenant holds so much of a worker from now on."""
        self._count(path, *stream).streams[worker, key] = stream

    def remove(self, path: Path, worker: int, key: Key) -> None:
        stream = self.node(path).streams.pop((worker, key))
        self.freed += stream.held
        self._count(path, -stream.held, -stream.estimated)

    def recount(self, path: Path, worker: int, key: Key, stream: HeldStream) -> None:
        """An attempt holds another part of its worker than was thought."""
        streams = self.node(path).streams
        before, streams[worker, key] = streams[worker, key], stream
        self._count(path, stream.held - before.held, stream.estimated - before.estimated)

    def node(self, path: Path) -> HeldNode:
        """A tenant at some level; an empty one if it holds nothing."""
        node = self.root
        for name in path:
            there = node.children.get(name)
            if there is None:
                return _NOTHING
            node = there
        return node

    def of(self, path: Path) -> float:
        """The room that a tenant at some level holds for its weight."""
        return self.node(path).share

    def estimated(self, path: Path) -> int:
        """Sequences of a tenant at some level that are counted with fewer tokens than they may come to have."""
        return self.node(path).estimated

    def holds_more(self, path: Path) -> bool:
        """Whether another tenant holds clearly less for its weight, at some level."""
        above = self.root
        for name in path:
            own = above.children.get(name)
            if own is None:
                return False
            if above.order[0][0] < NEAR_ENOUGH * own.share:
                return True
            above = own
        return False

    def holds_less(self, path: Path, other: Path) -> bool:
        """Whether one tenant holds nothing, or clearly less for its weight than another: at the level where the two part."""
        depth = next(depth for depth, (one, two) in enumerate(zip(path, other, strict=True), 1) if one != two)
        own = self.of(path[:depth])
        return not own or own < NEAR_ENOUGH * self.of(other[:depth])

    def who_gives_way(
        self, path: Path, wanted: Callable[[int], int], may_leave: Callable[[int, Key], bool], soon: float = 0.0
    ) -> Iterator[tuple[int, list[Key], int]]:
        """Yields streams that could give way together to a request of `path`, with their worker and what they hold: the newest
        of the tenant that holds most for its weight, first one, then one more. Leaves out those whose end would leave that
        tenant with less than `path` would then hold. Yields none if what `path` lacks is at most `soon`, which comes free by
        itself. `wanted(worker)` is what the request would hold there; `may_leave` says whether a stream can be interrupted."""
        most, own_held, weight = self._beside_most(path)
        if most is None:
            return
        lacks = _lacks(most, own_held, weight)
        if own_held / weight > NEAR_ENOUGH * most.share or lacks <= soon:
            return
        tenant = most
        while tenant.order:
            tenant = tenant.children[tenant.order[-1][1]]
        together: dict[int, tuple[list[Key], int]] = {}
        for (worker, key), stream in islice(reversed(tenant.streams.items()), LOOKED_AT_MAX):
            if not may_leave(worker, key):
                continue
            keys, held = together.get(worker, ((), 0))
            keys, held = together[worker] = [*keys, key], held + stream.held
            if (most.held - held) / most.weight >= (own_held + wanted(worker)) / weight:
                yield worker, keys, held

    def lacks(self, path: Path) -> float:
        """Returns which part of all that is held a tenant has less than its share, beside the one that holds most for its
        weight."""
        most, own_held, weight = self._beside_most(path)
        return max(_lacks(most, own_held, weight), 0.0) / self.root.held if most is not None else 0.0

    def _beside_most(self, path: Path) -> tuple[HeldNode | None, int, float]:
        """Returns the node that holds most for its weight, at the first level where it is not the tenant's own, and beside it
        what the tenant's node holds there, and its weight. None: the tenant itself holds most."""
        most, depth = self.root, 0
        own: HeldNode | None = most
        while most is own and most.order:
            above = most
            most, own = above.children[above.order[-1][1]], above.children.get(path[depth])
            depth += 1
        held, weight = (own.held, own.weight) if own else (0, self._weight(path[:depth]))
        return None if most is own else most, held, weight

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._weigh_below(self.root, ())

    def _weigh_below(self, node: HeldNode, path: Path) -> None:
        for name, child in node.children.items():
            child.weight = self._weight((*path, name))
            child.share = child.held / child.weight
            self._weigh_below(child, (*path, name))
        node.order = sorted((child.share, name) for name, child in node.children.items())

    def _count(self, path: Path, held: int, estimated: int) -> HeldNode:
        above = self.root
        above.held += held
        above.share = above.held / above.weight
        above.estimated += estimated
        for depth, name in enumerate(path, 1):
            node = above.children.get(name)
            if node is None:
                node = above.children[name] = HeldNode(self._weight(path[:depth]))
            else:
                del above.order[bisect_left(above.order, (node.share, name))]
            node.held += held
            node.share = node.held / node.weight
            node.estimated += estimated
            if node.held:
                insort(above.order, (node.share, name))
            else:
                del above.children[name]
            above = node
        return above

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
