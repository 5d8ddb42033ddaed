"""The choice of the pair of workers that serves a request: one computes its prompt, the other decodes its answer. Pure.

    candidates   to compute: the worker that asks, those that have more of the prompt, and clearly faster ones; or a decode
                 worker that has at least half of it, which then decodes, too. To decode: `Pool.decode_candidates`
    filters      `may_compute`, `Pool.may_pair`, `Pool.decode_fits`, `PrefillWorker.fits`
    costs        seconds, as in `scheduler.limits`
    the best     is the pair if it has room and can begin; else the request waits for it (`steps`)

At most eight workers of each side are compared: see `candidates`.
"""

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from proto.limits import HASH_BYTES
from proto.messages import Submit
from scheduler.limits import Weights
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.candidates import EXAMINED_MAX
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.pool import Pool
from scheduler.workers.worker import ROUND_TRIP_S, DecodeWorker, PrefillWorker, Worker

FASTER = 0.8
"""A prompt waits for another prefill worker that has no more of it only if our own has at most this part of its speed, and if
the other costs at most this part. Measured rates are not more exact than that."""
SLOWER = 1.25  # a decode worker is slow if its streams wait for a token so many times as long as others
ALIKE = 0.8
"""Only workers with at least this part of its sequences are compared with it, since more sequences take longer."""
_HOPE = 0.25
"""Before the first fetch has been measured, blocks are assumed to move so much faster than the score assumes, so that a first
fetch is tried."""


class Beginning(NamedTuple):
    """The beginning of a prompt that a prefill worker need not compute."""

    tokens: int  # the number of tokens after which chunks start
    fetched_tokens: int = 0  # how many of them, the last ones, come from the decode worker
    fetch_s: float = 0.0  # the expected time of the fetch, in seconds
    compute_s: float = 0.0  # the time in which the prefill worker would compute them, in seconds


class WorkerPair(NamedTuple):
    prefill: Worker  # it computes the prompt; may be the decode worker
    decode: DecodeWorker
    begins: Beginning


class Side(NamedTuple):
    """A worker that may compute a prompt."""

    worker: Worker
    cost_s: float = 0.0
    copied: bytes = b""
    """The last block of what it computes once more though another worker has it; empty if there is nothing."""
    expected_s: tuple[float, float] = (0.0, 0.0)  # on a decode worker: the time there, and elsewhere


class _Cached(dict[Worker, int]):
    """How many of a prompt's tokens each worker is believed to have, looked up once."""

    def __init__(self, submit: Submit, pool: Pool) -> None:
        super().__init__()
        self.submit, self._pool = submit, pool

    def __missing__(self, worker: Worker) -> int:
        found = self[worker] = self._pool.cached_tokens(self.submit, worker)
        return found


# --- who computes the prompt --------------------------------------------------------------------------------------------


def best_side(
    request: Request,
    own: PrefillWorker | None,
    pool: Pool,
    queue: WaitQueue,
    now: float,
    bound_to: Worker | None = None,
) -> Side | None:
    """The worker that is to compute a prompt; None: the request waits for a turn. `own`: the worker that asks, which has the
    least to do; None: the request has just come. `bound_to`: the worker for which it waits."""
    cached = _Cached(request.submit, pool)
    decode = _decode_sides(request, cached, pool, queue, now)
    if own is None and not decode:
        return None
    workers = _prefill_workers(request, own, bound_to, cached, pool, now)
    if own is not None and not decode and len(workers) == 1:
        return Side(own)
    nearest = min(decode, key=lambda found: found[0].cost_s, default=None)
    partners = [None] if nearest is None else [nearest[1], pool.candidates.least_full() or nearest[1]]
    most = max((cached[worker] for worker in workers), default=0)
    waiting = pool.bindings.kept_waiting(own, len(queue)) if own is not None else 0.0

    def cheapest(worker: PrefillWorker) -> Side:
        turns = pool.bindings.kept_waiting(worker, len(queue) - 1) if own is None else 0.0
        sides = (_prefill_side(request, worker, one, cached, most, waiting, turns, pool, now) for one in partners)
        return min(sides, key=lambda side: side.cost_s)

    sides = [cheapest(worker) for worker in workers]
    least_s = min((side.cost_s for side in sides), default=inf)
    if nearest is not None and nearest[0].cost_s <= least_s:
        load_s = pool.weights.load_s * nearest[1].fullness
        return nearest[0]._replace(expected_s=(nearest[0].cost_s - load_s, least_s - load_s))
    if own is None:
        return None
    ours, has_more = sides[0], {worker for worker in workers if cached[worker] > cached[own]}
    best = min(sides, key=lambda side: side.cost_s / (1 if side is ours or side.worker in has_more else FASTER))
    if best is ours or best.worker not in has_more:
        return best
    prefix = last_block(request.submit, cached[best.worker])
    is_due = ours.cost_s - pool.waits.of(prefix, own.kv_tokens, now) <= best.cost_s
    return ours._replace(copied=prefix) if is_due else best


