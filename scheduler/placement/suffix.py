"""Chooses where to compute a prompt whose beginning a decode worker has: on that worker, or on a prefill worker. Pure.

    there       (prompt tokens before it + tokens not cached there) / rate of prompts beside the streams there + load there
    elsewhere   wait for its turn + (tokens before it + tokens not cached) / rate, of the best prefill worker; what it takes to
                fetch tokens, where that is better; + hand-over and load of the same or the least full decode worker

The wait assumes that all requests that wait for a turn are like this one, but it is at most the wait projected from its
tenant's share.

The smaller one wins. The rates are measured; a decode worker's rate is that of slices between the steps of its streams. A
decode worker computes a suffix only if it has at least half of the prompt. A request that is bound to a decode worker takes
its turns in the fair order like all others. If others wait for room in decode, it waits with them.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from proto.messages import Submit
from scheduler.placement.choice import cached_tokens, hand_over_s
from scheduler.placement.fetch import beginning
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import bound_key
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker


class OnDecode(NamedTuple):
    decode: DecodeWorker  # it computes the suffix
    cached_tokens: int
    there_s: float
    elsewhere_s: float


def best_on_decode(
    request: Request, pool: Pool, queue: WaitQueue, now: float, own: PrefillWorker | None = None
) -> OnDecode | None:
    """Returns the decode worker that would finish the prompt before any prefill worker; None if there is none. `own`: the
    prefill worker that asks; None: the request has just come."""
    submit = request.submit
    if not submit.block_hashes or not _may_run_on_decode(request, pool):
        return None
    load_s, best, best_s, best_cached = pool.weights.load_s, None, inf, 0
    for worker in pool.candidates.decode_holders(submit):
        if not takes(worker, request, pool, now):
            continue
        cached = cached_tokens(submit, worker, pool)
        done_s = done_in_s(worker, submit, cached, pool)
        if done_s + load_s * worker.fullness < best_s:
            best, best_s, best_cached = worker, done_s + load_s * worker.fullness, cached
    if best is None:
        return None
    prefill = pool.candidates.prefill_holders(submit) + pool.candidates.first_to_finish()
    if own is not None:
        prefill.append(own)
    waiting = len(queue) - 1 if own is None else 0
    elsewhere_s = inf
    for decode in dict.fromkeys((best, pool.candidates.least_full() or best)):
        done_s = _prefill_s(submit, prefill, decode, pool, waiting, now)
        if own is None and not request.resumed:
            done_s = min(done_s, request.projected_s + _prefill_s(submit, prefill, decode, pool, 0, now))
        elsewhere_s = min(elsewhere_s, done_s + load_s * decode.fullness)
    if best_s > elsewhere_s:
        return None
    return OnDecode(best, best_cached, best_s - load_s * best.fullness, elsewhere_s - load_s * best.fullness)


def came(request: Request, pool: Pool, queue: WaitQueue, now: float) -> None:
    """Let a new request wait for a decode worker, if that would finish its prompt first, or else in its demand class."""
    found = best_on_decode(request, pool, queue, now) if request.entry is not None and not pool.wakeups.closed else None
    if found is None:
        pool.wakeups.request_came()
        return
    request.cached_tokens = request.dispatched_tokens = found.cached_tokens
    pool.bindings.bind(request, found.decode)
    request.attempt_progress.there_s, request.attempt_progress.elsewhere_s = found.there_s, found.elsewhere_s
    queue.settle_on(request, bound_key(found.decode.incarnation))


def takes(worker: DecodeWorker, request: Request, pool: Pool, now: float) -> bool:
    """Whether this decode worker may compute and decode the request now."""
    if not worker.capacity.computes_suffixes or worker.draining or worker.incarnation == pool.room_for_large.decode:
        return False
    if request.resumed and pool.breakers.host_fails(worker.hello.host, now):
        return False
    cached = cached_tokens(request.submit, worker, pool)
    if cached < request.submit.prompt_tokens - cached:
        return False
    return pool.may_pair(worker, worker, now) and pool.decode_fits(worker, request, pool.short_targets())


def waits_behind(request: Request, pool: Pool, queue: WaitQueue) -> bool:
    """Whether another request that waits for room in decode comes before this one."""
    first = queue.first(list(pool.wakeups.closed)) if pool.wakeups.closed else None
    return first is not None and queue.goes_before(first, request)


def done_in_s(worker: Worker, submit: Submit, cached: int, pool: Pool) -> float:
    """How long the worker takes for the prompt, behind what it has to compute already."""
    return (worker.tokens_before + submit.prompt_tokens - cached) / pool.rate(worker)


def _prefill_s(
    submit: Submit, prefill: Iterable[PrefillWorker], decode: DecodeWorker, pool: Pool, waiting: int, now: float
) -> float:
    """Returns how many seconds the best of these prefill workers takes, hand-over to `decode` included. `waiting`: requests
    that wait for a turn, all taken to be like this one."""
    least_s = inf
    for worker in prefill:
        if not worker.draining and worker.could_ever_take(submit):
            begins = beginning(submit, worker, decode, pool, now)
            cached = begins.tokens
            done_s = done_in_s(worker, submit, cached, pool) + begins.fetch_s
            done_s += hand_over_s(submit, worker, decode, pool, now)
            waits = pool.bindings.kept_waiting(worker, waiting) if waiting else 0.0
            least_s = min(least_s, done_s + waits * (submit.prompt_tokens - cached) / pool.rate(worker))
    return least_s


def _may_run_on_decode(request: Request, pool: Pool) -> bool:
    """Whether the request needs no prompt log-probabilities, has no room kept elsewhere, and is not suspected of ending
    workers."""
    is_usual = request.submit.sampling.prompt_logprobs < 0 and request.suspicion is None
    return is_usual and request.id not in pool.retained and pool.room_for_large.request is not request
