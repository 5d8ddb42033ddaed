"""Applies the score of `score.py` to workers in their present state: what they have cached, how full they are, what work they
have.

Steps are filled for one prefill worker at a time; below, that worker is `own`. Two choices are made for the request whose turn
it is: first, whether it should rather run on another prefill worker that has more of it cached or is faster; then, which
decode worker it gets.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from proto.limits import HASH_BYTES
from proto.messages import Submit
from scheduler.request import Request
from scheduler.score import DecodeSide, PrefillSide, best_decode, prefill_s
from scheduler.workers.candidates import EXAMINED_MAX
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.pool import Pool
from scheduler.workers.prefix_index import known_blocks, usable_tokens
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

FASTER = 0.8
"""A prompt waits for a faster prefill worker only if our own has at most this part of its speed, and the other would be done in
at most this part of the time. Measured rates are not more exact than that."""


def cached_tokens(submit: Submit, prefill: Worker, pool: Pool) -> int:
    """Returns how many prompt tokens this worker is believed to have cached, counting only those that save work."""
    if not submit.block_hashes:
        return 0
    size = prefill.capacity.block_size
    return usable_tokens(known_blocks(pool.locality, prefill.incarnation, submit, size), submit, size)


def uncached_tokens(submit: Submit, pool: Pool) -> int:
    """Returns how many prompt tokens the best prefill worker is believed to have to compute."""
    if not submit.block_hashes:
        return submit.prompt_tokens
    there = pool.candidates.prefill_holders(submit)
    return submit.prompt_tokens - max((cached_tokens(submit, worker, pool) for worker in there), default=0)


def expect_cached(request: Request, prefill: Worker, pool: Pool) -> None:
    """Let the request's chunks start after the tokens that this worker is believed to have cached."""
    request.cached_tokens = request.dispatched_tokens = cached_tokens(request.submit, prefill, pool)


class Better(NamedTuple):
    worker: PrefillWorker  # the worker to wait for, or our own, which computes the prefix once more
    prefix: bytes  # the last block of what another worker has cached, and our own has not
    cached_tokens: int  # the length of that prefix
    waits_s: float  # how much longer the request waits for `worker`


def better_prefill(request: Request, own: PrefillWorker, pool: Pool, waiting: float, now: float) -> Better | None:
    """The prefill worker to which a request should be bound instead of running on the one that asks; None if there is none.

    A worker is considered if it has more of the prompt cached, or else if it is clearly faster; our own has the least work.
    Requests bound to a worker count as its work, so no more of them wait there than its cache is worth. If requests have
    waited long for the same prefix lately, computing it once more becomes better: see `bindings`.

    A resumed request goes to a worker on which it has not failed, and whose host has not just lost a worker, if there is one.

    `waiting`: how many requests wait longer if our own computes longer.
    """
    if len(pool.prefill) == 1:
        return None
    submit = request.submit
    if _is_unsafe(request, own, pool, now):
        return _safer_prefill(request, pool, now)
    holders = pool.candidates.prefill_holders(submit) if submit.block_hashes else ()
    there = [worker for worker in holders if worker is not own and not worker.draining]
    if request.resumed:
        there = [worker for worker in there if not _is_unsafe(request, worker, pool, now)]
    if not there:
        return _faster_prefill(submit, own, pool, now)
    weights, here = pool.weights, cached_tokens(submit, own, pool)
    here_s = prefill_s(submit.prompt_tokens, _prefill_side(own, here, pool), weights, waiting)
    best, best_cached, best_s = None, 0, here_s - weights.margin_s
    for worker in there:
        cached = cached_tokens(submit, worker, pool)
        if cached <= here or not worker.fits(submit):
            continue
        there_s = prefill_s(submit.prompt_tokens, _prefill_side(worker, cached, pool), weights, waiting)
        if there_s < best_s and pool.has_pair(worker, now):
            best, best_cached, best_s = worker, cached, there_s
    if best is None:
        return _faster_prefill(submit, own, pool, now) if not here else None
    prefix = last_block(submit, best_cached)
    if here_s - pool.waits.of(prefix, own.kv_tokens, now) <= best_s:
        return Better(own, prefix, best_cached, 0.0)
    return Better(best, prefix, best_cached, max(best.tokens_before - own.tokens_before, 0) / pool.rate(best))


