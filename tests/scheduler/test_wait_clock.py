"""Waits are taken apart into parts that are never negative and add up to the wait."""

import random

import pytest

from proto.codec import decode, encode
from proto.messages import WaitReport
from scheduler.waiting.wait_clock import WaitClock


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tenants", [1, 3])
def test_parts_of_a_wait_fit_the_wire(seed: int, tenants: int) -> None:
    """A gateway can read the parts of any wait, and they add up to it; with one tenant, other tenants have no part."""
    rng, clock, now = random.Random(seed), WaitClock(), 0.0
    marks = []
    for _ in range(400):
        now += rng.expovariate(3.0)
        path = (f"t{rng.randrange(tenants)}",)
        clock.computed(path, rng.randrange(2000))
        closed = [key for key in range(2) if rng.random() < 0.3]
        clock.advance(now, cold=rng.random() < 0.1, full=rng.random() < 0.2, closed=closed)
        marks.append((clock.mark(path, rng.randrange(2), now), path, now))
        if len(marks) < 8:
            continue
        mark, path, began = marks.pop(rng.randrange(len(marks)))
        waits = clock.since(mark, path, now)
        decode([encode(WaitReport("r", 1, waits))])
        assert waits.total == pytest.approx(1000 * (now - began), abs=1e-6)
        assert tenants > 1 or not waits.other_tenants
