"""The score of `score.py` applied to workers as they are: what they have cached, how full they are, what is before it.

A prefill worker asks for work when it has a step to fill, so the choice is made twice: by its turn, whether a request that
another worker has more cached of should run here at all, and then, which decode worker goes with it.
"""

from collections.abc import Sequence

from coordinator.locality import known_blocks, usable_tokens
from coordinator.pool import Pool, Worker
from coordinator.request import Request
from coordinator.score import DecodeSide, PrefillSide, best_decode, patience_s, prefill_s
from proto.messages import Submit

TOKENS_PER_S = 1000.0
"""Of a prefill worker that has not computed anything yet."""


def cached_tokens(submit: Submit, prefill: Worker, pool: Pool) -> int:
    """How much of a prompt this worker is believed to have, as far as that saves work."""
    if not submit.block_hashes:
        return 0
    size = prefill.capacity.block_size
    return usable_tokens(known_blocks(pool.locality, prefill.epoch, submit, size), submit, size)


def uncached_tokens(submit: Submit, pool: Pool) -> int:
    """What the best prefill worker would have to compute of it, as far as is believed."""
    if not submit.block_hashes:
        return submit.prompt_tokens
    cached = max((cached_tokens(submit, worker, pool) for worker in pool.prefill.values()), default=0)
    return submit.prompt_tokens - cached


def expect_cached(request: Request, prefill: Worker, pool: Pool) -> None:
    """Should it be placed here, its chunks start behind what is believed to be cached."""
    request.cached_tokens = request.dispatched_tokens = cached_tokens(request.submit, prefill, pool)


def rather_waits(request: Request, prefill: Worker, pool: Pool, now: float) -> bool:
    """Whether a request should let this worker's turn pass and wait, a bounded time, for one with more of it cached."""
    submit = request.submit
    if len(pool.prefill) == 1 or not submit.block_hashes:
        return False
    here = cached_tokens(submit, prefill, pool)
    others = {
        worker.epoch: _prefill_side(worker, cached)
        for worker in pool.prefill.values()
        if not worker.draining
        and (cached := cached_tokens(submit, worker, pool)) > here
        and worker.fits(submit)
        and pool.has_pair(worker, now)
    }
    patience = patience_s(submit.prompt_tokens, _prefill_side(prefill, here), others, pool.weights)
    if patience <= 0.0:
        return False
    course = request.begin()
    if course.waits_since is None:
        course.waits_since = now
    return now < course.waits_since + patience


def best_prefill_first(submit: Submit, pool: Pool) -> list[Worker]:
    def order(worker: Worker) -> tuple[float, int]:
        side = _prefill_side(worker, cached_tokens(submit, worker, pool))
        return prefill_s(submit.prompt_tokens, side, pool.weights), worker.epoch

    return sorted(pool.prefill.values(), key=order)


def choose_decode(submit: Submit, prefill: Worker, decode: Sequence[Worker], pool: Pool, now: float) -> Worker | None:
    """The best of these decode workers, which have room for it."""
    if len(decode) < 2:
        return decode[0] if decode else None
    spread = sorted(decode, key=lambda w: (w.tokens_forwarded, w.epoch))  # of equals, the one that has done least
    sides = ((worker.epoch, _decode_side(worker, submit, prefill, pool, now)) for worker in spread)
    epoch = best_decode(sides, prefill.hello.host, pool.weights)
    return None if epoch is None else pool.decode[epoch]


def _prefill_side(worker: Worker, cached: int) -> PrefillSide:
    return PrefillSide(
        tokens_before=worker.tokens_in_flight + worker.undispatched_tokens(),
        tokens_per_s=worker.tokens_per_s or TOKENS_PER_S,
        cached_tokens=cached,
        fullness=1 - worker.free_blocks / worker.capacity.kv_blocks,
        trouble=worker.trouble,
        host=worker.hello.host,
    )


def _decode_side(worker: Worker, submit: Submit, prefill: Worker, pool: Pool, now: float) -> DecodeSide:
    size, capacity = worker.capacity.block_size, worker.capacity
    blocks = -(-submit.prompt_tokens // size)
    return DecodeSide(
        missing_blocks=blocks - known_blocks(pool.locality, worker.epoch, submit, size),
        fullness=1 - min(worker.free_blocks / capacity.kv_blocks, worker.free_seqs / capacity.max_seqs),
        trouble=max(worker.trouble, pool.breakers.trouble((prefill.epoch, worker.epoch), now)),
        host=worker.hello.host,
    )
