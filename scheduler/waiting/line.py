"""The requests that wait for a place in one model's queue: what comes before a new one, until when each may wait, and who gives
way when there are too many. Pure.

The size of what waits counts requests and tokens together: a request adds its prompt's tokens and its part of the room for
requests (`queue_tokens_max / queue_requests_max`). So a million tiny requests count, and so do a few huge ones.

A request with a deadline is looked at when it has to start at the latest: the deadline minus the time that the fastest prefill
worker takes for the prompt, because a prompt runs on one worker. If that is too late by then, it ends. If more of its prompt is
cached, it is looked at again later.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from math import inf
from typing import TypeVar

from proto.messages import Submit
from scheduler.fairness.fair_node import SPARE, Path
from scheduler.limits import SchedulerLimits
from scheduler.request import Request
from scheduler.waiting.tenant_work import SIZE, WAITING, TenantWork

K = TypeVar("K")
_RESUMED = ""  # the class of later attempts, which have a longest wait of their own: no priority class is called that


class WaitingLine:
    """A change costs O(log n), a question O(classes). The owner checks its bounds first."""

    def __init__(self, limits: SchedulerLimits, weights: dict[str, float]) -> None:
        self.limits = limits
        self.work = TenantWork(weights)
        self.tokens = 0  # prompt tokens of all that wait
        self.since: float | None = None
        """The time since which some work has always been waiting; None: there is none."""
        self.nothing_due_before = 0.0
        """A lower bound of `next_due`. Requests that leave only make `next_due` later."""
        self._request_size = max(round(limits.queue_tokens_max / limits.queue_requests_max), 1)
        self._classes: dict[str, OrderedDict[str, Request]] = {}  # all that wait by priority class, oldest first
        self.tenants: dict[Path, OrderedDict[str, Request]] = {}  # those in their first attempt, oldest first
        self._borrowed: dict[str, OrderedDict[str, Request]] = {}  # the borrowed ones of those, by priority class
        self._deadlines: list[tuple[float, int, Request, int]] = []
        """A heap: when each request with a deadline is looked at, its number here, and its attempt. Some have left."""
        self._number = 0
        self._most_deadlines = SPARE  # those that have left are taken out when there are more entries

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, oldest first."""
        return merge(*(one.values() for one in self._classes.values()), key=lambda request: request.since)

    def replace_limits(self, limits: SchedulerLimits, weights: dict[str, float]) -> None:
        self.limits, self.nothing_due_before = limits, 0.0
        self.work.reweigh(weights)

    # --- in and out -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request that waits since `request.since`, with `request.work`."""
        self._classes.setdefault(_class_of(request), OrderedDict())[request.id] = request
        self._count(request, request.submit.prompt_tokens - request.uncomputed_tokens, 1, self._list(request, 1))
        request.uncomputed_tokens = request.submit.prompt_tokens
        self.nothing_due_before = min(self.nothing_due_before, request.since + self.limit_s(request))

    def remove(self, request: Request) -> None:
        """Take a request out. Its tokens that are not computed still count as such."""
        del self._classes[_class_of(request)][request.id]
        self._count(request, 0, -1, self._list(request, -1))

    def pause(self, request: Request) -> None:
        """Do not count its work as work before others."""
        self._count(request, -request.uncomputed_tokens, -1)
        request.uncomputed_tokens = 0

    def resume(self, request: Request) -> None:
        request.uncomputed_tokens = request.submit.prompt_tokens
        self._count(request, request.uncomputed_tokens, 1)

    def _count(self, request: Request, uncomputed: int, sign: int, size: int = 0) -> None:
        if not self.work.total(WAITING):
            self.since = request.since
        work = sign * request.work
        self.work.add(request.path, (uncomputed, work, work, size), urgent=request.first_token_ms > 0)
        if not self.work.total(WAITING):
            self.since = None

    def _list(self, request: Request, sign: int) -> int:
        """Add a request to those that may give way, or (`sign` -1) take it out. Returns by how much the size changes."""
        self.tokens += sign * request.submit.prompt_tokens
        if request.submit.attempt > 1:
            return 0  # its client has had tokens already
        _keep(self.tenants, request.path, request, sign)
        if request.borrowed:
            _keep(self._borrowed, request.path[0], request, sign)
        return sign * self._size(request)

    def count_uncomputed(self, request: Request, tokens: int) -> None:
        """Set how many tokens of its prompt are still to be computed."""
        self.work.add(request.path, (tokens - request.uncomputed_tokens, 0, 0, 0), urgent=request.first_token_ms > 0)
        request.uncomputed_tokens = tokens

    def waiting(self, path: Path) -> int:
        """Returns how many requests of a tenant wait in their first attempt."""
        return len(self.tenants.get(path, ()))

    def oldest_since(self) -> dict[str, float]:
        """When the oldest request came, for each priority class in which something waits. Later attempts are under ""."""
        return {name: next(iter(one.values())).since for name, one in self._classes.items() if one}

    # --- until when each may wait ---------------------------------------------------------------------------------------

    def limit_s(self, request: Request) -> float:
        return self._limit_s(_class_of(request))

    def _limit_s(self, name: str) -> float:
        if name == _RESUMED:
            return self.limits.resumed_wait_s_max
        priority_class = self.limits.priority_classes.get(name)
        own = None if priority_class is None else priority_class.queue_wait_s
        return self.limits.queue_wait_s_max if own is None else own

    def watch_deadline(self, request: Request, tokens_per_s: float = 0.0) -> None:
        """Look at a request that waits, or has chunks left, when its deadline comes. `tokens_per_s`: of the fastest prefill
        worker; 0: not known. Each attempt is entered once for as long as it waits."""
        if request.deadline is None:
            return
        self._look_at(_latest_start(request, request.submit.prompt_tokens, tokens_per_s), request)
        if len(self._deadlines) > self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if _is_there(entry)]
            heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + SPARE

    def _look_at(self, at: float, request: Request) -> None:
        self._number += 1
        self.nothing_due_before = min(self.nothing_due_before, at)
        heappush(self._deadlines, (at, self._number, request, request.attempt))

    def next_due(self) -> float | None:
        """When the next request has to be looked at."""
        while self._deadlines and not _is_there(self._deadlines[0]):
            heappop(self._deadlines)
        ends = [since + self._limit_s(name) for name, since in self.oldest_since().items()]
        return min([*ends, *(entry[0] for entry in self._deadlines[:1])], default=None)

    def overdue(self, now: float, tokens_per_s: float, uncached: Callable[[Submit], int]) -> Iterator[Request]:
        """Yields requests that waited too long, and those whose deadlines cannot be met any more. The caller ends each."""
        while (due := self.next_due()) is not None and due <= now:
            if self._deadlines and self._deadlines[0][0] == due:
                request = heappop(self._deadlines)[2]
                start = _latest_start(request, uncached(request.submit), tokens_per_s)
                if start > now:
                    self._look_at(start, request)
                    continue
            else:
                oldest = (next(iter(one.values())) for one in self._classes.values() if one)
                request = next(one for one in oldest if one.since + self.limit_s(one) <= now)
            yield request
        self.nothing_due_before = inf if due is None else due

    # --- who gives way --------------------------------------------------------------------------------------------------

    def make_room(self, newcomer: Request, lowest_first: Sequence[str]) -> list[Request] | None:
        """Returns the requests that give way so that the queue has room for `newcomer`; None: it is the newcomer that goes.
        `lowest_first`: the priority classes. Nothing is taken out."""
        limits, chosen = self.limits, list[Request]()
        while (
            len(self) - len(chosen) >= limits.queue_requests_max
            or self.tokens + newcomer.submit.prompt_tokens > limits.queue_tokens_max
        ):
            first = self._gives_way(newcomer, lowest_first)
            if first is None:
                break
            self.work.add(first.path, (0, 0, 0, self._list(first, -1)))
            chosen.append(first)
        else:
            first = newcomer
        for request in reversed(chosen):
            self.work.add(request.path, (0, 0, 0, self._list(request, 1)))
        return None if first is None else chosen

    def _gives_way(self, newcomer: Request, lowest_first: Sequence[str]) -> Request | None:
        """The request that goes first: the newest borrower of the newcomer's priority class or a lower one, else in the lowest
        priority class the newest request of the tenant with most for its weight."""
        own = newcomer.path[0]
        for name in () if newcomer.borrowed else lowest_first[: lowest_first.index(own) + 1]:
            if borrowed := self._borrowed.get(name):
                return next(reversed(borrowed.values()))
        for name in lowest_first:
            organisation = self.work.largest((name,), SIZE)
            if organisation is None and name != own:
                continue
            if name == own:
                organisation = self._larger_than(newcomer.path[:2], newcomer) or newcomer.path[:2]
                if organisation == newcomer.path[:2] and not self._larger_than(newcomer.path, newcomer):
                    return None
            assert organisation is not None
            tenant = self.work.largest(organisation, SIZE)
            return next(reversed(self.tenants[tenant].values())) if tenant is not None else None
        return None

    def _larger_than(self, path: Path, newcomer: Request) -> Path | None:
        """The sibling with most for its weight, if that is more than `path` would have with the newcomer."""
        most = self.work.largest(path[:-1], SIZE)
        if most is None or most == path:
            return None
        own = self.work.per_weight(path, SIZE, self._size(newcomer))
        return most if self.work.per_weight(most, SIZE) > own else None

    def _size(self, request: Request) -> int:
        return request.submit.prompt_tokens + self._request_size


def _keep(table: dict[K, OrderedDict[str, Request]], key: K, request: Request, sign: int) -> None:
    if sign > 0:
        table.setdefault(key, OrderedDict())[request.id] = request
        return
    del table[key][request.id]
    if not table[key]:
        del table[key]


def _class_of(request: Request) -> str:
    return _RESUMED if request.submit.attempt > 1 else request.path[0]


def _is_there(entry: tuple[float, int, Request, int]) -> bool:
    """Whether this attempt still waits or has something to dispatch."""
    _, _, request, attempt = entry
    return request.attempt == attempt and (request.entry is not None or request.waits)


def _latest_start(request: Request, tokens: int, tokens_per_s: float) -> float:
    """When a request that waits has to start with `tokens` to compute. Later attempts, and what has started, may go on until
    the deadline."""
    assert request.deadline is not None
    starts = request.waits and request.attempt == 1 and tokens_per_s > 0
    return request.deadline - tokens / tokens_per_s if starts else request.deadline
