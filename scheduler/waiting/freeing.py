"""How fast held amounts come free, and which requests were told to come back for them. Pure.

By Little's law, as much comes free per second as is held, divided by the mean time for which it is held. That time is learnt
from what has come free. So the rate is known as soon as something is full, whatever limits it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from xxhash import xxh3_64_intdigest

T = TypeVar("T")
KEPT = 1 - 1 / 32  # weight of what was learnt before, after one more
TOLD_MAX = 65_536
FINGERPRINT_MAX = 0xFFFF
AWAITED_S = 60.0
"""A client may come so much later than it was told: waits are told up to 600 s, and clients add jitter of a tenth."""
EXPIRED_MAX = 64  # entries dropped in one call, so that its cost is bounded; each call adds one at most


def fingerprint(prompt: bytes) -> int:
    """Recognises a tenant's request when it comes again, since its id is another one then. It is written to event logs, so it
    is too short to tell what a prompt said."""
    return xxh3_64_intdigest(prompt) & FINGERPRINT_MAX


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

    def wait_s(self, amount: float, now: float, usual_s: float = 0.0) -> float:
        """Returns seconds until `amount` more has come free. If nothing has come free for a while, it is at least that while
        again. `usual_s`: the assumed holding time while nothing was learnt."""
        if not self.held or amount <= 0:
            return 0.0
        quiet_s = now - self._freed_at
        mean_s = max(self._mean_s if self._seen else usual_s, quiet_s)
        return max(amount * mean_s / self.held, quiet_s)


class ComingBack(Generic[T]):
    """Requests that were rejected and told when to come again, until then, and for a while after."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Hashable]] = []
        self._told: dict[Hashable, tuple[int, T]] = {}
        self._awaited: OrderedDict[Hashable, float] = OrderedDict()
        """Requests whose time has come, and until when they are awaited."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._told)

    @property
    def is_used(self) -> bool:
        return bool(self._told or self._awaited)

    def tell(self, due: float, who: Hashable, what: T) -> bool:
        """Returns False if it is not kept, since there are too many. `who`: None if it is not known."""
        if len(self._due) >= TOLD_MAX:
            return False
        self._number += 1
        who = self._number if who is None else who
        self._told[who] = self._number, what
        heappush(self._due, (due, self._number, who))
        return True

    def give_up(self, who: Hashable) -> T | None:
        """Forget when a request was told to come."""
        return self._told.pop(who, (0, None))[1]

    def told(self, who: Hashable) -> T | None:
        """Returns the place of a request whose time has not come."""
        return self._told.get(who, (0, None))[1]

    def keep(self, who: Hashable, what: T) -> None:
        """Keep something else for a request that was told when to come."""
        self._told[who] = self._told[who][0], what

    def obeys(self, who: Hashable) -> bool:
        """Whether a request was told a time that has come. It was, once only."""
        return self._awaited.pop(who, None) is not None

    def take_due(self, now: float) -> list[T]:
        """Takes the requests that are due by now, or only some of them if there are many."""
        found = list[T]()
        for _ in range(EXPIRED_MAX):
            if not self._due or self._due[0][0] > now:
                break
            due, number, who = heappop(self._due)
            if who in self._told and self._told[who][0] == number:
                found.append(self._told.pop(who)[1])
                self._awaited[who] = due + AWAITED_S
                self._awaited.move_to_end(who)
        for _ in range(EXPIRED_MAX):
            if not self._awaited or next(iter(self._awaited.values())) > now:
                break
            self._awaited.popitem(last=False)
        return found
