"""Cancels in every state: everything comes back, hardly anything more is computed, and the bill is what was done."""

import random
from collections import Counter

import pytest

from coordinator.events import Limits
from lab.cluster.cluster import MODEL
from lab.cluster.surroundings import Timing
from scheduler.fairness.fair_node import Path
from tests.coordinator.billed import Billed
from tests.helpers import first
from tests.uniform_cluster import UniformCluster
from tests.world import invariants

STEP_TOKENS = 128


def spam(seed: int, requests: int) -> None:
    world = UniformCluster(
        Limits(step_tokens=STEP_TOKENS),
        Timing(prefill_tokens_per_s=20_000, decode_step_s=0.005),
        prefill=2,
        decode=2,
        prefill_blocks=600,
        decode_blocks=600,
        max_seqs=24,
        progress=False,
    )
    queue = world.core.cluster.queues[MODEL].fair = Billed()
    rnd, now = random.Random(seed), 0.0
    states: Counter[str] = Counter()
    further: list[int] = []

    def cancel(name: str) -> None:
        request = world.core.cluster.requests.get(name)
        if request is None:
            return
        states[request.state] += 1
        before = computed(name)
        world.cancel(name)
        world.at(world.now + 5.0, lambda: further.append(computed(name) - before))
        if states.total() % 100 == 0:
            invariants.check(world.core)

    def computed(name: str) -> int:
        return sum(worker.computed[(name, 1)] for worker in world.prefill.values())

    for n in range(requests):
        now += rnd.expovariate(60.0)
        who, tokens = f"o{rnd.randrange(3)}/u{rnd.randrange(3)}", rnd.randint(1, 900)
        world.at(now, world.submit, f"r{n}", who, tokens, 100)
        world.at(now + rnd.expovariate(4.0), cancel, f"r{n}")
    world.run(now + 1000.0)

    invariants.check(world.core)
    assert not world.core.cluster.requests and not queue.size and not world.core.cluster.queues[MODEL].line.tokens, seed
    assert not any(worker.allocations or worker.steps for worker in world.core.cluster.workers.values()), seed
    assert {"queued", "prefilling", "decoding"} <= set(states), (seed, states)
    assert max(further) <= STEP_TOKENS, (seed, "one further chunk at the most", max(further))
    done: Counter[Path] = Counter()
    for worker in world.prefill.values():
        for (name, _), tokens in worker.computed.items():
            done[world.core.accounts.path(world.requests[name].submit)] += tokens
    for request in world.requests.values():
        done[world.core.accounts.path(request.submit)] += 2 * sum(request.emitted_tokens)
    done = +done  # a tenant with nothing done is not in the bill
    assert {path: round(bill, 3) for path, bill in queue.bill.items() if round(bill, 3)} == dict(done), seed


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_cancels_leak_nothing(seed: int) -> None:
    """Cancels in every state leak nothing, and only work that was done is charged."""
    spam(seed, 1500)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_cancels_leak_nothing() -> None:
    """A hundred thousand cancels leak nothing."""
    spam(99, 100_000)
