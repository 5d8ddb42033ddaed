"""Pauses conversations while more of them go on than the caches hold. Pure.

Without it each turn evicts KV that another conversation is about to need, so that prefill workers compute nearly everything
anew. A turn whose KV was evicted is paused if prefill workers do not keep up. Paused turns resume one after another, in the
fair order, at a pace that takes `SHARE` of what prefill workers compute, and earlier where no other turns come. The other
conversations find their KV meanwhile. No turn is paused for longer than `WAIT_SHARE` of the time that it may wait: its class's
target for the first token is no limit, since all turns would miss it if conversations went on evicting each other's KV.

A turn is not paused if the KV would not last until the next turn anyway: if prefill workers could fill the caches between two
turns of its tenant.
"""

from typing import Final

from scheduler.placement.place import came
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.tenant_work import UNCOMPUTED
from scheduler.workers.pool import Pool

SHARE: Final = 0.1
WAIT_SHARE: Final = 0.9
QUIET: Final = 6.0  # the next turn resumes if none has come for so many times the mean time between turns
BEHIND_S: Final = 2.0  # prefill workers do not keep up if what waits takes them so long


def begin(request: Request, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Pause a turn that has come, if its conversation has to wait. Returns whether it was paused."""
    if not _has_to_wait(request, pool, queue):
        pool.turn_came_at = now
        return False
    if not pool.paused:
        pool.resumes_at = now + _pause_s(request, pool)
    pool.paused[request.id] = request
    queue.pause(request)
    return True


def _has_to_wait(request: Request, pool: Pool, queue: WaitQueue) -> bool:
    turn, sessions, rate = request.turn, pool.sessions, pool.tokens_per_s()
    if turn is None or not turn.kept_tokens or request.entry is None or request.suspicion is not None:
        return False
    if sessions.tokens <= sessions.kv_tokens or sessions.mean_s(request.submit.tenant) * rate > sessions.kv_tokens:
        return False
    return (bool(pool.paused) or queue.line.work.total(UNCOMPUTED) >= BEHIND_S * rate) and not is_found(request, pool)


def is_found(request: Request, pool: Pool) -> bool:
    """Whether a worker has most of the KV that its last turn left."""
    submit, turn = request.submit, request.turn
    holders = pool.candidates.holders(submit)
    return turn is not None and any(2 * pool.cached_tokens(submit, worker) >= turn.kept_tokens for worker in holders)


def next_resume(pool: Pool) -> float:
    """When the next of the turns that are paused resumes."""
    oldest = next(iter(pool.paused.values()))
    quiet_s = QUIET * max(pool.sessions.mean_s(oldest.submit.tenant), 1.0)
    return min(pool.resumes_at, pool.turn_came_at + quiet_s)


def resume_due(pool: Pool, queue: WaitQueue, now: float) -> None:
    """Resume the turn that has waited too long, or else the next one in the fair order, if it is time."""
    oldest = next(iter(pool.paused.values()))
    limit_s = queue.line.limit_s(oldest)
    if oldest.submit.deadline_ms:
        limit_s = min(limit_s, oldest.submit.deadline_ms / 1000)
    if now >= oldest.since + WAIT_SHARE * limit_s:
        _resume(oldest, pool, queue, now)
    elif now >= next_resume(pool):
        request = queue.first_paused() or oldest
        pool.turn_came_at = now
        pool.resumes_at = now + _pause_s(request, pool)
        _resume(request, pool, queue, now)


def end(request: Request, pool: Pool, queue: WaitQueue) -> None:
    """A turn is paused no longer."""
    if pool.paused.pop(request.id, None) is not None:
        queue.resume(request)


def _resume(request: Request, pool: Pool, queue: WaitQueue, now: float) -> None:
    end(request, pool, queue)
    came(request, pool, queue, now)


def _pause_s(request: Request, pool: Pool) -> float:
    """How long the next turn is paused after this one has resumed; 0 while no prefill worker's rate is known."""
    rate = pool.tokens_per_s()
    return request.submit.prompt_tokens / (SHARE * rate) if rate else 0.0
