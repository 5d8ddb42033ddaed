"""Whose chunk runs next: deficit round robin, the same structure at every level (band → organisation → user).

Deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) gives every tenant `quantum * weight` of credit in each round and
serves it while that lasts. Here a round is as short as one likes, and rounds in which nobody's credit suffices are skipped by
arithmetic. What is left of the ring is one number for each tenant, the round in which its debt is paid off:

    serve the tenant with the earliest round, its ring position deciding between equals
    then put it `cost / weight` rounds after the round it was served in

which is the order of start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996). A tenant that is idle, or passed over
because nothing of it can run on the worker that asks, keeps its place but falls behind the ring by no more than one quantum:
its debt is kept, of its credit only so much. That lets a tenant with little to do have a whole short prompt computed in one
go. For i and j backlogged and able to run over any interval,

    |S_i/w_i - S_j/w_j| <= quantum + L_i/w_i + L_j/w_j        (S: cost served, w: weight, L: largest cost of one chunk)

also where some tenants can run on some workers only. Where estimates were wrong, the bound is wider by the errors.

A ring is a heap of `(round, position, child)` for each place where children have something to run. A turn taken only makes a
key grow, so an outdated key is put right when it comes to the top, and a pop costs O(log n) at each level.

Inside one tenant `lanes` decides. Pure; costs are in weighted tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from coordinator.lanes import ANYWHERE, SPARE, Entry, Lanes

T = TypeVar("T")
Terms = tuple[float, bool]
"""The cost of a request's next chunk, and whether it is its last one."""
Offer = Callable[[T], Terms | None]
"""Terms on the worker that asks, or None if the request cannot run there now."""
Path = tuple[str, ...]
REFUSALS_MAX = 8
"""Requests without room that one pop looks at before it keeps to those placed already: what bounds its time when the
workers are full."""


class Node(Generic[T]):
    """A tenant at some level: a member of its parent's ring, and a ring itself or, at the bottom, lanes of requests."""

    __slots__ = (
        "busy",
        "children",
        "heaps",
        "lanes",
        "now",
        "owed",
        "parent",
        "path",
        "position",
        "round",
        "slots",
        "weight",
    )

    def __init__(
        self, path: Path, weight: float, parent: "Node[T] | None", position: int, lanes: Lanes[T] | None
    ) -> None:
        assert weight > 0, path
        self.path, self.weight, self.parent, self.position, self.lanes = path, weight, parent, position, lanes
        self.round = 0.0
        """Of the parent's ring: when this node's turn comes."""
        self.owed = 0.0
        """Corrections not yet charged: they count with the next chunk."""
        self.now = 0.0
        """The round this node's own ring has come to."""
        self.busy: dict[int, int] = {}
        """By place: children, or entries at the bottom, with something to run there."""
        self.slots: dict[int, tuple[float, int, Node[T]]] = {}
        """By place: the heap entry that stands for this node; any other is void."""
        self.heaps: dict[int, list[tuple[float, int, Node[T]]]] = {}
        self.children: dict[str, Node[T]] = {}

    def before(self, other: "Node[T]") -> bool:
        """Whether its turn comes before that of another child of the same ring."""
        return self.round < other.round or (self.round == other.round and self.position < other.position)


Slot = tuple[float, int, Node[T]]
"""(round, ring position, child)."""


def _first(heap: list[Slot[T]], place: int) -> Node[T] | None:
    """Whose turn comes first, after putting outdated slots right; alone, one may stay as it is."""
    while heap:
        slot = heap[0]
        node = slot[2]
        if node.slots.get(place) is not slot:
            heappop(heap)
        elif slot[0] < node.round and len(heap) > 1:
            fresh = node.slots[place] = (node.round, node.position, node)
            heapreplace(heap, fresh)
        else:
            return node
    return None


