"""Begins a request's turn in its session. `Request.end_turn` ends it."""

from collections import Counter

from scheduler.placement.choice import cached_tokens
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool


def begin(request: Request, pool: Pool, queue: WaitQueue, counters: Counter[str], now: float) -> None:
    """Begin the turn of an admitted request, and charge for the KV that was kept for it, if others wait. A later attempt, or a
    request without block hashes, is no turn."""
    submit = request.submit
    if submit.attempt > 1 or not submit.block_hashes:
        return
    turn = request.turn = pool.sessions.came(submit, request.blob, queue.weight(request.path), now)
    if not turn.kept_tokens:
        return
    found = False
    for worker in pool.candidates.holders(submit):
        size = worker.capacity.block_size
        found = found or cached_tokens(submit, worker, pool) // size >= turn.kept_tokens // size
    counters["lease_found" if found else "lease_broken"] += 1
    if found:
        queue.charge_kept(request.path, turn.cost)
