"""Names the blocks of prompts, so that the coordinator can tell which attempts hold the same blocks. Pure.

The blocks that one attempt brought, and that stand for their hashes in the prefix tree, are a chain with a number of its own.
A block is found by its hash only together with all before it, so a holder of one block of a chain holds those before it too. A
name means nothing for a block that is not in the tree: the block may have been evicted and reused, even by the other role of a
mixed worker.
"""

from collections.abc import Sequence
from typing import NamedTuple

from proto.limits import MAX_PREFIX_PARTS
from proto.parts import PrefixPart


class _Name(NamedTuple):
    hash: bytes  # of the block's content when it got the name
    chain: int
    at: int  # its place among the blocks of the chain


class BlockChains:
    def __init__(self) -> None:
        self._names: dict[int, _Name] = {}  # the last one of each block
        self._chains = 0

    def name(self, hashes: Sequence[bytes], known: Sequence[int], brought: Sequence[int] = ()) -> None:
        """`known` are the tree's blocks for a prompt with these hashes. Of those, `brought` came with it just now, and get new
        names, as do those that have none: a prefill worker in this process, or before this role, has computed them."""
        new, before, newest = set(brought), None, None
        for hash_, block in zip(hashes, known, strict=False):
            name = self._name_of(block, hash_, before)
            if name is None or block in new:
                self._chains += newest is None
                name = newest = _Name(hash_, self._chains, 0 if newest is None else newest.at + 1)
                self._names[block] = name
            else:
                newest = None
            before = name

    def parts(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> tuple[PrefixPart, ...]:
        """Returns the tree's blocks for the beginning of a prompt with these hashes, as parts of chains."""
        counts: list[list[int]] = []
        before = None
        for hash_, block in zip(hashes, blocks, strict=False):
            before = self._name_of(block, hash_, before)
            if before is None:
                break
            if before.at:
                counts[-1][1] += 1
            elif len(counts) < MAX_PREFIX_PARTS:
                counts.append([before.chain, 1])
            else:
                break
        return tuple(PrefixPart(chain, count) for chain, count in counts)

    def _name_of(self, block: int, hash_: bytes, before: _Name | None) -> _Name | None:
        """Returns the block's name if it is still valid: the block has the same hash and follows the same block as when it was
        named."""
        name = self._names.get(block)
        if name is None or name.hash != hash_:
            return None
        return name if not name.at or (before and before[1:] == (name.chain, name.at - 1)) else None
