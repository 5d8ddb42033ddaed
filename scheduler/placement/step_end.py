"""Tells why a prefill step that is being composed, or a decode batch when metrics are read, is not larger. Pure, and changes
nothing.

The cost does not grow with the number of waiting requests, nor, for a prefill step, with the number of workers.
"""

from scheduler.observer import StepEnd
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, Worker


def nothing_more(worker: Worker, pool: Pool, queue: WaitQueue) -> StepEnd:
    """Why no request can have a chunk on this prefill worker now."""
    if not len(queue):
        return StepEnd.NOTHING_WAITS
    if worker.free_seqs <= 0:
        return StepEnd.NO_ROOM_IN_PREFILL
    if worker.draining or worker.incarnation == pool.room_for_large.prefill:
        return StepEnd.WORKER_CLOSED
    first = _first_without_room(pool, queue)
    if first is not None:
        decode = pool.candidates.least_full()
        return StepEnd.NO_DECODE_SEQUENCES if decode is None else decode_limit(decode, first, pool)
    stuck = pool.wakeups.stuck.get(worker.incarnation, ())
    return StepEnd.NO_ROOM_IN_PREFILL if any(map(queue.fair.has, stuck)) else StepEnd.BOUND_ELSEWHERE


def decode_limits(pool: Pool, queue: WaitQueue) -> dict[StepEnd, int]:
    """Returns the number of decode workers for each reason why no more sequences run there."""
    first, found = _first_without_room(pool, queue), dict[StepEnd, int]()
    for worker in pool.decode.values():
        if not worker.free_seqs:
            end = StepEnd.FULL
        else:
            end = StepEnd.NOTHING_WAITS if first is None else decode_limit(worker, first, pool)
        found[end] = found.get(end, 0) + 1
    return found


def decode_limit(decode: DecodeWorker, first: Request, pool: Pool) -> StepEnd:
    """Why a request that found no room in decode is not on this worker."""
    if decode.draining or decode.incarnation == pool.room_for_large.decode:
        return StepEnd.WORKER_CLOSED
    if first.submit.choices > decode.free_seqs:
        return StepEnd.NO_DECODE_SEQUENCES
    if not decode.fits(first.submit, first.expected_left):
        return StepEnd.NO_DECODE_KV
    return StepEnd.TPOT_TARGET if pool.targets.used else StepEnd.WORKER_CLOSED


def _first_without_room(pool: Pool, queue: WaitQueue) -> Request | None:
    """The first request of a demand class that found no room in decode, where something of the class waits."""
    return next((first for key, first in pool.wakeups.closed.items() if queue.fair.has(key)), None)
