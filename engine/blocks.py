"""Who holds which KV block. Pure: numbers only, no tensors.

Every block is in exactly one state: free, held (with a reference count of one or more), or quarantined (a receive into it
is not proven dead, so nobody may have it). Conservation: free + held + quarantined = total.
"""

from collections.abc import Iterable

from proto.errors import CrossdockError


class OutOfBlocks(CrossdockError):
    """Fewer free blocks than asked for; nothing was taken."""


class BlockAllocator:
    """Hands out block numbers 0 … total - 1. Low numbers first, in runs as long as they come, so that KV segments are long."""

    def __init__(self, total: int) -> None:
        assert total >= 1, total
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._refs: dict[int, int] = {}
        self._quarantined: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def held_count(self) -> int:
        return len(self._refs)

    @property
    def quarantined_count(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference. Raises OutOfBlocks, taking nothing, when there are fewer."""
        assert count >= 0, count
        if count > len(self._free):
            raise OutOfBlocks(f"{count} KV blocks wanted, {len(self._free)} of {self.total} free")
        taken = [self._free.pop() for _ in range(count)]
        self._refs.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block in blocks:
            assert block in self._refs, f"block {block} is shared but not held"
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each; those without any left become free, in such an order that they go out again ascending."""
        freed = [block for block in blocks if self._drop(block)]
        self._free.extend(reversed(freed))

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Takes held blocks with a single reference out of use until `unquarantine`."""
        for block in blocks:
            assert self._refs.get(block) == 1, (
                f"block {block} is quarantined with {self._refs.get(block, 0)} references"
            )
            del self._refs[block]
            self._quarantined.add(block)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks, once nothing can write to them any more."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
            self._free.append(block)

    def refs(self, block: int) -> int:
        """References to a block; 0 when it is free or quarantined."""
        return self._refs.get(block, 0)

    def check_invariants(self) -> None:
        """Asserts conservation, and that no block is in two states."""
        free, held = set(self._free), set(self._refs)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(count >= 1 for count in self._refs.values()), "a held block has no reference"
        assert not free & held and not free & self._quarantined and not held & self._quarantined, (
            "a block is in two states"
        )
        assert free | held | self._quarantined == set(range(self.total)), "blocks were lost or made up"

    def _drop(self, block: int) -> bool:
        assert block in self._refs, f"block {block} is freed but not held"
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        del self._refs[block]
        return True
