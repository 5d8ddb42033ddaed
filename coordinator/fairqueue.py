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

A ring is a sorted line of lines (`lines.py`) for each place where children have something to run. A turn taken only makes a key
grow, so an outdated key is put right when it comes to the top. What a pop needs hangs together by references, from ring to line
to entry, and rounds lie side by side: where many tenants wait, what a pop costs is how many lines of memory it has to fetch.

Inside one tenant `lanes` decides. Pure; costs are in weighted tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from coordinator.lanes import ANYWHERE, Entry, Lane, heads
from coordinator.nodes import Node, Path

T = TypeVar("T")
Terms = tuple[float, bool]
"""The cost of a request's next chunk, and whether it is its last one."""
Offer = Callable[[T], Terms | None]
"""Terms on the worker that asks, or None if the request cannot run there now."""
REFUSALS_MAX = 8
"""Requests without room that one pop looks at before it keeps to those placed already: what bounds its time when the
workers are full."""


class FairQueue(Generic[T]):
    """Entries of all tenants. Bounded by its owner."""

    def __init__(
        self, quantum: float = 0.0, weights: Mapping[str, float] | None = None, overtaken_max: int = 16
    ) -> None:
        """`quantum`: cost per weight that an idle tenant may save up. `weights` by path joined with "/", 1 where none is
        given. `overtaken_max`: see `lanes`."""
        assert quantum >= 0 and overtaken_max >= 1
        self.quantum = quantum
        self.weights = dict(weights or {})
        self._overtaken_max = overtaken_max
        self._root = Node((), 1.0, None, 0, overtaken_max)
        self._leaves: dict[Path, Node] = {}
        self._positions = 0
        self._joins = 0
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
        node: Node | None = self._leaves.get(path)
        if node is None or node.busy:
            return
        del self._leaves[path]
        while node is not None and node.parent is not None and not node.busy and not node.children:
            del node.parent.children[node.path[-1]]
            node = node.parent

    # --- entries --------------------------------------------------------------------------------------------------------

    def push(self, item: T, path: Path, deadline: float, chunks: int) -> Entry[T]:
        """Add a request with about `chunks` chunks to run; `deadline` in the seconds of whoever calls."""
        leaf = self._leaf(path)
        lane: Lane[T] = leaf if leaf.size else self._lane(leaf, ANYWHERE)
        self._joins += 1
        entry = Entry(item, lane, deadline, chunks, self._joins)
        lane.join(entry)
        self.size += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Take a request out, whether it is cancelled or has no chunk left."""
        lane = entry.lane
        lane.leave(entry, for_good=True)
        if not lane.size:
            self._end(lane)
        self.size -= 1

    def settle_on(self, entry: Entry[T], place: int) -> None:
        """From now on the request runs on `place` only, though it has got no chunk there yet."""
        self._move(entry, place, entry.chunks)

    def pop(self, place: int, offer: Offer[T], refusals_max: int = REFUSALS_MAX) -> tuple[Entry[T], float] | None:
        """Charge the next chunk that can run on worker `place`; returns its entry and cost.

        With its last chunk a request leaves the queue; until then it runs on `place` only from now on.
        """
        self._refusals = refusals_max
        found = self._find(place, offer)
        if found is None:
            return None
        entry, cost, last = found
        quantum = self.quantum
        line = entry.lane
        while (above := line.above) is not None:
            # Conditions in place of min and max: this runs for every chunk and level, and calls cost.
            node, ring = line.node, above.node
            start, due, now = node.round, cost + node.owed, ring.now
            if start > now:
                ring.now = start
            elif start < now - quantum:
                start = now - quantum
            if due >= 0.0:
                node.owed, node.round = 0.0, start + due / node.weight
            else:
                node.owed, node.round = due, start
            if above.size > 1 and above[-1] is line:
                above.put_right(line)  # now, while the cache has it
            line = above
        self._count_turn(entry, place)
        if last:
            self.remove(entry)
        else:
            self._move(entry, place, max(entry.chunks - 1, 1))
        return entry, cost

    def adjust(self, path: Path, cost: float) -> None:
        """Charge (or, if negative, return) the difference between an estimate and what was computed or emitted.

        A charge counts with the next chunk. A refund is felt at once, or who was charged too much would go on waiting.
        """
        node: Node = self._leaf(path)
        while (ring := node.parent) is not None:
            node.owed += cost
            if cost < 0 and node.owed < 0 and node.busy and node.round > ring.now:
                ahead = node.round - ring.now
                node.round = ring.now + max(ahead + node.owed / node.weight, 0.0)
                node.owed = min(node.owed + ahead * node.weight, 0.0)
                for line in node.lines():
                    line.above.extract(line)
                    line.above.enter(line)
            node = ring

    def charge(self, path: Path, cost: float) -> None:
        """Charge at once for something that is no chunk: the turns after it come later, whatever waits already."""
        node: Node = self._leaf(path)
        while (ring := node.parent) is not None:
            node.round = max(node.round, ring.now - self.quantum) + cost / node.weight
            node = ring

    def debt(self, path: Path) -> float:
        """How far a tenant is ahead of its ring, in cost; negative is credit, which it has only while it has work."""
        node: Node = self._leaf(path)
        assert node.parent is not None
        ahead = (node.round - node.parent.now) * node.weight
        return (max(ahead, 0.0) if node.busy else ahead) + node.owed

    # --- whose turn it is -----------------------------------------------------------------------------------------------

    def _find(self, place: int, offer: Offer[T]) -> tuple[Entry[T], float, bool] | None:
        """The next entry that can run, with its terms. Serves nothing."""
        root = self._root
        free = root if root.size else None
        if place == ANYWHERE or root.others is None:
            return self._find_in(free, offer) if free is not None else None
        return self._find_either(root.others.get(place), free, offer)

    def _find_in(self, line: Node, offer: Offer[T]) -> tuple[Entry[T], float, bool] | None:
        """In one line: what it has at the bottom goes first, or nothing of it."""
        free = line.place == ANYWHERE
        if line.bottom:
            entry: Entry[T] = line.first()
            terms = offer(entry.item)
            if terms is not None:
                return entry, *terms
            if free:
                self._refusals -= 1
            return None
        passed: list[Node] = []
        found = None
        while not free or self._refusals > 0:
            child = line.next_line()
            if child is None:
                break
            found = self._find_in(child, offer)
            if found is not None:
                break
            line.drop()
            passed.append(child)
        for child in passed:
            line.add(child, -child.due)
        return found

    def _find_either(self, own: Node | None, free: Node | None, offer: Offer[T]) -> tuple[Entry[T], float, bool] | None:
        """In the lines of one node: at the place that asks, and anywhere."""
        if own is None or free is None:
            line = free if own is None else own
            return self._find_in(line, offer) if line is not None else None
        if own.bottom:
            return self._find_head(own, free, offer)
        passed: list[Node] = []
        found = None
        while True:
            mine = own.next_line()
            other = free.next_line() if self._refusals > 0 else None
            if mine is not None and other is not None and mine.node is not other.node:
                if mine.node.before(other.node):
                    other = None
                else:
                    mine = None
            if mine is None and other is None:
                break
            found = self._find_either(mine, other, offer)
            if found is not None:
                break
            for line in (mine, other):
                if line is not None:
                    line.above.drop()
                    passed.append(line)
        for line in passed:
            line.above.add(line, -line.due)
        return found

    def _find_head(self, own: Lane[T], free: Lane[T], offer: Offer[T]) -> tuple[Entry[T], float, bool] | None:
        for entry in heads(own, free):
            terms = offer(entry.item)
            if terms is not None:
                return entry, *terms
            if entry.lane is free:
                self._refusals -= 1
        return None

    def _count_turn(self, entry: Entry[T], place: int) -> None:
        """`entry` gets a chunk on `place`: whoever joined before it and could have run there is overtaken."""
        lane = entry.lane
        leaf = lane.node
        lane.overtake(entry)
        others = leaf.others
        if others is not None:
            other = others.get(place) if lane is leaf else leaf
            if other is not None and other.size and other is not lane:
                other.overtake(None)

    # --- idle and busy --------------------------------------------------------------------------------------------------

    def _move(self, entry: Entry[T], place: int, chunks: int) -> None:
        """It waits on `place` for its next chunk, as the newest there."""
        before = entry.lane
        self._joins += 1
        if before.place == place and before.size == 1 and not before.gone:
            before.overtaken = entry.excess = 0
            entry.chunks, entry.joined = chunks, self._joins
            return  # alone, it stays where it stands
        lane: Lane[T] | None = before if before.place == place else before.node.line(place)
        if lane is None:
            lane = self._lane(before.node, place)
        before.leave(entry, for_good=False)
        entry.lane, entry.chunks, entry.joined = lane, chunks, self._joins
        lane.join(entry)
        if not before.size:
            self._end(before)

    def _lane(self, leaf: Node, place: int) -> Lane[T]:
        """A new lane, and the rings above it that are missing."""
        lane = below = None
        node: Node | None = leaf
        while node is not None:
            there, idle = node.line(place), not node.busy
            line = there if there is not None else node.begin(place)
            if below is None:
                lane = line
            else:
                below.above = line
                line.size += 1
                line.enter(below)
            if there is not None:
                break
            ring = node.parent
            if idle and ring is not None:
                node.round = max(node.round + node.owed / node.weight, ring.now - self.quantum)
                node.owed = 0.0
            below, node = line, ring
        assert lane is not None
        return lane

    def _end(self, line: Any) -> None:
        """Nothing is left in it, nor in the rings above that have no other."""
        while True:
            line.node.end(line.place)
            ended, line = line, line.above
            if line is None:
                return
            line.extract(ended)
            line.size -= 1
            if line.size:
                return

    def _leaf(self, path: Path) -> Node:
        found = self._leaves.get(path)
        if found is not None:
            return found
        node = self._root
        for depth, name in enumerate(path, 1):
            child = node.children.get(name)
            if child is None:
                weight = self.weights.get("/".join(path[:depth]), 1.0)
                self._positions += 1
                child = node.children[name] = Node(path[:depth], weight, node, self._positions, self._overtaken_max)
                node.bottom = False
            node = child
        self._leaves[path] = node
        return node
