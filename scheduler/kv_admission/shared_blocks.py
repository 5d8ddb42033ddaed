"""Blocks of a decode worker's pool that several attempts hold, each counted once. Pure.

A worker reports how many first blocks of certain chains an attempt holds until it ends (`SharedPrefix`). The attempts alive at
one time together hold as many blocks of a chain as the attempt with the longest part. So an attempt counts a block only if no
attempt that stays at least as long holds it too; its other blocks are *covered*. The sum over the attempts alive at any step
is then the longest part among them, also after some have ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proto.parts import PrefixPart

Key = tuple[str, int]
_NO_PARTS: Mapping[int, int] = {}


@dataclass(eq=False, slots=True)
class _Chain:
    holders: dict[Key, tuple[int, int, Key]] = field(default_factory=dict)
    """The last step at which each attempt may live, the blocks of the chain that it holds, and its key."""
    counting: dict[Key, int] = field(default_factory=dict)
    """How many of its blocks each of these attempts counts; all blocks of other attempts are covered."""

    def covers(self, end: int, blocks: int) -> bool:
        """Whether an attempt that counts holds at least `blocks` until `end` or later."""
        return any(self.holders[key][0] >= end and self.holders[key][1] >= blocks for key in self.counting)

    def settle(self) -> dict[Key, int]:
        """Choose anew which attempts count. Returns how many more blocks of each are covered; negative for attempts that count
        more."""
        before, self.counting, most = self.counting, {}, 0
        left = list(self.holders.values())
        while left:
            _, blocks, key = max(left)
            self.counting[key] = blocks - most
            most = blocks
            left = [one for one in left if one[1] > most]
        keys = dict.fromkeys((*before, *self.counting))
        return {key: before.get(key, 0) - self.counting.get(key, 0) for key in keys}


def chains(parts: Iterable[PrefixPart]) -> dict[int, int]:
    """How many blocks there are of each chain."""
    return {part.chain: part.blocks for part in parts}


class SharedBlocks:
    """`hold`, `moved` and `release` as the worker tells; `settle` before a count is read."""

    def __init__(self) -> None:
        self.stale: set[int] = set()  # chains whose holders have changed so that others may have to count more, or less
        self._chains: dict[int, _Chain] = {}
        self._parts: dict[Key, Mapping[int, int]] = {}

    def hold(self, key: Key, parts: Mapping[int, int], end: int) -> int:
        """Note that an attempt holds exactly these parts until `end`. Returns how many more blocks of it are covered than
        before."""
        before, more = self._parts.get(key, _NO_PARTS), 0
        self._parts[key] = parts
        for number, blocks in before.items():
            if parts.get(number) != blocks:
                more -= self._leave(number, key)
        for number, blocks in parts.items():
            if before.get(number) == blocks:
                continue
            chain = self._chains.get(number)
            if chain is None:
                chain = self._chains[number] = _Chain()
            if chain.covers(end, blocks):
                more += blocks
            else:
                chain.counting[key] = blocks
                if chain.holders:
                    self.stale.add(number)
            chain.holders[key] = end, blocks, key
        return more

    def moved(self, key: Key, end: int) -> None:
        """Set another step at which an attempt ends."""
        for number in self._parts.get(key, _NO_PARTS):
            chain = self._chains[number]
            before, blocks, _ = chain.holders[key]
            chain.holders[key] = end, blocks, key
            if len(chain.holders) > 1 and (end > before or key in chain.counting):
                self.stale.add(number)

    def release(self, key: Key) -> None:
        for number in self._parts.pop(key, _NO_PARTS):
            self._leave(number, key)

    def settle(self) -> dict[Key, int]:
        """Returns by how much each attempt's covered blocks have changed since the last call."""
        changed: dict[Key, int] = {}
        for number in sorted(self.stale):
            for key, more in self._chains[number].settle().items():
                changed[key] = changed.get(key, 0) + more
        self.stale.clear()
        return changed

    def counted_for_others(self, key: Key) -> int:
        """Returns how many blocks an attempt counts that others hold, too, at the most."""
        chains = (self._chains[number] for number in self._parts.get(key, _NO_PARTS))
        return sum(chain.counting.get(key, 0) for chain in chains if len(chain.holders) > 1)

    def _leave(self, number: int, key: Key) -> int:
        """Remove an attempt from a chain. Returns how many of its blocks were covered."""
        chain = self._chains[number]
        _, blocks, _ = chain.holders.pop(key)
        counted = chain.counting.pop(key, 0)
        if not chain.holders:
            del self._chains[number]
            self.stale.discard(number)
        elif counted:
            self.stale.add(number)
        return blocks - counted
