"""A request as a turn of its session: its beginning, and its end."""

from collections import Counter

from coordinator.request import Request
from coordinator.waiting.queue import WaitQueue
from coordinator.workers.pool import Pool


def begin(request: Request, pool: Pool, now: float) -> None:
    """It has been let in. What an earlier coordinator had let in, or an earlier attempt at all its choices, is no turn."""
    submit = request.submit
    if submit.attempt == 1 and submit.block_hashes:
        request.turn = pool.sessions.came(submit, request.blob, now)


def end(request: Request, pool: Pool, queue: WaitQueue, counters: Counter[str], now: float) -> None:
    """It leaves its KV, if its prompt was computed; and pays for what it had found, while others wait."""
    turn, request.turn = request.turn, None
    if turn is None:
        return
    prefill = pool.workers.get(request.prefill_incarnation)
    if not request.first_token_at or prefill is None:
        pool.sessions.over(turn.session, now)
        return
    submit = request.submit
    tokens = submit.prompt_tokens - submit.resumed_tokens
    tokens += request.bill.counters.output_tokens if request.bill is not None else submit.resumed_tokens
    weight = queue.fair.weights.get("/".join(request.path[:2]), 1.0)
    size = prefill.capacity.block_size
    ended = pool.sessions.answered(turn, tokens, request.cached_tokens, size, weight, now)
    if ended is None:
        return
    counters["lease_found" if ended.found else "lease_broken"] += 1
    queue.charge_kept(request.path, ended.cost)
