"""Runs many seeds on all cores, and adds up what happened in them."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.world.run import SeedResult, run_seed

PART_SEEDS = 16
"""Number of seeds that a process runs at a time."""


@dataclass
class Sum:
    """The sums of a number of runs; sums can be added."""

    seeds: int = 0
    events: int = 0
    tokens: int = 0
    virtual_s: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was broken)."""

    def add(self, result: SeedResult) -> None:
        failed = []
        if result.failure is not None:
            failed.append((result.seed, f"{type(result.failure).__name__}: {result.failure}"))
        self.merge(Sum(1, result.events, result.tokens, result.virtual_s, result.injected, result.outcomes, failed))

    def merge(self, other: "Sum") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.tokens += other.tokens
        self.virtual_s += other.virtual_s
        self.injected += other.injected
        self.outcomes += other.outcomes
        self.failed += other.failed


def part(seeds: range, kinds: frozenset[str]) -> Sum:
    """Runs some seeds, up to the first that fails."""
    total = Sum()
    for seed in seeds:
        total.add(run_seed(seed, kinds))
        if total.failed:
            break
    return total


def search(seeds: range, kinds: frozenset[str], processes: int, progress: Callable[[Sum], object]) -> Sum:
    """Runs all seeds in `processes` processes, and stops at the first that fails. Calls `progress` with the sum so far."""
    total = Sum()
    starts = range(seeds.start, seeds.stop, PART_SEEDS)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(part, range(start, min(start + PART_SEEDS, seeds.stop)), kinds) for start in starts]
        try:
            for done in as_completed(parts):
                total.merge(done.result())
                progress(total)
                if total.failed:
                    break
        finally:
            pool.shutdown(cancel_futures=True)
    return total
