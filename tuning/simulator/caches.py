"""The prompts that prefill workers have cached, by the block ids of a trace, and whether a prompt runs better elsewhere.

A simplified prefix cache: blocks of one worker in the order of use, as many as its KV pool holds. The choice is the score of
`scheduler.limits`; computing a hot prefix once more on another worker is not modelled.
"""

from collections.abc import Sequence

from scheduler.limits import Weights
from scheduler.placement.pairs import prefill_s
from tuning.simulator.job import SimulatedRequest
from tuning.simulator.prefill import SimulatedPrefillWorker


def cached_tokens(job: SimulatedRequest, worker: SimulatedPrefillWorker, block_tokens: int) -> int:
    """Returns a whole number of KV blocks in tokens; the last prompt token is always computed."""
    if job.sent.session:
        tokens = worker.kept.of(job.sent)
        return tokens - tokens % worker.block_size
    cache, known = worker.cache, 0
    for block in job.blocks:
        if block not in cache:
            break
        known += 1
    tokens = min(known * block_tokens, job.prompt - 1)
    return tokens - tokens % worker.block_size


def remember(job: SimulatedRequest, worker: SimulatedPrefillWorker, block_tokens: int, kv_tokens: int) -> None:
    cache = worker.cache
    for block in job.blocks:
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) * block_tokens > kv_tokens:
        cache.popitem(last=False)


def better_worker(
    job: SimulatedRequest,
    asks: SimulatedPrefillWorker,
    workers: Sequence[SimulatedPrefillWorker],
    block_tokens: int,
    tokens_per_s: float,
    waiting: float,
    weights: Weights,
) -> SimulatedPrefillWorker | None:
    """Returns a worker that has more of the prompt cached and is better by the score, even if the request must wait for it."""
    here = cached_tokens(job, asks, block_tokens)
    best, best_s = None, None
    for worker in workers:
        if worker is asks or not worker.fits(job):
            continue
        there = cached_tokens(job, worker, block_tokens)
        if there <= here:
            continue
        if best_s is None:
            best_s = _score(job, asks, here, tokens_per_s, waiting, weights)
        there_s = _score(job, worker, there, tokens_per_s, waiting, weights)
        if there_s < best_s:
            best, best_s = worker, there_s
    return best


def _score(
    job: SimulatedRequest,
    worker: SimulatedPrefillWorker,
    cached: int,
    tokens_per_s: float,
    waiting: float,
    weights: Weights,
) -> float:
    before, uncached = worker.tokens_in_flight + worker.undispatched, job.prompt - cached
    return prefill_s(before, uncached, uncached, tokens_per_s, worker.fullness, weights, waiting)
