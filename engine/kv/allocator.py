"""Who holds which KV block. Pure: numbers only, no tensors.

Every block is in exactly one state: free, held (with a reference count of one or more), cached (nobody holds it, but it holds
a known prefix, until the room is needed), or quarantined (a receive into it is not proven dead, so nobody may have it).
Conservation: free + held + cached + quarantined = total.
"""

from collections.abc import Iterable, Sequence

from engine.kv.prefix_tree import PrefixTree
from proto.errors import CrossdockError


class OutOfBlocks(CrossdockError):
    """Fewer free and cached blocks than asked for; nothing was taken."""


class BlockAllocator:
    """Hands out the block numbers first … first + total - 1. Low numbers first, in runs as long as they come, so that KV
    segments are long."""

    def __init__(self, total: int, first: int = 0) -> None:
        """`first`: other than 0 where an allocator has only a part of a pool."""
        assert total >= 1 and first >= 0, (total, first)
        self.total = total
        self._numbers = range(first, first + total)
        self._free = list(reversed(self._numbers))
        self._refs: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._prefixes = PrefixTree()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that nobody holds and whose contents are kept: they count as room, since they are given up when needed."""
        return self._prefixes.idle_count

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
        room = len(self._free) + self.cached_count
        if count > room:
            raise OutOfBlocks(f"{count} KV blocks wanted, {room} of {self.total} free")
        while count > len(self._free):
            self._free += self._prefixes.evict()
        taken = [self._free.pop() for _ in range(count)]
        self._refs.update(dict.fromkeys(taken, 1))
        return taken

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of hashes, each with one reference more. They are never to be
        written to."""
        blocks = self._prefixes.longest(hashes)
        for block in blocks:
            self._prefixes.hold(block)
            self._refs[block] = self._refs.get(block, 0) + 1
        return blocks

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int], start: int = 0) -> None:
        """Make a chain known: these held blocks are full, change no more, and hold what the hashes stand for. The first
        `start` were inserted before. Where a hash is known already, the block that stands for it stays."""
        assert all(block in self._refs for block in blocks[start:]), "a block that is not held gets a hash"
        self._prefixes.insert(hashes, blocks, start)

    def forget(self, blocks: Sequence[int]) -> None:
        """What is in these blocks, and in blocks that continue them, is suspect: nobody is to find it any more."""
        self._free += self._prefixes.forget(blocks)

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """(hashes inserted, hashes evicted) since the last report, joined; at most `most` in all."""
        return self._prefixes.take_changes(most)

    def report_all(self) -> None:
        """The next reports name every known hash: whoever is reported to has started anew."""
        self._prefixes.report_all()

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block in blocks:
            assert block in self._refs, f"block {block} is shared but not held"
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One reference less to each; those without any left become cached, where they are known, or free, in such an order
        that tails go before heads and that free blocks go out again ascending."""
        for block in reversed(blocks):
            if self._drop(block) and not self._prefixes.release(block):
                self._free.append(block)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Takes held blocks with a single reference out of use until `unquarantine`."""
        for block in blocks:
            assert self._refs.get(block) == 1, (
                f"block {block} is quarantined with {self._refs.get(block, 0)} references"
            )
            self.forget([block])
            del self._refs[block]
            self._quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks, once nothing can write to them any more."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
            self._free.append(block)

    def refs(self, block: int) -> int:
        """References to a block; 0 when nobody holds it."""
        return self._refs.get(block, 0)

    def is_quarantined(self, block: int) -> bool:
        return block in self._quarantined

    def check_invariants(self) -> None:
        """Asserts conservation, and that no block is in two states."""
        free, held = set(self._free), set(self._refs)
        cached = {block for block in self._numbers if self._prefixes.is_idle(block)}
        states = (free, held, cached, self._quarantined)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(cached) == self.cached_count
        assert all(count >= 1 for count in self._refs.values()), "a held block has no reference"
        assert sum(map(len, states)) == self.total, "a block is in two states, was lost, or made up"
        assert set().union(*states) == set(self._numbers), "blocks were lost or made up"
        self._prefixes.check_invariants(held)

    def _drop(self, block: int) -> bool:
        assert block in self._refs, f"block {block} is freed but not held"
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        del self._refs[block]
        return True
