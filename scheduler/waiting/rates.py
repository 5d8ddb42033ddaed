"""How much there is per second, and how far estimates are off. Pure."""

from bisect import bisect_left
from collections.abc import Iterator
from math import exp
from typing import Final

_TAU_S = 10.0


class Rate:
    """Exponentially weighted, right from the first second on."""

    __slots__ = ("_amount", "_at", "_since")

    def __init__(self, now: float) -> None:
        self._amount, self._at, self._since = 0.0, now, now

    def add(self, amount: float, now: float) -> None:
        self._amount = self._amount * exp((self._at - now) / _TAU_S) + amount
        self._at = now

    def per_s(self, now: float) -> float:
        seen_s = max(now - self._since, 1.0)
        return self._amount * exp((self._at - now) / _TAU_S) / (_TAU_S * (1 - exp(-seen_s / _TAU_S)))


BOUNDS: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)


class Ratios:
    """A histogram: 1 is a right estimate, 2 is twice what was expected."""

    __slots__ = ("_counts", "sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, ratio: float) -> None:
        self._counts[bisect_left(BOUNDS, ratio)] += 1
        self.sum += ratio

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, how many are no larger)."""
        total = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self._counts, strict=True):
            total += count
            yield str(bound), total
