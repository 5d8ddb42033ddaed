"""Orders cached blocks for eviction: the block that is least likely to be used again goes first. Pure.

A block was used last by a tenant of whose turns a share `r` is followed by another one, after `m` seconds in the mean
(`proto.parts.Returns`). After `a` seconds without use it is asked for again with the probability

    r e^(-a/m) / (r e^(-a/m) + 1 - r)

if the times between turns are exponential. One block takes about as long to compute again as another, and as much room, so
that nothing else decides. Tenants are rounded to a few kinds: within a kind, the block that was used longest ago goes first.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, log2
from typing import Final, NamedTuple

from proto.parts import Returns

SHARES: Final = 8  # kinds differ in the share by an eighth, and in the mean time by a factor of four
TIMES: Final = 8


class _Kind(NamedTuple):
    eighths: int
    power_of_four: int

    def probability(self, idle_s: float) -> float:
        share = self.eighths / SHARES
        alive = share * exp(-max(idle_s, 0.0) / 4.0**self.power_of_four)
        return alive / (alive + 1 - share) if alive else 0.0


def _kind(returns: Returns) -> _Kind:
    eighths = min(round(returns.share * SHARES), SHARES - 1)  # nothing is certain to come back
    return _Kind(eighths, min(round(log2(max(returns.mean_s, 1.0)) / 2), TIMES - 1))


class IdleBlocks:
    """Blocks that nobody holds, whose contents are kept."""

    def __init__(self) -> None:
        self.now = 0.0  # in seconds, set by the owner of the blocks
        self._kinds: dict[_Kind, OrderedDict[int, float]] = {}  # of each kind, with the start of idleness, oldest first
        self._kind_of: dict[int, _Kind] = {}
        self._ranked: list[tuple[float, _Kind]] = []
        """A heap of the worth of each kind's first block, computed at `_ranked_at` or later. The worth may have grown since,
        when another block became first. Kinds without blocks may remain in it."""
        self._ranked_at = 0.0

    def __len__(self) -> int:
        return len(self._kind_of)

    def __contains__(self, block: int) -> bool:
        return block in self._kind_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._kind_of)

    def add(self, block: int, returns: Returns) -> None:
        self._add(block, _kind(returns))

    def discard(self, block: int) -> None:
        kind = self._kind_of.pop(block, None)
        if kind is not None:
            blocks = self._kinds[kind]
            del blocks[block]
            if not blocks:
                del self._kinds[kind]

    def used(self, block: int) -> None:
        """Mark an idle block as used just now, although it is not held."""
        kind = self._kind_of[block]
        self.discard(block)
        self._add(block, kind)

    def first(self) -> int:
        """The one to be given up first."""
        if self._ranked_at != self.now:
            self._ranked, self._ranked_at = [(self._worth(kind), kind) for kind in self._kinds], self.now
            heapify(self._ranked)
        while True:
            ranked, kind = self._ranked[0]
            blocks = self._kinds.get(kind)
            if blocks is None:
                heappop(self._ranked)
            elif (worth := self._worth(kind)) > ranked:
                heapreplace(self._ranked, (worth, kind))
            else:
                return next(iter(blocks))

    def keep_with(self, block: int, other: int) -> bool:
        """Keep `block` for at least as long as `other`, if it would be evicted earlier. Returns whether that changed
        anything."""
        mine, theirs = self._kind_of[block], self._kind_of[other]
        since = self._kinds[theirs][other]
        if mine == theirs or theirs.probability(self.now - since) <= self._worth(mine):
            return False
        self.discard(block)
        self._add(block, theirs)
        return True

    def _worth(self, kind: _Kind) -> float:
        return kind.probability(self.now - next(iter(self._kinds[kind].values())))

    def _add(self, block: int, kind: _Kind) -> None:
        self._kind_of[block] = kind
        blocks = self._kinds.get(kind)
        if blocks is None:
            blocks = self._kinds[kind] = OrderedDict()
            heappush(self._ranked, (kind.probability(0.0), kind))
        blocks[block] = self.now