def _is_unsafe(request: Request, prefill: Worker, pool: Pool, now: float) -> bool:
    """Whether a resumed request has failed on a worker, or the worker's host has just lost another."""
    if not request.resumed:
        return False
    return (prefill.incarnation, NOBODY) in request.failed_on or pool.breakers.host_fails(prefill.hello.host, now)


def _safer_prefill(request: Request, pool: Pool, now: float) -> Better | None:
    """Returns the prefill worker that is done first, of those that are not unsafe; None if there is none."""
    for worker in pool.candidates.first_to_finish():
        if not _is_unsafe(request, worker, pool, now) and worker.fits(request.submit) and pool.has_pair(worker, now):
            return Better(worker, b"", 0, 0.0)
    return None


def _faster_prefill(submit: Submit, own: PrefillWorker, pool: Pool, now: float) -> Better | None:
    """Returns a busy prefill worker that would still finish a prompt before our own, slower one; None if there is none."""
    tokens = submit.prompt_tokens
    best, best_s = None, FASTER * (own.tokens_before + tokens) / pool.rate(own)
    for worker in pool.candidates.first_to_finish():
        done_s = (worker.tokens_before + tokens) / pool.rate(worker)
        if done_s < best_s and _is_faster(worker, own) and worker.fits(submit) and pool.has_pair(worker, now):
            best, best_s = worker, done_s
    return Better(best, b"", 0, 0.0) if best is not None else None


def _is_faster(one: PrefillWorker, other: PrefillWorker) -> bool:
    """Whether `one` is clearly faster than `other`, judged by full steps only."""
    return one.has_run_full and other.has_run_full and other.tokens_per_s < FASTER * one.tokens_per_s


def better_than_bound(
    request: Request, own: PrefillWorker, bound_to: Worker, pool: Pool, waiting: float, now: float
) -> bool:
    """Whether the last request that was bound to another worker would better run on our own."""
    submit, weights = request.submit, pool.weights
    there, here = request.cached_tokens, cached_tokens(submit, own, pool)
    if not isinstance(bound_to, PrefillWorker) or (
        there <= here and (_is_faster(own, bound_to) or _is_faster(bound_to, own))
    ):
        tokens = submit.prompt_tokens - here
        return (own.tokens_before + tokens) / pool.rate(own) < FASTER * bound_to.tokens_before / pool.rate(bound_to)
    there_side, here_side = _prefill_side(bound_to, there, pool), _prefill_side(own, here, pool)
    there_side.tokens_before -= bound_to.undispatched[request.id]
    here_s = prefill_s(submit.prompt_tokens, here_side, weights, waiting)
    there_s = prefill_s(submit.prompt_tokens, there_side, weights, waiting)
    prefix = last_block(submit, there)
    return here_s - pool.waits.of(prefix, own.kv_tokens, now) < there_s - weights.margin_s


def last_block(submit: Submit, cached_tokens: int) -> bytes:
    if not cached_tokens:
        return b""  # and the request may have no hashes at all
    end = cached_tokens // submit.hash_block_size * HASH_BYTES
    return submit.block_hashes[max(end - HASH_BYTES, 0) : end]