class FairQueue(Generic[T]):
    """Entries of all tenants. Bounded by its owner."""

    def __init__(
        self, quantum: float = 0.0, weights: Mapping[str, float] | None = None, overtaken_max: int = 16
    ) -> None:
        """`quantum`: cost per weight that an idle tenant may save up. `weights` by path joined with "/", 1 where none is
        given. `overtaken_max`: see `Lanes`."""
        assert quantum >= 0
        self.quantum = quantum
        self.weights = dict(weights or {})
        self._overtaken_max = overtaken_max
        self._root: Node[T] = Node((), 1.0, None, 0, None)
        self._leaves: dict[Path, Node[T]] = {}
        self._positions = 0
        self._refusals = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Other weights from now on; the turns that were taken stay as they were charged."""
        self.weights = dict(weights)
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            node.weight = self.weights.get("/".join(node.path), 1.0)
            nodes.extend(node.children.values())

    def tenants(self) -> Iterable[Path]:
        return self._leaves.keys()

    def forget(self, path: Path) -> None:
        """Let go of a tenant that has no entries, and of what was above it for its sake; with them go its debts."""
        node = self._leaves.get(path)
        if node is None or node.busy:
            return
        del self._leaves[path]
        while node is not None and node.parent is not None and not node.busy and not node.children:
            del node.parent.children[node.path[-1]]
            node = node.parent

    # --- entries --------------------------------------------------------------------------------------------------------

    def push(self, item: T, path: Path, deadline: float, chunks: int) -> Entry[T]:
        """Add a request with about `chunks` chunks to run; `deadline` in the seconds of whoever calls."""
        leaf = self._leaves.get(path) or self._leaf(path)
        assert leaf.lanes is not None
        entry = leaf.lanes.add(item, leaf, deadline, chunks)
        self._join(leaf, ANYWHERE)
        self.size += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Take a request out, whether it is cancelled or has no chunk left."""
        entry.leaf.lanes.remove(entry)
        self._leave(entry.leaf, entry.lane)
        self.size -= 1

    def settle_on(self, entry: Entry[T], place: int) -> None:
        """From now on the request runs on `place` only, though it has got no chunk there yet."""
        self._move(entry, place)

    def pop(self, place: int, offer: Offer[T], refusals_max: int = REFUSALS_MAX) -> tuple[Entry[T], float] | None:
        """Charge the next chunk that can run on worker `place`; returns its entry and cost.

        With its last chunk a request leaves the queue; until then it runs on `place` only from now on.
        """
        self._refusals = refusals_max
        found = self._find(self._root, place, offer)
        if found is None:
            return None
        entry, cost, last = found
        quantum = self.quantum
        leaf = node = entry.leaf
        while (ring := node.parent) is not None:
            # Conditions in place of min and max: this runs for every chunk and level, and calls cost.
            start, due, now = node.round, cost + node.owed, ring.now
            if start > now:
                ring.now = start
            elif start < now - quantum:
                start = now - quantum
            if due >= 0.0:
                node.owed, node.round = 0.0, start + due / node.weight
            else:
                node.owed, node.round = due, start
            node = ring
        leaf.lanes.count_turn(entry, place)
        if last:
            self.remove(entry)
        else:
            entry.chunks = max(entry.chunks - 1, 1)
            self._move(entry, place)
        return entry, cost

    def adjust(self, path: Path, cost: float) -> None:
        """Charge (or, if negative, return) the difference between an estimate and what was computed or emitted.

        A charge counts with the next chunk. A refund is felt at once, or who was charged too much would go on waiting.
        """
        node = self._leaves.get(path) or self._leaf(path)
        while (ring := node.parent) is not None:
            node.owed += cost
            if cost < 0 and node.owed < 0 and node.busy and node.round > ring.now:
                ahead = node.round - ring.now
                node.round = ring.now + max(ahead + node.owed / node.weight, 0.0)
                node.owed = min(node.owed + ahead * node.weight, 0.0)
                for place in node.busy:
                    self._enter(ring, place, node)
            node = ring

    def charge(self, path: Path, cost: float) -> None:
        """Charge at once for something that is no chunk: the turns after it come later, whatever waits already."""
        node = self._leaves.get(path) or self._leaf(path)
        while (ring := node.parent) is not None:
            node.round = max(node.round, ring.now - self.quantum) + cost / node.weight
            node = ring

    def debt(self, path: Path) -> float:
        """How far a tenant is ahead of its ring, in cost; negative is credit, which it has only while it has work."""
        node = self._leaves.get(path) or self._leaf(path)
        assert node.parent is not None
        ahead = (node.round - node.parent.now) * node.weight
        return (max(ahead, 0.0) if node.busy else ahead) + node.owed

    # --- rings ----------------------------------------------------------------------------------------------------------

    def _find(self, node: Node[T], place: int, offer: Offer[T]) -> tuple[Entry[T], float, bool] | None:
        """The next entry that can run, with its terms. Serves nothing."""
        if node.lanes is not None:
            for entry in node.lanes.heads(place, self._refusals > 0):
                terms = offer(entry.item)
                if terms is not None:
                    return entry, *terms
                if entry.lane == ANYWHERE:
                    self._refusals -= 1
            return None
        own = node.heaps.get(place)
        free = node.heaps.get(ANYWHERE) if self._refusals > 0 and place != ANYWHERE else None
        passed: list[tuple[list[Slot[T]], Slot[T]]] = []
        found = None
        while True:
            heap, child = own, _first(own, place) if own else None
            if free and self._refusals > 0:
                other = _first(free, ANYWHERE)
                # A child may stand in both, and often does.
                if other is not child and (child is None or (other is not None and other.before(child))):
                    heap, child = free, other
            if heap is None or child is None:
                break
            found = self._find(child, place, offer)
            if found is not None:
                break
            passed.append((heap, heappop(heap)))
        for heap, slot in passed:
            heappush(heap, slot)
        return found

    # --- idle and busy --------------------------------------------------------------------------------------------------

    def _move(self, entry: Entry[T], place: int) -> None:
        leaf, before = entry.leaf, entry.lane
        leaf.lanes.move(entry, place)
        if place != before:
            self._join(leaf, place)
            self._leave(leaf, before)

    def _join(self, leaf: Node[T], place: int) -> None:
        """One entry more of `leaf` at `place`."""
        node = leaf
        while True:
            busy = node.busy
            there = busy.get(place, 0)
            ring = node.parent
            if there or ring is None:
                busy[place] = there + 1
                return
            if not busy:
                node.round = max(node.round + node.owed / node.weight, ring.now - self.quantum)
                node.owed = 0.0
            busy[place] = 1
            self._enter(ring, place, node)
            node = ring

    def _enter(self, ring: Node[T], place: int, node: Node[T]) -> None:
        """The slot it had before, if any, is void."""
        slot = node.slots[place] = (node.round, node.position, node)
        heap = ring.heaps.get(place)
        if heap is None:
            ring.heaps[place] = [slot]
            return
        heappush(heap, slot)
        if len(heap) > 2 * len(ring.children) + SPARE:
            heap[:] = [other for other in heap if other[2].slots.get(place) is other]
            heapify(heap)

    def _leave(self, leaf: Node[T], place: int) -> None:
        node: Node[T] | None = leaf
        while node is not None:
            there = node.busy[place] - 1
            if there:
                node.busy[place] = there
                return
            del node.busy[place]
            node.heaps.pop(place, None)
            node.slots.pop(place, None)
            node = node.parent

    def _leaf(self, path: Path) -> Node[T]:
        node = self._root
        for depth, name in enumerate(path, 1):
            child = node.children.get(name)
            if child is None:
                weight = self.weights.get("/".join(path[:depth]), 1.0)
                lanes = Lanes[T](self._overtaken_max) if depth == len(path) else None
                self._positions += 1
                child = node.children[name] = Node(path[:depth], weight, node, self._positions, lanes)
            node = child
        self._leaves[path] = node
        return node
