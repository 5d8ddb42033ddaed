"""The choice of the request whose chunk runs next: deficit round robin, the same structure at every level (priority class →
organisation → user).

Deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) gives every tenant `quantum * weight` of credit in each round and
serves it while that lasts. Here a round may be arbitrarily short, and rounds in which no tenant has enough credit are skipped
by arithmetic. The ring is reduced to one number for each tenant, the round in which its debt is paid off:

    serve the tenant with the earliest round, its ring position deciding between equals
    then put it `cost / weight` rounds after the round it was served in

which is the order of start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996). A tenant that is idle, or passed over
because nothing of it waits under the keys that are named, keeps its whole debt. It keeps credit of at most one quantum, which
lets a tenant with little to do have a whole short prompt computed in one go. For i and j backlogged and able to run over any
interval,

    |S_i/w_i - S_j/w_j| <= quantum + L_i/w_i + L_j/w_j        (S: cost served, w: weight, L: largest cost of one chunk)

also where some tenants can run under some keys only. Where estimates were wrong, the bound is wider by the errors.

**Queue keys.** Every entry waits under a queue key, an integer that the caller chooses: entries that can run on the same
workers have the same key. The coordinator uses one key for each prefill worker (requests placed on it) and one for each class
of KV demand (requests not placed yet). `first` is told the keys that it may take from, and merges them in the one fair order.
A key that is not named costs nothing, however many entries wait under it. The caller gives the first entry its next chunk
(`take`), moves it to another key, or leaves its key out and asks again. So it meets at most as many entries that cannot run as
it names keys, however many wait. No tenant can hide others behind such entries. `first` costs O(levels * (keys + log n)).

Inside one tenant its `TenantQueue` decides. Pure; costs are in weighted tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Generic, NamedTuple

from scheduler.fairness.fair_node import FairNode, Path, Ring, SortedRow
from scheduler.fairness.held_shares import HeldNode, HeldShares
from scheduler.fairness.tenant_queue import Entry, T, TenantQueue

COMPARED_MAX = 64  # children whose shares of decode are compared at each level


class Terms(NamedTuple):
    """The terms on which an entry gets a chunk."""

    cost: float
    last: bool  # the chunk is its last one: the entry leaves the queue
    key: int  # the queue key under which it waits for its further chunks; unused after the last one


class FairQueue(Generic[T]):
    """Entries of all tenants. Bounded by its owner."""

    def __init__(
        self, quantum: float = 0.0, weights: Mapping[str, float] | None = None, overtaken_max: int = 16
    ) -> None:
        """`quantum`: cost per weight that an idle tenant may save up. `weights` by path joined with "/", 1 where none is
        given. `overtaken_max`: see `TenantQueue`."""
        assert quantum >= 0 and overtaken_max >= 1
        self.quantum = quantum
        self.weights = dict(weights or {})
        self._overtaken_max = overtaken_max
        self._root = FairNode((), 1.0, None, 0)
        self._leaves: dict[Path, FairNode] = {}
        self._positions = 0
        self._joins = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Other weights from now on; the turns that were taken stay as they were charged."""
        if weights == self.weights:
            return
        self.weights = dict(weights)
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            node.weight = self.weights.get("/".join(node.path), 1.0)
            nodes.extend(node.children.values())

    def has(self, key: int) -> bool:
        """Whether anything waits under a key."""
        return key in self._root.rows

    def forget(self, path: Path) -> None:
        """Forget a tenant that has no entries, its debts, and the nodes above it that only this tenant needed."""
        node: FairNode | None = self._leaves.get(path)
        if node is None or node.busy:
            return
        del self._leaves[path]
        while node is not None and node.parent is not None and not node.busy and not node.children:
            del node.parent.children[node.name]
            node = node.parent

    # --- entries --------------------------------------------------------------------------------------------------------

    def push(self, item: T, path: Path, key: int, deadline: float, chunks: int) -> Entry[T]:
        """Add a request with about `chunks` chunks to run; `deadline` in the caller's seconds."""
        leaf = self._leaf(path)
        self._joins += 1
        queue = self._tenant_queue(leaf, key)
        entry: Entry[T] = Entry(item, queue, deadline, chunks, self._joins)
        queue.join(entry)
        self.size += 1
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Take a request out, whether it is cancelled or has no chunk left."""
        queue = entry.queue
        queue.leave(entry)
        if not queue.size:
            self._end(queue)
        self.size -= 1

    def move(self, entry: Entry[T], key: int) -> None:
        """Let it wait under another key, as the newest there. Its deadline and its arrival stay."""
        self._move(entry, key, entry.chunks)

    def first(self, keys: Iterable[int], shares: HeldShares | None = None) -> Entry[T] | None:
        """The first in the fair order under these keys; with `shares` in the order of what the tenants hold in decode. Charges
        nothing."""
        node, held = self._root, shares.root if shares is not None else None
        there = [key for key in keys if key in node.rows]
        if not there:
            return None
        while type(node.rows[there[0]]) is Ring:  # all rows of a node are of one kind
            node = node.first(there) if held is None else _holds_least(node, there, held)
            held = held.children.get(node.name) if held is not None else None
            if len(there) > 1:
                there = [key for key in there if key in node.rows]
        queues: list[TenantQueue[T]] = [node.rows[key] for key in there]  # type: ignore[misc]
        if len(queues) == 1:
            return queues[0].first()
        return min((queue.first() for queue in queues), key=lambda entry: entry.queue.order(entry))

    def take(self, entry: Entry[T], terms: Terms, keys: Sequence[int]) -> None:
        """Charge the next chunk of the entry that is first under these keys. With its last chunk it leaves the queue."""
        self._charge(entry.queue.node, terms.cost)
        self._count_turn(entry, keys)
        self._go_on(entry, terms)

    def go_on(self, entry: Entry[T], terms: Terms) -> None:
        """Charge one more chunk of an entry that has just had one, as if the two had been one large chunk. So the rings do not
        move on, and L in the bound above is the cost of both."""
        self.charge(entry.leaf.path, terms.cost)
        self._count_turn(entry, (entry.key,))
        self._go_on(entry, terms)

    def has_late(self, keys: Iterable[int]) -> bool:
        """Whether the organisation or priority class that is first under these keys has over half of the credit it may save
        up."""
        entry = self.first(keys)
        node = None if entry is None else entry.leaf.parent
        while node is not None and (ring := node.parent) is not None:
            if node.round < ring.now - self.quantum / 2:
                return True
            node = ring
        return False

    def goes_before(self, one: Entry[T], other: Entry[T], shares: HeldShares | None = None) -> bool:
        """Whether `one` comes first in the fair order, or with `shares` in the order of what the tenants hold in decode."""
        mine, theirs = one.queue.node, other.queue.node
        if mine is theirs:
            return one.queue.order(one) < other.queue.order(other)
        mine, theirs = where_they_part(mine, theirs)
        held = (shares.of(mine.path), shares.of(theirs.path)) if shares is not None else (0.0, 0.0)
        return (held[0], mine.round, mine.position) < (held[1], theirs.round, theirs.position)

    def adjust(self, path: Path, cost: float) -> None:
        """Charge (or, if negative, return) the difference between an estimate and what was computed or emitted.

        A charge counts with the next chunk. A refund counts at once, or a tenant that was charged too much would go on
        waiting.
        """
        node: FairNode = self._leaf(path)
        while (ring := node.parent) is not None:
            node.owed += cost
            if cost < 0 and node.owed < 0 and node.busy and node.round > ring.now:
                ahead = node.round - ring.now
                node.set_round(ring.now + max(ahead + node.owed / node.weight, 0.0))
                node.owed = min(node.owed + ahead * node.weight, 0.0)
                for row in node.rows.values():
                    # A rank that is too early is brought up to date when it comes first.
                    if row.rank is not None and row.rank[0] > node.round:
                        row.above.refresh(row)
            node = ring

    def charge(self, path: Path, cost: float) -> None:
        """Charge at once for something that is no chunk: the turns after it come later, whatever waits already."""
        node: FairNode = self._leaf(path)
        while (ring := node.parent) is not None:
            node.set_round(max(node.round, ring.now - self.quantum) + cost / node.weight)
            node = ring

    # --- whose turn it is -----------------------------------------------------------------------------------------------

    def _go_on(self, entry: Entry[T], terms: Terms) -> None:
        if terms.last:
            self.remove(entry)
        else:
            self._move(entry, terms.key, max(entry.chunks - 1, 1))

    def _charge(self, leaf: FairNode, cost: float) -> None:
        quantum = self.quantum
        node = leaf
        while (ring := node.parent) is not None:
            # Conditions in place of min and max: this runs for every chunk and level, and calls cost.
            start, due, now = node.round, cost + node.owed, ring.now
            if start > now:
                ring.now = start
            elif start < now - quantum:
                start = now - quantum
            if due >= 0.0:
                node.owed = 0.0
                node.set_round(start + due / node.weight)
            else:
                node.owed = due
                node.set_round(start)
            node = ring

    def _count_turn(self, entry: Entry[T], open_keys: Sequence[int]) -> None:
        """Count the requests that `entry` overtakes with its chunk: those of its tenant that joined before it and could have
        run, unless the oldest there arrived after it. Under other keys the newer ones are counted too."""
        queue = entry.queue
        queue.overtake(entry)
        rows = queue.node.rows
        if len(rows) == 1:
            return
        for key in open_keys:
            other = rows.get(key)
            if other is None or other is queue:
                continue
            assert isinstance(other, TenantQueue)
            other.overtake(entry)

    # --- idle and busy --------------------------------------------------------------------------------------------------

    def _move(self, entry: Entry[T], key: int, chunks: int) -> None:
        before = entry.queue
        self._joins += 1
        before.leave(entry)
        queue = before if before.key == key else self._tenant_queue(before.node, key)
        entry.queue, entry.chunks, entry.joined = queue, chunks, self._joins
        queue.join(entry)
        if not before.size:
            self._end(before)

    def _tenant_queue(self, leaf: FairNode, key: int) -> TenantQueue[T]:
        """The tenant's queue for a key; made where it has none, with the rings above it that are missing."""
        there = leaf.rows.get(key)
        if there is not None:
            assert isinstance(there, TenantQueue)
            return there
        queue: TenantQueue[T] = TenantQueue(leaf, key, self._overtaken_max)
        row: SortedRow = queue
        node = leaf
        while True:
            if not node.rows and node.parent is not None:
                node.round = max(node.round + node.owed / node.weight, node.parent.now - self.quantum)
                node.owed = 0.0
            node.add_row(key, row)
            if node.parent is None:
                return queue
            node = node.parent
            ring = node.rows.get(key)
            if ring is not None:
                assert isinstance(ring, Ring)
                ring.enter(row)
                return queue
            ring = Ring(node, key)
            ring.enter(row)
            row = ring

    def _end(self, row: SortedRow) -> None:
        """Drop an empty row, and the rings above that become empty with it."""
        while True:
            row.node.drop_row(row.key)
            above = row.above
            if above is None:
                return
            above.discard(row)
            if above.size:
                return
            row = above

    def _leaf(self, path: Path) -> FairNode:
        found = self._leaves.get(path)
        if found is not None:
            return found
        node = self._root
        for depth, name in enumerate(path, 1):
            child = node.children.get(name)
            if child is None:
                weight = self.weights.get("/".join(path[:depth]), 1.0)
                self._positions += 1
                child = node.children[name] = FairNode(path[:depth], weight, node, self._positions)
            node = child
        self._leaves[path] = node
        return node


def _holds_least(node: FairNode, keys: Sequence[int], held: HeldNode) -> FairNode:
    """The child that holds least for its weight, of those with something under one of these keys; of equals, the one whose turn
    comes first. Looks at the first `COMPARED_MAX` in the order of turns, which have waited longest."""
    best, least, holders = None, inf, held.children
    for _, _, child in islice(node.order, COMPARED_MAX):
        there = holders.get(child.name)
        if there is None:
            if not child.rows.keys().isdisjoint(keys):
                return child
        elif there.share < least and not child.rows.keys().isdisjoint(keys):
            best, least = child, there.share
    return best or node.first(keys)


def where_they_part(one: FairNode, other: FairNode) -> tuple[FairNode, FairNode]:
    """The two siblings above (or at) these tenants that compete with each other."""
    while one.parent is not other.parent:
        assert one.parent is not None and other.parent is not None
        one, other = one.parent, other.parent
    return one, other
