"""A tenant's queue beside a naive twin: whatever joins and leaves, the same entry is next."""

import random
from itertools import takewhile

import pytest

from scheduler.fairness.fair_node import SPARE, FairNode
from scheduler.fairness.tenant_queue import Entry, TenantQueue


class Naive:
    """In the order in which they joined, each with how often it was overtaken."""

    def __init__(self, overtaken_max: int) -> None:
        self.overtaken_max = overtaken_max
        self.counts: dict[Entry[int], int] = {}

    def overtake(self, by: Entry[int]) -> None:
        if next(iter(self.counts)).seq < by.seq:  # else the oldest arrived later
            for entry in takewhile(lambda entry: entry is not by, self.counts):
                self.counts[entry] += 1

    def first(self) -> Entry[int]:
        oldest = next(iter(self.counts))
        if self.counts[oldest] >= self.overtaken_max:
            return oldest
        return min(self.counts, key=lambda entry: (entry.due, entry.chunks, entry.seq))


@pytest.mark.parametrize("seed", range(40))
def test_lane_matches_naive_twin(seed: int) -> None:
    """A tenant's queue names the same next entry as a naive twin, whatever joins, leaves or is overtaken."""
    rnd = random.Random(seed)
    overtaken_max = rnd.choice([1, 3, 10**9])
    queue, naive = TenantQueue[int](FairNode(("t",), 1.0, None, 0), -1, overtaken_max), Naive(overtaken_max)
    elsewhere = TenantQueue[int](FairNode(("t",), 1.0, None, 0), -2, overtaken_max)
    deadlines = rnd.choice([3, 50, 10**9])  # few: many ties
    most, joins = rnd.choice([10, 200]), 0

    def join(entry: Entry[int]) -> None:
        queue.join(entry)
        naive.counts[entry] = 0

    def leave(entry: Entry[int]) -> None:
        queue.leave(entry)
        del naive.counts[entry]

    for step in range(1500):
        dice = rnd.random()
        growing = step % 600 < 400
        if not naive.counts or (dice < (0.6 if growing else 0.2) and len(naive.counts) < most):
            joins += 1
            join(Entry(joins, queue, float(rnd.randrange(deadlines)), rnd.randint(1, 3), joins))
        elif dice < 0.75:
            entry = queue.first()
            queue.overtake(entry)
            naive.overtake(entry)
            leave(entry)
            if rnd.random() < 0.3:
                joins += 1
                entry.chunks, entry.joined = max(entry.chunks - 1, 1), joins
                join(entry)
        elif dice < 0.9:
            leave(rnd.choice(list(naive.counts)))
        else:
            if naive.counts:
                other = Entry(0, elsewhere, 0.0, 1, rnd.randrange(joins + 1))
                queue.overtake(other)
                naive.overtake(other)
        assert queue.size == len(naive.counts), seed
        assert len(queue.heap) <= 2 * queue.size + SPARE, seed
        assert not naive.counts or queue.first() is naive.first(), (seed, step)
