"""Requests that wait for one prefill worker that has their prompt cached or is faster, and when waiting does not pay. Pure.

A request that waits for the worker with its prefix loses time. Computing the prefix elsewhere costs once, and later requests
need not wait. So the waits for a prefix are added up. Once they reach the cost of computing it, the next request computes it
on the worker that asks. That is never worse than twice the best choice in hindsight (Karlin et al., 1988). Older waits count
less. If the prefixes that requests wait for exceed half of what a worker can keep, one more copy would evict another prefix,
so waits do not count at all.
"""

from collections import OrderedDict
from collections.abc import Mapping
from math import exp
from typing import NamedTuple

from scheduler.request import Request
from scheduler.workers.wakeups import Wakeups
from scheduler.workers.worker import PrefillWorker, Worker

_TAU_S = 10.0
_KEPT_S = 2 * _TAU_S
_PREFIXES_MAX = 4096


class Bindings:
    def __init__(self, prefill: Mapping[int, PrefillWorker], workers: Mapping[int, Worker], wakeups: Wakeups) -> None:
        self._prefill, self._workers, self._wakeups = prefill, workers, wakeups
        self._count = 0
        self.hosts: dict[int, None] = {}  # workers to which requests are bound, longest first

    def bind(self, request: Request, prefill: Worker) -> None:
        """Count the request among what waits for this worker."""
        self.unbind(request)
        attempt_progress = request.attempt_progress
        attempt_progress.bound_to = prefill.incarnation
        attempt_progress.moves += 1
        prefill.bound[request.id] = request
        prefill.expect(request)
        self._count += 1
        self.hosts[prefill.incarnation] = None
        self._wakeups.has_own_work(prefill)

    def unbind(self, request: Request) -> None:
        bound_to = request.attempt_progress.bound_to
        if not bound_to:
            return
        request.attempt_progress.bound_to = 0
        self._count -= 1
        worker = self._workers[bound_to]
        worker.expect_no_more(request)
        if not worker.bound:
            self.hosts.pop(bound_to, None)

    def kept_waiting(self, prefill: Worker, waiting: int) -> float:
        """Returns how many requests wait a second longer for each further second of computing on this worker. `waiting`:
        requests that wait in the pool."""
        return (waiting - self._count) / len(self._prefill) + len(prefill.bound)


class _Wait(NamedTuple):
    waited_s: float
    at: float
    tokens: int


class PrefixWaits:
    """Seconds that requests have waited lately for a prefix, by its last block."""

    def __init__(self) -> None:
        self._waits: OrderedDict[bytes, _Wait] = OrderedDict()  # oldest first
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waits)

    def of(self, prefix: bytes, room_tokens: int, now: float) -> float:
        """Returns the seconds waited lately for a prefix. `room_tokens`: KV that the worker that may compute it can keep."""
        found = self._waits.get(prefix)
        if found is None or 2 * self._tokens > room_tokens:
            return 0.0
        return found.waited_s * exp((found.at - now) / _TAU_S)

    def add(self, prefix: bytes, tokens: int, seconds: float, now: float) -> None:
        before = self._waits.pop(prefix, _Wait(0.0, now, 0))
        waited_s = before.waited_s * exp((before.at - now) / _TAU_S) + seconds
        self._waits[prefix] = _Wait(waited_s, now, tokens)
        self._tokens += tokens - before.tokens
        oldest = next(iter(self._waits.values()))
        while oldest.at < now - _KEPT_S or len(self._waits) > _PREFIXES_MAX:
            self._tokens -= self._waits.popitem(last=False)[1].tokens
            oldest = next(iter(self._waits.values()))

    def computed(self, prefix: bytes) -> None:
        """Reset the waits for a prefix, since it is computed once more."""
        found = self._waits.get(prefix)
        if found is not None:
            self._waits[prefix] = found._replace(waited_s=0.0)
