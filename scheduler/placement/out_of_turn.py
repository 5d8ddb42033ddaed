"""Places some requests as soon as there is room, out of turn: those that lost their prefill worker and kept their room in
decode, one for which room is kept, and those that may have ended a decode worker.
"""

from scheduler.cluster import Cluster
from scheduler.lifecycle import RequestState
from scheduler.placement.choice import best_prefill_first, choose_decode
from scheduler.placement.place import place_at_once
from scheduler.request import RETAINED, Request
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker


def place_retained(cluster: Cluster, pool: Pool, now: float) -> None:
    """Place requests whose prefill worker was lost as soon as another prefill worker has room. They have had their turn and
    kept their room in decode. (Until the decode worker has released the last attempt, such a request may be placed in its
    turn.)"""
    for request in list(pool.retained.values()):
        retained = request.attempt_progress.retained
        assert retained is not None
        decode = pool.decode[retained.decode_incarnation]
        if (
            request.entry is None
            or request.state is not RequestState.QUEUED
            or (request.id, RETAINED) not in decode.allocations
        ):
            continue
        prefill = _prefill_for(request, decode, pool, now)
        if prefill is None:
            continue
        cluster.drop_retained(request)
        if decode.fits(request.submit, request.expected_left):
            place_at_once(cluster, request, prefill, decode, now)


def place_kept(cluster: Cluster, pool: Pool, now: float) -> None:
    """Place a request that was bypassed too often as soon as the decode worker kept for it has room, even if it is not its
    turn. Its tenant pays for the time in which that worker took no other request."""
    kept = pool.room_for_large
    request, decode = kept.request, pool.decode.get(kept.decode)
    if request is None:
        return
    if decode is None or decode.draining or not pool.could_place(request.submit):
        kept.end(now)  # no tenant pays for this
        pool.wakeups.look_anew()
        return
    if not pool.decode_fits(decode, request):
        return
    prefill = _prefill_for(request, decode, pool, now)
    if prefill is not None:
        place_at_once(cluster, request, prefill, decode, now)
    elif not kept.prefill:
        able = [w for w in pool.prefill.values() if not w.draining and w.could_ever_take(request.submit)]
        able = [w for w in able if pool.may_pair(w, decode, now)]
        kept.prefill = max(able, key=lambda w: (w.free_blocks, w.free_seqs, w.incarnation)).incarnation if able else 0


def place_suspect(cluster: Cluster, pool: Pool, now: float) -> bool:
    """Place the next request whose trial in decode may begin. Returns whether it did."""
    if not pool.trials.waiting:
        return False
    for request in pool.trials.overdue(now):
        cluster.queues[pool.model].unsettle(request)
        pool.wakeups.request_came()
    free = [worker for worker in pool.trials.free() if worker.incarnation != pool.room_for_large.decode]
    for request in pool.trials.next() if free else ():
        fitting = [worker for worker in free if worker.fits(request.submit, request.expected_left)]
        for prefill in best_prefill_first(request.submit, pool, now) if fitting else ():
            if prefill.draining or not prefill.fits(request.submit):
                continue
            allowed = [worker for worker in fitting if pool.may_pair(prefill, worker, now)]
            decode = choose_decode(request, prefill, allowed, pool, now)
            if decode is not None:
                place_at_once(cluster, request, prefill, decode, now)
                return True
    return False


def _prefill_for(request: Request, decode: DecodeWorker, pool: Pool, now: float) -> PrefillWorker | None:
    """The best prefill worker with room for a request that has room on this decode worker."""
    for prefill in best_prefill_first(request.submit, pool, now):
        if not prefill.draining and prefill.fits(request.submit) and pool.may_pair(prefill, decode, now):
            return prefill
    return None
