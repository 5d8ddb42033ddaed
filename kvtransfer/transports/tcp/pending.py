"""Connections that have not proved the key yet: how many may wait, and for how long. Pure.

If there is no room for one more, the oldest is closed: a sender sends its hello at once, so the oldest connection is the least
likely to be a sender.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

C = TypeVar("C")


class PendingConnections(Generic[C]):
    """Connections that have not said who they are: at most `limit` of them, each for at most `timeout_s`."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit, self._timeout_s = limit, timeout_s
        self._deadlines: OrderedDict[C, float] = OrderedDict()  # in the order of arrival, which is their own

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, connection: C, now: float) -> list[C]:
        """Add a connection. Returns the connections to close for it."""
        self._deadlines[connection] = now + self._timeout_s
        return [self.pop_oldest() for _ in range(len(self._deadlines) - self._limit)]

    def pop_oldest(self) -> C:
        """Remove the one that has waited longest; there is at least one."""
        return self._deadlines.popitem(last=False)[0]

    def remove(self, connection: C) -> None:
        del self._deadlines[connection]

    def pop_expired(self, now: float) -> list[C]:
        """Remove those whose time is over."""
        expired = []
        while self._deadlines and next(iter(self._deadlines.values())) <= now:
            expired.append(self.pop_oldest())
        return expired

    def pop_all(self) -> list[C]:
        connections = list(self._deadlines)
        self._deadlines.clear()
        return connections

    def next_deadline(self) -> float | None:
        return next(iter(self._deadlines.values()), None)


def pending_limit(descriptors: int, most: int = 64) -> int:
    """How many may wait in a process that may have so many descriptors: never more than an eighth of them."""
    return max(1, min(most, descriptors // 8))
