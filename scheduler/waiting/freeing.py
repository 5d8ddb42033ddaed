"""How fast held amounts come free, and which requests were told to come back for them. Pure.

By Little's law, as much comes free per second as is held, divided by the mean time for which it is held. That time is learnt
from what has come free. So the rate is known as soon as something is full, whatever limits it.
"""

from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 1 - 1 / 32
"""Weight of what was learnt before, after one more."""
TOLD_MAX = 65_536
EXPIRED_MAX = 64
"""Entries dropped in one call, so that its cost is bounded; each call adds one at most."""


class FreeingRate:
    """How fast one kind of amount, like requests or tokens, comes free."""

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
        self._seen = self._seen * KEPT + amount
        if self._seen:
            self._mean_s += (held_s - self._mean_s) * amount / self._seen

    def undo(self, amount: int) -> None:
        """It was not held after all: nothing is learnt."""
        self.held -= amount
        assert self.held >= 0

    @property
    def is_learnt(self) -> bool:
        return self._seen > 0

    @property
    def mean_s(self) -> float:
        """How long each is held, in seconds; 0 before the first has come free."""
        return self._mean_s

    def wait_s(self, amount: float, now: float, usual_s: float = 0.0) -> float:
        """Returns seconds until `amount` more has come free. If nothing has come free for a while, it is at least that while
        again. `usual_s`: the assumed holding time while nothing was learnt."""
        if not self.held or amount <= 0:
            return 0.0
        quiet_s = now - self._freed_at
        mean_s = max(self._mean_s if self._seen else usual_s, quiet_s)
        return max(amount * mean_s / self.held, quiet_s)


class ComingBack(Generic[T]):
    """Requests that were rejected and told when to come again, until then."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, T]] = []
        self._told = 0

    def __len__(self) -> int:
        return len(self._due)

    def tell(self, due: float, what: T) -> bool:
        """Returns False if it is not kept, since there are too many."""
        if len(self._due) >= TOLD_MAX:
            return False
        self._told += 1
        heappush(self._due, (due, self._told, what))
        return True

    def take_due(self, now: float) -> list[T]:
        """Takes the requests that are due by now, or only some of them if there are many."""
        due = list[T]()
        while self._due and self._due[0][0] <= now and len(due) < EXPIRED_MAX:
            due.append(heappop(self._due)[2])
        return due