def best_prefill_first(submit: Submit, pool: Pool, now: float) -> list[PrefillWorker]:
    """Returns prefill workers, best first: those that have the prompt cached and those with the least to do, or all if there
    are few. Those whose host has just lost a worker come last."""
    found = {worker.incarnation: worker for worker in pool.candidates.prefill_holders(submit)}
    found.update((incarnation, pool.prefill[incarnation]) for incarnation in islice(pool.wakeups.idle, EXAMINED_MAX))

    def order(worker: PrefillWorker) -> tuple[bool, float, int]:
        side = _prefill_side(worker, cached_tokens(submit, worker, pool), pool)
        fails = pool.breakers.host_fails(worker.hello.host, now)
        return fails, prefill_s(submit.prompt_tokens, side, pool.weights), worker.incarnation

    return sorted(found.values(), key=order)


def choose_decode(
    request: Request, prefill: Worker, decode: Sequence[DecodeWorker], pool: Pool, now: float
) -> DecodeWorker | None:
    """The best of these decode workers, which have room for it."""
    if len(decode) < 2:
        return decode[0] if decode else None
    spread = sorted(decode, key=lambda w: (w.tokens_forwarded, w.incarnation))  # of equals, the one that has done least
    sides = ((worker.incarnation, _decode_side(worker, request, prefill, pool, now)) for worker in spread)
    answer_tokens = request.expected_tokens / request.submit.choices
    incarnation = best_decode(sides, pool.weights, answer_tokens)
    return None if incarnation is None else pool.decode[incarnation]


def hand_over_s(submit: Submit, prefill: Worker, decode: DecodeWorker, pool: Pool, now: float) -> float:
    """The cost of handing over the blocks that a decode worker does not have, less its credit: see `hand_overs`."""
    if decode.is_same_process(prefill):
        return 0.0
    cost_s = missing_blocks(submit, decode, pool) * pool.hand_overs.block_s(prefill.hello.host, decode.hello.host)
    return max(cost_s - pool.hand_overs.credit_s(decode.incarnation, now), 0.0)


def missing_blocks(submit: Submit, decode: DecodeWorker, pool: Pool) -> int:
    size = decode.capacity.block_size
    return -(-submit.prompt_tokens // size) - known_blocks(pool.locality, decode.incarnation, submit, size)


def count_load(request: Request, prefill: Worker, decode: DecodeWorker, pool: Pool, now: float) -> None:
    """Credit the least full decode worker before a request is placed on a fuller one, or let this one pay."""
    blocks = request.attempt_progress.sent_blocks = missing_blocks(request.submit, decode, pool)
    cost_s = blocks * pool.hand_overs.block_s(prefill.hello.host, decode.hello.host)
    pool.hand_overs.spend(decode.incarnation, cost_s if prefill is not decode else 0.0, now)
    least = pool.candidates.least_full()
    if least is not None and (forgone := decode.fullness - least.fullness) > 0:
        pool.hand_overs.forgo(least.incarnation, pool.weights.load_s * forgone, now)


def _prefill_side(worker: PrefillWorker, cached: int, pool: Pool) -> PrefillSide:
    return PrefillSide(
        tokens_before=worker.tokens_before,
        tokens_per_s=pool.rate(worker),
        cached_tokens=cached,
        fullness=1 - worker.free_blocks / worker.capacity.kv_blocks,
        failure_rate=pool.failure_rate(worker),
        host=worker.hello.host,
    )


def _decode_side(worker: DecodeWorker, request: Request, prefill: Worker, pool: Pool, now: float) -> DecodeSide:
    return DecodeSide(
        hand_over_s=hand_over_s(request.submit, prefill, worker, pool, now),
        fullness=worker.fullness,
        failure_rate=max(
            pool.failure_rate(worker),
            pool.breakers.failure_rate((prefill.incarnation, worker.incarnation), now),
            request.resumed and pool.breakers.host_fails(worker.hello.host, now),
        ),
        token_s=worker.token_ms / 1000 if worker.allocations or not pool.is_measured_long_ago(worker) else 0.0,
        token_seqs=worker.token_seqs,
        is_guest=pool.targets.is_guest(worker, request),
        other_numerics=request.resumed and request.numerics not in ("", worker.hello.numerics),
    )
