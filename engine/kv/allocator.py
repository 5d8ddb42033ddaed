"""The holders of each KV block. Pure: numbers only, no tensors.

Every block is in exactly one state: free, held (with a reference count of one or more), cached (nobody holds it, but it holds
a known prefix, until the room is needed), or quarantined (a receive into it is not proven dead, so nobody may have it).
Conservation: free + held + cached + quarantined = total.

Each role of a mixed worker has its own allocator over one shared `BlockPool`, so blocks cached by one role serve the other
too. Each allocator has its own limit, and both together never hold more blocks than the pool has.
"""

from collections.abc import Iterable, Sequence

from engine.kv.prefix_tree import PrefixTree
from proto.errors import CrossdockError
from proto.parts import Returns


class OutOfBlocks(CrossdockError):
    """Fewer free and cached blocks than asked for; nothing was taken."""


class BlockPool:
    """The blocks that one or more allocators hand out. Low numbers go out first, in order, so that runs of blocks and thus KV
    segments are long."""

    def __init__(self, total: int) -> None:
        assert total >= 1, total
        self.total = total
        self.free = list(reversed(range(total)))
        self.prefixes = PrefixTree()
        self.holders: dict[int, int] = {}  # allocators of each held block
        self.quarantined: set[int] = set()

    def take(self, count: int) -> list[int]:
        while count > len(self.free):
            self.free += self.prefixes.evict()
        return [self.free.pop() for _ in range(count)]

    def hold(self, block: int) -> None:
        self.prefixes.hold(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    def release(self, block: int, returns: Returns | None) -> None:
        """Record that an allocator no longer holds this block. After the last holder, the prefix tree decides whether the
        block stays cached or becomes free."""
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]
            if not self.prefixes.release(block, returns):
                self.free.append(block)

    def check_invariants(self) -> None:
        """Asserts conservation, and that no block is in two states."""
        free, held = set(self.free), set(self.holders)
        cached = set(self.prefixes.idle)
        states = (free, held, cached, self.quarantined)
        assert len(free) == len(self.free), "a block is free twice"
        assert all(count >= 1 for count in self.holders.values()), "a held block has no reference"
        assert sum(map(len, states)) == self.total, "a block is in two states, was lost, or made up"
        assert set().union(*states) == set(range(self.total)), "blocks were lost or made up"
        self.prefixes.check_invariants(held)


class BlockAllocator:
    """Hands out the blocks of a pool to one role, up to `total` at once."""

    def __init__(self, total: int, pool: BlockPool | None = None) -> None:
        """`pool` is a pool shared with other allocators; without it, the allocator has its own."""
        self.pool = pool or BlockPool(total)
        assert 1 <= total <= self.pool.total, (total, self.pool.total)
        self.total = total
        self._prefixes = self.pool.prefixes
        self._changes = self._prefixes.follow()
        self._refs: dict[int, int] = {}
        self._quarantined: set[int] = set()

    def close(self) -> None:
        """Stop following changes of the pool, when the role ends."""
        self._prefixes.unfollow(self._changes)

    @property
    def room(self) -> int:
        """How many blocks it can give out, cached ones included."""
        left = self.total - len(self._refs) - len(self._quarantined)
        return min(left, len(self.pool.free) + len(self._prefixes.idle))

    @property
    def free_count(self) -> int:
        return self.room - self.cached_count

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds and whose contents are kept: they count as room, since they are given up when needed."""
        return min(len(self._prefixes.idle), self.room)

    @property
    def held_count(self) -> int:
        return len(self._refs)

    @property
    def quarantined_count(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference, cached ones given up as needed. Raises OutOfBlocks, taking nothing, when
        there are fewer."""
        assert count >= 0, count
        room = self.room
        if count > room:
            raise OutOfBlocks(f"{count} KV blocks wanted, {room} of {self.total} free")
        taken = self.pool.take(count)
        ones = dict.fromkeys(taken, 1)
        self.pool.holders.update(ones)
        self._refs.update(ones)
        return taken

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of hashes, each with one reference more. They are never to be
        written to."""
        blocks = self._prefixes.longest(hashes)
        for block in blocks:
            if block not in self._refs:
                self.pool.hold(block)
            self._refs[block] = self._refs.get(block, 0) + 1
        return blocks

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int], start: int = 0) -> None:
        """Make a chain known: these held blocks are full, change no more, and hold what the hashes stand for. The first
        `start` were inserted before. Where a hash is known already, the block that stands for it stays."""
        assert all(block in self._refs for block in blocks[start:]), "a block that is not held gets a hash"
        self._prefixes.insert(hashes, blocks, start)

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove these blocks, and blocks that continue them, from the prefix tree, because their contents are suspect."""
        self.pool.free += self._prefixes.forget(blocks)

    def end(self, hashes: Sequence[bytes]) -> None:
        """Free the idle blocks that belong only to an ended conversation. `hashes` are those of its last prompt."""
        last = next((hash_ for hash_ in reversed(hashes) if hash_ in self._prefixes), None)
        if last is not None:
            self.pool.free += self._prefixes.end(last)

    def tick(self, now: float) -> None:
        self._prefixes.idle.now = now

    def knows(self, hash_: bytes) -> bool:
        return hash_ in self._prefixes

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """(hashes inserted, hashes evicted) since the last report, joined; at most `most` in all."""
        return self._changes.take(most)

    def report_all(self) -> None:
        """Make the next reports name every known hash, because the coordinator has restarted."""
        self._changes.begin(self._prefixes.hashes)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each of these held blocks."""
        for block in blocks:
            assert block in self._refs, f"block {block} is shared but not held"
            self._refs[block] += 1

    def free(self, blocks: Sequence[int], returns: Returns | None = None) -> None:
        """Drop one reference to each block. Blocks without references become cached, if their hash is known, else free. The
        order makes tails be evicted before heads, and free blocks be handed out in ascending order. `returns` is that of the
        tenant that used them; None: that of the last use."""
        for block in reversed(blocks):
            assert block in self._refs, f"block {block} is freed but not held"
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self.pool.release(block, returns)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Takes held blocks with a single reference out of use until `unquarantine`."""
        for block in blocks:
            references = self._refs.get(block, 0) + self.pool.holders.get(block, 0) - 1
            assert references == 1, f"block {block} is quarantined with {references} references"
            self.forget([block])
            del self._refs[block], self.pool.holders[block]
            self._quarantined.add(block)
            self.pool.quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks, once nothing can write to them any more."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
            self.pool.quarantined.remove(block)
            self.pool.free.append(block)

    def refs(self, block: int) -> int:
        """This allocator's references to a block; 0 when it does not hold it."""
        return self._refs.get(block, 0)

    def is_quarantined(self, block: int) -> bool:
        return block in self._quarantined

    def check_invariants(self) -> None:
        """Asserts those of the pool, and that what this allocator holds is held there."""
        self.pool.check_invariants()
        assert all(count >= 1 for count in self._refs.values()), "a held block has no reference"
        assert set(self._refs) <= set(self.pool.holders) and self._quarantined <= self.pool.quarantined
        assert len(self._refs) + len(self._quarantined) <= self.total