def _prefill_workers(
    request: Request, own: PrefillWorker | None, bound_to: Worker | None, cached: _Cached, pool: Pool, now: float
) -> list[PrefillWorker]:
    """The prefill workers that are compared, our own first: those that have more of the prompt or are clearly faster, or all
    where the request is likely to fail on ours."""
    submit = request.submit
    holders = pool.candidates.prefill_holders(submit) if submit.block_hashes else []
    found = dict.fromkeys((*holders, *pool.candidates.first_to_finish()))
    if own is None:
        return [worker for worker in found if not worker.draining and worker.could_ever_take(submit)]
    if isinstance(bound_to, PrefillWorker):
        found[bound_to] = None
    here, is_unsafe = cached[own], _is_unsafe(request, own, pool, now)

    def may_be_better(worker: PrefillWorker) -> bool:
        if cached[worker] > here:
            return True
        return is_unsafe or worker is bound_to or (not here and _is_faster(worker, own))

    others = (worker for worker in found if worker is not own and not worker.draining and may_be_better(worker))
    return [own, *(worker for worker in others if worker.fits(submit) and pool.has_pair(worker, now))]


def _is_unsafe(request: Request, prefill: Worker, pool: Pool, now: float) -> bool:
    """Whether an interrupted request has failed on a worker, or the worker's host has just lost another."""
    if not request.resumed:
        return False
    return (prefill.incarnation, NOBODY) in request.failed_on or pool.breakers.host_fails(prefill.hello.host, now)


def _is_faster(one: PrefillWorker, other: PrefillWorker) -> bool:
    """Whether `one` is clearly faster than `other`, judged by full steps only."""
    return one.has_run_full and other.has_run_full and other.tokens_per_s < FASTER * one.tokens_per_s


def _prefill_side(
    request: Request,
    worker: PrefillWorker,
    decode: DecodeWorker | None,
    cached: _Cached,
    most: int,
    waiting: float,
    turns: float,
    pool: Pool,
    now: float,
) -> Side:
    """`decode`: the other side of the pair, where what it has may decide; `most`: prompt tokens that one prefill worker has;
    `waiting`: requests that wait longer if this one computes longer; `turns`: requests that come before it here, all taken
    to be like it."""
    submit, weights, rate = request.submit, pool.weights, pool.rate(worker)
    begins = beginning(cached, worker, decode, pool, now) if decode is not None else Beginning(cached[worker])
    before = worker.tokens_before - worker.undispatched.get(request.id, 0)
    uncached, wasted = submit.prompt_tokens - begins.tokens, max(most - begins.tokens, 0)
    fullness = 1 - worker.free_blocks / worker.capacity.kv_blocks
    cost_s = prefill_s(before, uncached, wasted, rate, fullness, weights, waiting)
    cost_s += weights.trouble_s * pool.breakers.failure_rate(worker.alone, now) + weights.unsafe_s * _is_unsafe(
        request, worker, pool, now
    )
    turn_s = turns * uncached / rate
    cost_s += turn_s if request.resumed else min(turn_s, request.projected_s)
    if decode is not None:
        cost_s += begins.fetch_s + hand_over_s(submit, worker, decode, pool, now) + weights.load_s * decode.fullness
    return Side(worker, cost_s)


