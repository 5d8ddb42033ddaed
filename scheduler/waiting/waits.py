"""When each request began to wait for a place, and which ones have waited too long. Pure."""

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import chain

from runtime.tenancy.priority_classes import PriorityClass
from scheduler.fairness.sorted_row import SPARE
from scheduler.request import Request

_RESUMED = ""  # the class of later attempts: no priority class is called that

SWEPT_PER_ENTRY = 16
"""How many entries are checked with each new request, during a sweep of entries whose requests are gone."""


class _Class:
    """Requests with the same longest wait, in the order in which they came to wait. Entries of requests that wait no longer
    stay until they come first, or until they outnumber the others."""

    __slots__ = ("came", "kept", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.came: deque[tuple[float, Request]] = deque()  # when each request began to wait
        self.kept: deque[tuple[float, Request]] = deque()
        """Older entries that the sweep in progress has already checked."""

    def __len__(self) -> int:
        return len(self.kept) + len(self.came)

    def oldest(self) -> deque[tuple[float, Request]] | None:
        """Returns the deque that begins with the request that waits longest; None if none waits."""
        for entries in (self.kept, self.came):
            while entries:
                if self._waits(*entries[0]):
                    return entries
                entries.popleft()
        return None

    def waiting(self) -> Iterator[tuple[float, Request]]:
        for since, request in chain(self.kept, self.came):
            if self._waits(since, request):
                yield since, request

    def sweep(self, most: int) -> bool:
        """Check up to `most` entries. Returns whether all have been checked."""
        came, kept = self.came, self.kept
        for _ in range(min(most, len(came))):
            entry = came.popleft()
            if self._waits(*entry):
                kept.append(entry)
        if came:
            return False
        self.came, self.kept = kept, came
        return True

    def _waits(self, since: float, request: Request) -> bool:
        """Whether the request has waited here since `since`. It may have been placed and come back."""
        return request.waits and since == request.since and _class_of(request) == self.name


class Waits:
    """Bounds the wait by priority class. A later attempt has a bound of its own: its client may have had tokens already."""

    def __init__(self, queue_wait_s_max: float, resumed_wait_s_max: float) -> None:
        self.queue_wait_s_max, self.resumed_wait_s_max = queue_wait_s_max, resumed_wait_s_max
        self.priority_classes: Mapping[str, PriorityClass] = {}
        self._classes: dict[str, _Class] = {}
        self._entries = 0  # the number of entries left after the last sweep, plus those added since
        self._swept: list[_Class] = []  # classes that are still to be swept, a few entries with each new request

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, oldest first."""
        ordered = merge(*(one.waiting() for one in self._classes.values()), key=lambda entry: entry[0])
        return iter(dict.fromkeys(request for _, request in ordered))

    def limit_s(self, request: Request) -> float:
        return self._limit_s(_class_of(request))

    def add(self, request: Request, waiting: int) -> None:
        """Add a request that has waited since `request.since`. `waiting`: how many wait now."""
        name = _class_of(request)
        there = self._classes.get(name)
        if there is None:
            there = self._classes[name] = _Class(name)
        there.came.append((request.since, request))
        self._entries += 1
        if not self._swept and self._entries > 2 * waiting + SPARE:
            # Behind a request that waits long, entries of requests that are gone would stay in memory.
            self._swept = list(self._classes.values())
        if self._swept and self._swept[-1].sweep(SWEPT_PER_ENTRY):
            self._swept.pop()
            self._entries = sum(map(len, self._classes.values()))

    def next_end(self) -> float | None:
        """When the next one will have waited too long."""
        ends = [
            oldest[0][0] + self._limit_s(name)
            for name, one in self._classes.items()
            if (oldest := one.oldest()) is not None
        ]
        return min(ends, default=None)

    def oldest_since(self) -> dict[str, float]:
        """When the oldest request came, for each priority class in which something waits. Later attempts are under ""."""
        found = ((name, one.oldest()) for name, one in self._classes.items())
        return {name: oldest[0][0] for name, oldest in found if oldest is not None}

    def overdue(self, now: float) -> Iterator[Request]:
        """Those that have waited too long; the caller ends each before it asks for the next."""
        for name, one in self._classes.items():
            while (oldest := one.oldest()) is not None and oldest[0][0] + self._limit_s(name) <= now:
                yield oldest.popleft()[1]

    def _limit_s(self, name: str) -> float:
        if name == _RESUMED:
            return self.resumed_wait_s_max
        priority_class = self.priority_classes.get(name)
        return (
            self.queue_wait_s_max
            if priority_class is None or priority_class.queue_wait_s is None
            else priority_class.queue_wait_s
        )


def _class_of(request: Request) -> str:
    return _RESUMED if request.submit.attempt > 1 else request.path[0]
