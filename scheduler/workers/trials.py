"""Requests that may have ended a decode worker are tried again one by one. Pure.

A decode worker that is lost makes suspects of all its streams, and one of them may be at fault. Each decode worker runs one of
them at a time beside streams that are not suspected, until it has made progress or ends the worker. So a second loss has only
one request that was in both, and the others of each loss clear themselves. Requests that lost one worker go first, the latest
loss first; the others wait until all that ran beside them in their last loss are cleared, since any of those may be at fault.
A suspect that has waited for its trial for `WAITS_S_MAX`, in which no worker was lost or came, waits for room like all others.
"""

from collections.abc import Mapping

from scheduler.request import Request
from scheduler.workers.worker import DecodeWorker

WAITS_S_MAX = 5.0
EXAMINED_MAX = 8


class Trials:
    def __init__(self, decode: Mapping[int, DecodeWorker]) -> None:
        self._workers = decode
        self.waiting: dict[str, Request] = {}  # suspects that wait for a decode worker, by id, longest first
        self.held: set[str] = set()  # ids of the waiting suspects that wait until others are cleared
        self.changed_at = 0.0  # when a worker of the pool was lost or came last
        self.running: dict[str, int] = {}  # ids of placed suspects, each with its decode worker's incarnation

    def concern(self, request: Request, now: float) -> bool:
        """Whether a request that is not placed waits for its trial."""
        if request.suspicion is None or not request.suspicion.in_decode:
            return False
        return request.losses > 1 or now < max(request.since, self.changed_at) + WAITS_S_MAX

    def wait(self, request: Request) -> None:
        self.waiting[request.id] = request
        if request.losses > 1:
            self.held.add(request.id)

    def next(self) -> list[Request]:
        """Returns the suspects to be tried next, first one first."""
        able = [one for one in reversed(self.waiting.values()) if one.entry is not None and one.id not in self.held]
        return sorted(able, key=lambda one: one.losses)[:EXAMINED_MAX]

    def free(self) -> list[DecodeWorker]:
        """Returns the decode workers that run no suspect."""
        busy = set(self.running.values())
        return [worker for worker in self._workers.values() if worker.incarnation not in busy and not worker.draining]

    def overdue(self, now: float) -> list[Request]:
        """Returns the suspects that have waited too long, which end their wait here."""
        found = [one for one in self.waiting.values() if one.entry is not None and not self.concern(one, now)]
        for request in found:
            del self.waiting[request.id]
        return found

    def begin(self, request: Request, decode: DecodeWorker) -> None:
        self.waiting.pop(request.id, None)
        self.running[request.id] = decode.incarnation

    def end(self, request: Request) -> bool:
        """End a request's trial, or its wait for one. Returns whether another may begin."""
        waited, ran = self.waiting.pop(request.id, None), self.running.pop(request.id, None)
        return bool(self.waiting) and (waited is not None or ran is not None)