def prefill_s(
    tokens_before: int,
    uncached_tokens: int,
    wasted_tokens: int,
    tokens_per_s: float,
    fullness: float,
    weights: Weights,
    waiting: float = 0.0,
) -> float:
    """The cost of computing a prompt on a worker. `wasted_tokens`: those that another prefill worker has; `waiting`: requests
    that wait longer if it computes longer."""
    waste = weights.compute * (1.0 + weights.pressure * waiting) - 1.0
    work = weights.queue * tokens_before + uncached_tokens + waste * wasted_tokens
    return work / tokens_per_s + weights.room_s * fullness**2


def _decode_sides(
    request: Request, cached: _Cached, pool: Pool, queue: WaitQueue, now: float
) -> list[tuple[Side, DecodeWorker]]:
    """The decode workers that may compute the prompt. It needs no prompt log-probabilities, has no room kept elsewhere, and is
    not suspected of ending workers."""
    submit, found = request.submit, list[tuple[Side, DecodeWorker]]()
    is_usual = submit.sampling.prompt_logprobs < 0 and request.suspicion is None
    if not (is_usual and submit.block_hashes) or request.id in pool.retained or pool.room_for_large.request is request:
        return found
    for worker in pool.candidates.decode_holders(submit):
        if 2 * cached[worker] >= submit.prompt_tokens and may_compute(worker, request, pool, now):
            before = worker.tokens_before - worker.undispatched.get(request.id, 0)
            done_s = (before + submit.prompt_tokens - cached[worker]) / pool.rate(worker)
            found.append((Side(worker, done_s + pool.weights.load_s * worker.fullness), worker))
    return [] if found and waits_behind(request, pool, queue) else found


def may_compute(worker: DecodeWorker, request: Request, pool: Pool, now: float) -> bool:
    """Whether this decode worker may compute and decode the request now."""
    if not worker.capacity.computes_suffixes or worker.draining or worker.incarnation == pool.room_for_large.decode:
        return False
    if request.resumed and pool.breakers.host_fails(worker.hello.host, now):
        return False
    if 2 * pool.cached_tokens(request.submit, worker) < request.submit.prompt_tokens:
        return False
    return pool.may_pair(worker, worker, now) and pool.decode_fits(worker, request, pool.short_targets())


def waits_behind(request: Request, pool: Pool, queue: WaitQueue) -> bool:
    """Whether another request that waits for room in decode comes before this one."""
    first = queue.first(list(pool.wakeups.closed)) if pool.wakeups.closed else None
    return first is not None and queue.goes_before(first, request)


def last_block(submit: Submit, cached_tokens: int) -> bytes:
    if not cached_tokens:
        return b""  # and the request may have no hashes at all
    end = cached_tokens // submit.hash_block_size * HASH_BYTES
    return submit.block_hashes[max(end - HASH_BYTES, 0) : end]


# --- the pair -----------------------------------------------------------------------------------------------------------


def pair(request: Request, prefill: PrefillWorker, pool: Pool, now: float) -> WorkerPair | None:
    """A prefill worker with the best decode worker for a request; None if it cannot run there now."""
    submit = request.submit
    if prefill.draining or not prefill.fits(submit):
        return None
    short = pool.short_targets()
    found = [w for w in pool.decode_candidates(request, prefill, now) if pool.decode_fits(w, request, short)]
    decode = _best_decode(request, prefill, found, pool, now) if len(found) > 1 else next(iter(found), None)
    if decode is None:
        return None
    return WorkerPair(prefill, decode, beginning(_Cached(submit, pool), prefill, decode, pool, now))


