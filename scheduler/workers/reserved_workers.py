"""Workers that are reserved for one large request. Pure.

A large request could wait for ever while small ones take all room that comes free. So it is counted as bypassed each time
another request is placed although its own turn came first. After `bypasses_max` times, one decode worker drains for it: it is
closed to all other requests until this one fits there, and all other workers go on as before. If it fits there but no prefill
worker has room for its prompt, one prefill worker drains in the same way. Only one request of a pool has this at a time. Its
tenant pays for the work that others could have done with the worker, from the begin of the drain to the end of the request. The
tenant pays at the end, since the request's own chunks may be all that can run until then.
"""

from collections.abc import Iterable, Mapping

from scheduler.request import KeptRoom, Request
from scheduler.workers.worker import DecodeWorker, PrefillWorker


class RoomForLargeRequest:
    def __init__(self, decode: Mapping[int, DecodeWorker]) -> None:
        self._workers = decode
        self.request: Request | None = None
        self.decode = self.prefill = 0  # incarnations of the workers that are closed to others; 0: none
        self._cost = KeptRoom(0.0, 0.0)

    def begin(self, request: Request, served_per_s: float, now: float) -> None:
        """Keep the decode worker with the most room, if the request could ever be placed on one. `served_per_s`: cost at which
        all tenants are served."""
        fitting = [w for w in self._workers.values() if not w.draining and w.could_ever_take(request.submit)]
        if not fitting:
            return
        worker = max(fitting, key=lambda w: (w.free_blocks, w.free_seqs, w.incarnation))
        share = worker.capacity.kv_blocks / sum(w.capacity.kv_blocks for w in self._workers.values())
        self.request, self.decode = request, worker.incarnation
        self._cost = KeptRoom(now, share * served_per_s)

    def keep_prefill(self, workers: Iterable[PrefillWorker]) -> None:
        """Keep the prefill worker with the most room, too, since none has room for the prompt."""
        assert self.request is not None
        able = [w for w in workers if not w.draining and w.could_ever_take(self.request.submit)]
        self.prefill = max(able, key=lambda w: (w.free_blocks, w.free_seqs, w.incarnation)).incarnation if able else 0

    def end(self) -> KeptRoom:
        """End the drain. Returns what it cost."""
        self.request, self.decode, self.prefill = None, 0, 0
        return self._cost
