"""Names for the blocks of prompts, so that the coordinator can tell which attempts hold the same ones. Pure.

The blocks that one attempt brought, and that stand for their hashes in the prefix tree, are a chain with a number of its own.
A block is found by its hash only together with all before it, so whoever holds a block of a chain holds those before it too. A
name says nothing of a block that is not in the tree: it may have been given up, and hold something else by now.
"""

from collections.abc import Sequence

from proto.limits import MAX_PREFIX_PARTS
from proto.parts import PrefixPart


class BlockChains:
    def __init__(self) -> None:
        self._chain_of: dict[int, int] = {}
        """Of blocks that were in the tree when they were brought; the last name of each."""
        self._chains = 0

    def name(self, known: Sequence[int], brought: Sequence[int], start: int) -> None:
        """An attempt has brought these blocks, but for those before `start`, which were here. `known` are the tree's blocks for
        its prompt: its own, where nobody had brought the same before."""
        is_new = False
        for at in range(start, len(brought)):
            block = brought[at]
            self._chain_of.pop(block, None)
            if at < len(known) and known[at] == block:
                self._chains += not is_new
                self._chain_of[block] = self._chains
                is_new = True
            else:
                is_new = False

    def parts(self, blocks: Sequence[int]) -> tuple[PrefixPart, ...]:
        """Blocks of the tree, from the beginning of a prompt on, as parts of chains."""
        counts: list[list[int]] = []
        for block in blocks:
            chain = self._chain_of.get(block)
            if chain is None:
                break
            if counts and counts[-1][0] == chain:
                counts[-1][1] += 1
            elif len(counts) < MAX_PREFIX_PARTS:
                counts.append([chain, 1])
            else:
                break
        return tuple(PrefixPart(chain, count) for chain, count in counts)