def any_pair(request: Request, pool: Pool, now: float) -> WorkerPair | None:
    """The best pair for a request that needs no turn: of the prefill workers that have the prompt and those with the least to
    do. Those on which it is likely to fail come last."""
    submit = request.submit
    workers = dict.fromkeys(pool.candidates.prefill_holders(submit))
    workers.update((pool.prefill[incarnation], None) for incarnation in islice(pool.wakeups.idle, EXAMINED_MAX))
    cached = _Cached(submit, pool)
    most = max((cached[worker] for worker in workers), default=0)
    cost_s = {w: _prefill_side(request, w, None, cached, most, 0.0, 0.0, pool, now).cost_s for w in workers}
    in_order = sorted(workers, key=lambda worker: (cost_s[worker], worker.incarnation))
    return next(filter(None, (pair(request, worker, pool, now) for worker in in_order)), None)


def _best_decode(
    request: Request, prefill: PrefillWorker, workers: Sequence[DecodeWorker], pool: Pool, now: float
) -> DecodeWorker:
    weights, answer_tokens = pool.weights, request.expected_tokens / request.submit.choices
    spread = sorted(
        workers, key=lambda w: (w.tokens_forwarded, w.incarnation)
    )  # of equals, the one that has done least
    token_s = {worker: pool.token_s(worker) for worker in spread}

    def slow_s(worker: DecodeWorker) -> float:
        """How much longer the answer takes than on workers with about as many sequences or more."""
        others = (one for one in spread if token_s[one] and one.token_seqs >= ALIKE * worker.token_seqs)
        least_s = min((token_s[one] for one in others), default=token_s[worker])
        return min(answer_tokens * max(token_s[worker] - SLOWER * least_s, 0.0), weights.slow_s_max)

    def cost_s(worker: DecodeWorker) -> float:
        failure_rate = max(
            pool.breakers.failure_rate(worker.alone, now),
            pool.breakers.failure_rate((prefill.incarnation, worker.incarnation), now),
            request.resumed and pool.breakers.host_fails(worker.hello.host, now),
        )
        other_numerics = request.resumed and request.numerics not in ("", worker.hello.numerics)
        return (
            hand_over_s(request.submit, prefill, worker, pool, now)
            + weights.load_s * worker.fullness
            + weights.trouble_s * failure_rate
            + weights.targets_s * pool.targets.is_guest(worker, request)
            + weights.numerics_s * other_numerics
            + slow_s(worker)
        )

    return min(spread, key=cost_s)


def hand_over_s(submit: Submit, prefill: Worker, decode: DecodeWorker, pool: Pool, now: float) -> float:
    """The cost of handing over the blocks that a decode worker does not have, less its credit: see `hand_overs`."""
    if decode.is_same_process(prefill):
        return 0.0
    cost_s = pool.missing_blocks(submit, decode) * pool.hand_overs.block_s(prefill.hello.host, decode.hello.host)
    return max(cost_s - pool.hand_overs.credit_s(decode.incarnation, now), 0.0)


def beginning(cached: _Cached, prefill: PrefillWorker, decode: DecodeWorker, pool: Pool, now: float) -> Beginning:
    """Returns the beginning of a prompt that need not be computed if these two workers serve it: what the prefill worker has,
    and what else the decode worker has if fetching it takes less time than computing it."""
    here, one, other = cached[prefill], prefill.capacity, decode.capacity
    if not (one.fetches and other.fetches) or one.block_size != other.block_size or decode.is_same_process(prefill):
        return Beginning(here)
    there = cached[decode]
    if there <= here or now < prefill.fetch_paused_until.get(decode.incarnation, now):
        return Beginning(here)
    remote_s = pool.weights.remote_s * (prefill.hello.host != decode.hello.host)
    guess_s = _HOPE * (pool.weights.transfer_s + remote_s) / cached.submit.hash_block_size
    fetch_s = ROUND_TRIP_S + (there - here) * (prefill.fetch_token_s or guess_s)
    compute_s = (there - here) / pool.rate(prefill)
    return Beginning(there, there - here, fetch_s, compute_s) if fetch_s < compute_s else Beginning(here)
