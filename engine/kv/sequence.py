"""The block table of one sequence: growing by one token, forking by reference, copying on write. Pure."""

from collections.abc import Sequence

from engine.kv.allocator import BlockAllocator
from proto.parts import Returns

BlockCopy = tuple[int, int]  # (source, target): copy this block's KV before the next forward writes to the target


class SequenceBlocks:
    """Holds one reference to each block of its table, until `release`.

    `length` is the number of tokens whose KV is (or is about to be) in the table; slots past it are spare.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, blocks: Sequence[int] = (), length: int = 0) -> None:
        """Takes over one reference to each of `blocks`, which the caller has allocated."""
        assert block_size >= 1 and 0 <= length <= len(blocks) * block_size, (block_size, length, len(blocks))
        self._allocator = allocator
        self._block_size = block_size
        self.table = list(blocks)
        self.length = length

    @property
    def needs_block(self) -> bool:
        """Whether one more token may take a block: there is no spare slot, or its block is shared."""
        index = self.length // self._block_size
        return index == len(self.table) or self._allocator.refs(self.table[index]) > 1

    @property
    def room(self) -> int:
        return self._allocator.free_count + self._allocator.cached_count

    def append_slot(self) -> BlockCopy | None:
        """Makes room for one more token and counts it. The slot's block is this sequence's alone afterwards.

        Returns the copy to make first when that block was shared. Raises OutOfBlocks, changing nothing.
        """
        index = self.length // self._block_size
        copy = None
        if index == len(self.table):
            self.table.extend(self._allocator.allocate(1))
        elif self._allocator.refs(self.table[index]) > 1:
            source, target = self.table[index], self._allocator.allocate(1)[0]
            self._allocator.free([source])
            self.table[index] = target
            copy = (source, target)
        self.length += 1
        return copy

    def fork(self) -> "SequenceBlocks":
        """A second sequence over the same blocks, by reference: the used ones; spare blocks stay with this one."""
        used = self.table[: -(-self.length // self._block_size)]
        self._allocator.share(used)
        return SequenceBlocks(self._allocator, self._block_size, used, self.length)

    def release(self, returns: Returns | None = None) -> None:
        """Gives every reference back, as `BlockAllocator.free`; idempotent."""
        self._allocator.free(self.table, returns)
        self.table = []
        self.length = 0
