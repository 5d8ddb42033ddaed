"""Finds waiting requests that cannot meet their deadlines any more, in any order of deadlines. Pure.

Requests are ordered by their latest start: the deadline minus the time that the fastest prefill worker takes for the prompt,
because a prompt runs on one worker. The request with the earliest latest start is the one to look at. How much of a prompt is
cached may change while it waits. So entries begin with the whole prompt, which gives the earliest latest start, and they are
corrected when they come up.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from proto.messages import Submit
from scheduler.fairness.sorted_row import SPARE
from scheduler.request import Request

STEPS_MAX = 64  # entries taken in or looked at in one call, so that its cost is bounded
SLOWER = 0.8
"""Entries are ordered anew when the fastest worker's rate has fallen to this part of what they were ordered with."""


class LatestStarts:
    """When the requests that may be shed must start at the latest: those in their first attempt."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._fresh: list[Request] = []  # not yet in the heap
        self._added = 0
        self._tokens_per_s = 0.0  # the highest rate that an entry was ordered with

    def add(self, request: Request, waiting: int) -> None:
        """Add a request that begins to wait. `waiting`: how many wait now."""
        if request.deadline is None or request.attempt > 1:
            return
        self._fresh.append(request)
        if len(self._heap) + len(self._fresh) > 2 * waiting + SPARE:
            self._begin_anew()

    def first_too_late(self, now: float, tokens_per_s: float, uncached: Callable[[Submit], int]) -> Request | None:
        """Returns a request that would miss its deadline even if the fastest worker began it now; None while no rate is
        measured."""
        if tokens_per_s <= 0:
            return None
        if tokens_per_s < SLOWER * self._tokens_per_s:
            self._begin_anew()
        self._tokens_per_s = max(self._tokens_per_s, tokens_per_s)
        heap = self._heap
        for request in filter(_may_be_shed, self._fresh[-STEPS_MAX:]):
            self._added += 1
            heappush(heap, (_latest_start(request, request.submit.prompt_tokens, tokens_per_s), self._added, request))
        del self._fresh[-STEPS_MAX:]
        for _ in range(STEPS_MAX):
            while heap and not _may_be_shed(heap[0][2]):
                heappop(heap)
            if not heap or heap[0][0] >= now:
                return None
            _, number, request = heap[0]
            start = _latest_start(request, uncached(request.submit), tokens_per_s)
            if start < now:
                return request
            heapreplace(heap, (start, number, request))
        return None

    def _begin_anew(self) -> None:
        self._fresh = [r for r in (*(entry[2] for entry in self._heap), *self._fresh) if _may_be_shed(r)]
        self._heap.clear()
        self._tokens_per_s = 0.0


def _may_be_shed(request: Request) -> bool:
    """Whether an entry is still valid. Entries stay when their request is placed; if it waits again, that is a later
    attempt."""
    return request.waits and request.attempt == 1


def _latest_start(request: Request, tokens: int, tokens_per_s: float) -> float:
    assert request.deadline is not None
    return request.deadline - tokens / tokens_per_s
