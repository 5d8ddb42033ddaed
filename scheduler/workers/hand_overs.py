"""The cost of handing KV over to a decode worker, and when that pays. Pure.

A hand-over takes `base + block_s * blocks`, as measured, within a host and between hosts: the part that prefill did not hide. A
decode worker that lacks the beginning of a prompt costs `block_s` for each block more.

Each placement on a fuller decode worker forgoes a difference in load. The least full worker is credited with it, and the credit
pays for blocks that it lacks. So a worker that lacks only what all prompts share gets it soon, however slow the network is, and
no more time is spent on hand-overs than load was forgone. Old credit counts less.
"""

from math import exp
from typing import Final

import msgspec

GAIN: Final = 1 / 32  # the least weight of a new measurement
RIDGE: Final = 0.1
"""Weight of the assumption that a hand-over takes time only for its blocks, while all are of about one size."""
TAU_S: Final = 10.0


class _Link(msgspec.Struct, gc=False):
    """Means over the last hand-overs."""

    block_s: float
    count: int = 0
    blocks: float = 0.0
    seconds: float = 0.0
    blocks_squared: float = 0.0
    product: float = 0.0

    def add(self, blocks: int, seconds: float) -> None:
        self.count += 1
        gain = max(1 / self.count, GAIN)
        self.blocks += gain * (blocks - self.blocks)
        self.seconds += gain * (seconds - self.seconds)
        self.blocks_squared += gain * (blocks * blocks - self.blocks_squared)
        self.product += gain * (blocks * seconds - self.product)
        ridge = RIDGE * self.blocks * self.blocks
        covariance = self.product - self.blocks * self.seconds + RIDGE * self.blocks * self.seconds
        self.block_s = max(covariance / (self.blocks_squared - self.blocks * self.blocks + ridge), 0.0)


class HandOvers:
    def __init__(self, block_s: float, remote_block_s: float) -> None:
        """Takes the seconds for a block while nothing is measured: within a host, and between hosts."""
        self._links = {False: _Link(block_s), True: _Link(remote_block_s)}
        self._credits: dict[int, tuple[float, float]] = {}
        """The seconds of each decode worker that has some, and since when."""

    def block_s(self, one_host: str, other_host: str) -> float:
        return self._links[one_host != other_host].block_s

    def measured(self, one_host: str, other_host: str, blocks: int, ms: float) -> None:
        if blocks > 0:
            self._links[one_host != other_host].add(blocks, ms / 1000)

    def credit_s(self, incarnation: int, now: float) -> float:
        seconds, since = self._credits.get(incarnation, (0.0, now))
        return seconds * exp((since - now) / TAU_S)

    def forgo(self, incarnation: int, seconds: float, now: float) -> None:
        """Credit the least full worker, since a fuller one was chosen."""
        self._credits[incarnation] = self.credit_s(incarnation, now) + seconds, now

    def spend(self, incarnation: int, seconds: float, now: float) -> None:
        """A worker gets blocks that it lacks."""
        left_s = self.credit_s(incarnation, now) - seconds
        if left_s > 0:
            self._credits[incarnation] = left_s, now
        else:
            self._credits.pop(incarnation, None)

    def leave(self, incarnation: int) -> None:
        self._credits.pop(incarnation, None)
