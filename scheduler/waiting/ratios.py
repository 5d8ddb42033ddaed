"""How far estimates were off: the real amount divided by the expected one. Pure."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

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
