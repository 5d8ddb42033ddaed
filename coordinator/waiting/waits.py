"""Since when each request waits for a place, and which ones have waited too long. Pure."""

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import merge

from coordinator.fairness.sorted_row import SPARE
from coordinator.request import Request
from runtime.tenancy.tenants import PriorityClass

_RESUMED = ""
"""The class of later attempts: no priority class is called that."""


class _Class:
    """Requests with the same longest wait, in the order in which they came to wait. Those that wait no longer stay until they
    are first, or until they are more than those that do."""

    __slots__ = ("came", "name", "since")

    def __init__(self, name: str) -> None:
        self.name = name
        self.came: deque[Request] = deque()
        self.since: deque[float] = deque()

    def first(self) -> float | None:
        """Since when the one that waits longest does."""
        came, since = self.came, self.since
        while came and not self._waits(since[0], came[0]):
            came.popleft()
            since.popleft()
        return since[0] if since else None

    def waiting(self) -> Iterator[tuple[float, Request]]:
        for since, request in zip(self.since, self.came, strict=True):
            if self._waits(since, request):
                yield since, request

    def _waits(self, since: float, request: Request) -> bool:
        """Whether it has waited here from then on: it may have been placed, and come back."""
        return request.waits and since == request.since and _class_of(request) == self.name

    def drop_gone(self) -> None:
        waiting = list(self.waiting())
        self.since = deque(since for since, _ in waiting)
        self.came = deque(request for _, request in waiting)


class Waits:
    """Bounds the wait by priority class. A later attempt has a bound of its own: its client may have had tokens already."""

    def __init__(self, queue_wait_s_max: float, resumed_wait_s_max: float) -> None:
        self.queue_wait_s_max, self.resumed_wait_s_max = queue_wait_s_max, resumed_wait_s_max
        self.priority_classes: Mapping[str, PriorityClass] = {}
        self._classes: dict[str, _Class] = {}
        self._entries = 0
        """As many as were left when those that are gone were last dropped, and those that came since."""

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, oldest first."""
        ordered = merge(*(one.waiting() for one in self._classes.values()), key=lambda entry: entry[0])
        return iter(dict.fromkeys(request for _, request in ordered))

    def limit_s(self, request: Request) -> float:
        return self._limit_s(_class_of(request))

    def add(self, request: Request, waiting: int) -> None:
        """It waits from `request.since` on; `waiting`: how many do now."""
        name = _class_of(request)
        there = self._classes.get(name)
        if there is None:
            there = self._classes[name] = _Class(name)
        there.came.append(request)
        there.since.append(request.since)
        self._entries += 1
        if self._entries > 2 * waiting + SPARE:
            # Behind one that waits long, those that have gone would stay, with all they hold.
            for one in self._classes.values():
                one.drop_gone()
            self._entries = sum(len(one.came) for one in self._classes.values())

    def next_end(self) -> float | None:
        """When the next one will have waited too long."""
        ends = [
            first + self._limit_s(name) for name, one in self._classes.items() if (first := one.first()) is not None
        ]
        return min(ends, default=None)

    def overdue(self, now: float) -> Iterator[Request]:
        """Those that have waited too long; the caller ends each before it asks for the next."""
        for name, one in self._classes.items():
            while (first := one.first()) is not None and first + self._limit_s(name) <= now:
                one.since.popleft()
                yield one.came.popleft()

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
