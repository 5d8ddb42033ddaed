"""Hot prefixes on several prefill workers in virtual time: our choice of a worker against two simple ones.

"cache only" always takes the worker that has most of the prompt, however much waits there. "load only" takes the one with
the least to do, whatever it has cached. Both are weights of the same score, so everything else is equal.
"""

import random
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from coordinator.score import Weights
from tests.coordinator.cache_world import LOAD_ONLY, LONGEST_PREFIX_FIRST, RATE, Arrival, CacheWorld

PREFIX_TOKENS = 1024
TAIL_TOKENS = (20, 200)
HOT_SHARE = 0.9
POLICIES = {"ours": Weights(), "cache": LONGEST_PREFIX_FIRST, "load": LOAD_ONLY}


@dataclass(frozen=True)
class Cell:
    """One cell of the grid."""

    hot: int
    """Prefixes that are shared."""
    load: float
    """Of what the workers can compute, if every shared prefix is found in a cache."""
    workers: int
    blocks: int = 2000
    """KV blocks of 16 tokens of each worker: the caches' capacity. A prefix takes 64."""
    requests: int = 0
    """0: enough to warm the caches up, and as many again."""


@dataclass(frozen=True)
class Found:
    """Of the second half of a run, so that caches are warm."""

    ttft_p50_s: float
    ttft_p99_s: float
    hit_share: float
    """Of prompt tokens."""
    most_on_one: float
    """Share of the requests that ran on the busiest worker."""


def arrivals(cell: Cell, seed: int = 0) -> list[Arrival]:
    rnd = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return [rnd.randrange(1 << 16) for _ in range(tokens)]

    prefixes = [text(PREFIX_TOKENS) for _ in range(cell.hot)]
    mean_tokens = sum(TAIL_TOKENS) / 2 + (1 - HOT_SHARE) * PREFIX_TOKENS
    per_s = cell.load * cell.workers * RATE / mean_tokens
    requests = cell.requests or 300 + 8 * cell.hot + 60 * cell.workers
    at, found = 0.0, []
    for _ in range(requests):
        at += rnd.expovariate(per_s)
        begin = rnd.choice(prefixes) if rnd.random() < HOT_SHARE else text(PREFIX_TOKENS)
        found.append(Arrival(at, begin + text(rnd.randint(*TAIL_TOKENS))))
    return found


def measure(workers: int, traffic: list[Arrival], weights: Weights, blocks: int = 2000, skip: float = 0.5) -> Found:
    world = CacheWorld(workers, blocks=blocks, weights=weights)
    world.run(traffic)
    names = [f"r{number}" for number in range(int(len(traffic) * skip), len(traffic))]
    ttft_s = [world.ttft_s[name] for name in names]
    cached = sum(world.cached_of[name] for name in names)
    tokens = sum(len(arrival.prompt) for arrival in traffic[int(len(traffic) * skip) :])
    most = max(Counter(world.worker_of[name] for name in names).values()) / len(names)
    return Found(median(ttft_s), quantiles(ttft_s, n=100)[98], cached / tokens, most)


def run_cell(cell: Cell, seed: int = 0) -> dict[str, Found]:
    traffic = arrivals(cell, seed)
    return {name: measure(cell.workers, traffic, weights, cell.blocks) for name, weights in POLICIES.items()}


def ratios(found: dict[str, Found]) -> tuple[float, float]:
    """TTFT p50 against the better of the two, and hit share against "cache only"."""
    ours, cache, load = found["ours"], found["cache"], found["load"]
    slower = ours.ttft_p50_s / min(cache.ttft_p50_s, load.ttft_p50_s)
    return slower, ours.hit_share / cache.hit_share if cache.hit_share else 1.0


def holds(cell: Cell, slower: float, hits: float) -> bool:
    return slower <= 1.2 and (cell.load > 0.7 or hits >= 0.95)


def judge(cell: Cell) -> tuple[float, float, bool]:
    """The ratios, and whether both are as they must be. One draw of the traffic moves them by a tenth, so a cell that just
    misses is judged by the mean of four."""
    slower, hits = ratios(run_cell(cell))
    if not holds(cell, slower, hits):
        draws = [(slower, hits), *(ratios(run_cell(cell, seed)) for seed in (1, 2, 3))]
        slower, hits = (fmean(figure) for figure in zip(*draws, strict=True))
    return slower, hits, holds(cell, slower, hits)


def one_shared_prefix(requests: int = 211) -> list[Arrival]:
    """40 requests/s that begin with the same 2,048 tokens, where four workers can compute 64/s of them."""
    rnd, at = random.Random(1), 3.0
    prefix = [rnd.randrange(1 << 16) for _ in range(2048)]
    found = [Arrival(0.0, [*prefix, 1])]  # one worker has it before the others come
    for _ in range(requests):
        at += rnd.expovariate(40.0)
        found.append(Arrival(at, prefix + [rnd.randrange(1 << 16) for _ in range(125)]))
    return found
