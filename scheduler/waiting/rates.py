"""How much there is per second, and how far estimates are off. Pure."""

from bisect import bisect_left
from collections.abc import Iterator
from math import exp
from typing import Final

_TAU_S = 10.0
_KEPT = 1 - 1 / 32  # the weight that a `FreeingRate` gives to what was learnt before, after one more


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


class FreeingRate:
    """How fast one kind of amount, like requests or tokens, comes free.

    By Little's law, as much comes free per second as is held, divided by the mean time for which it is held. That time is
    learnt from what has come free. So the rate is known as soon as something is full, whatever limits it.
    """

    __slots__ = ("_freed_at", "_mean_s", "_seen", "held")

    def __init__(self) -> None:
        self.held = 0
        self._mean_s = self._seen = self._freed_at = 0.0

    def take(self, amount: int, now: float) -> None:
        if not self.held:
            self._freed_at = now
        self.held += amount

    def give_back(self, amount: int, held_s: float, now: float) -> None:
        self.undo(amount)
        self._freed_at = now
        self._seen = self._seen * _KEPT + amount
        if self._seen:
            self._mean_s += (held_s - self._mean_s) * amount / self._seen

    def undo(self, amount: int) -> None:
        """It was not held after all: nothing is learnt."""
        self.held -= amount
        assert self.held >= 0

    def wait_s(self, amount: float, now: float, usual_s: float = 0.0) -> float:
        """Returns seconds until `amount` more has come free. If nothing has come free for a while, it is at least that while
        again. `usual_s`: the assumed holding time while nothing was learnt."""
        if not self.held or amount <= 0:
            return 0.0
        quiet_s = now - self._freed_at
        mean_s = max(self._mean_s if self._seen else usual_s, quiet_s)
        return max(amount * mean_s / self.held, quiet_s)


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
