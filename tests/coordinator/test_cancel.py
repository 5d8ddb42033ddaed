"""Cancels in every state: everything comes back, hardly anything more is computed, and the bill is what was done."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from coordinator import invariants
from coordinator.events import Limits
from coordinator.fairness.fair_queue import FairQueue, Popped
from coordinator.fairness.offers import Offer, Terms
from coordinator.fairness.scheduling_class import Path
from coordinator.fairness.tenant_queue import Entry
from coordinator.request import Request
from tests.coordinator.virtual import Virtual
from tests.coordinator.world import MODEL
from tests.helpers import first

STEP_TOKENS = 128


class Billed(FairQueue[Request]):
    """Writes down what each tenant was charged in all."""

    def __init__(self) -> None:
        super().__init__(1024.0)
        self.bill: Counter[Path] = Counter()

    def pop(self, keys: Iterable[int], offer: Offer[Request]) -> Popped[Request]:
        found = super().pop(keys, offer)
        if found.entry is not None:
            self.bill[found.entry.leaf.path] += found.cost  # type: ignore[assignment]
        return found

    def go_on(self, entry: Entry[Request], terms: Terms) -> None:
        self.bill[entry.leaf.path] += terms.cost  # type: ignore[assignment]
        super().go_on(entry, terms)

    def adjust(self, path: Path, cost: float) -> None:
        self.bill[path] += cost  # type: ignore[assignment]
        super().adjust(path, cost)


def spam(seed: int, requests: int) -> None:
    world = Virtual(
        Limits(step_tokens=STEP_TOKENS),
        prefill=2,
        decode=2,
        tokens_per_s=20_000,
        itl_s=0.005,
        kv_blocks=600,
        max_seqs=24,
    )
    queue = world.core.queues[MODEL].fair = Billed()
    rnd, now = random.Random(seed), 0.0
    states: Counter[str] = Counter()
    further: list[int] = []

    def cancel(name: str) -> None:
        request = world.core.requests.get(name)
        if request is None:
            return
        states[request.state] += 1
        before = computed(name)
        world.cancel(name)
        world.at(world.now + 5.0, lambda: further.append(computed(name) - before))
        if states.total() % 100 == 0:
            invariants.check(world.core)

    def computed(name: str) -> int:
        return sum(machine.computed.get((name, 1), 0) for machine in world.machines.values())

    for n in range(requests):
        now += rnd.expovariate(60.0)
        who, tokens = f"o{rnd.randrange(3)}/u{rnd.randrange(3)}", rnd.randint(1, 900)
        world.at(now, lambda n=n, who=who, tokens=tokens: world.submit(f"r{n}", who, tokens, max_tokens=100))  # type: ignore[misc]
        world.at(now + rnd.expovariate(4.0), lambda n=n: cancel(f"r{n}"))  # type: ignore[misc]
    world.run(now + 1000.0)

    invariants.check(world.core)
    assert not world.core.requests and not queue.size and not world.core.queues[MODEL].backlog.tokens, seed
    assert not any(worker.holdings or worker.steps for worker in world.core.workers.values()), seed
    assert {"queued", "prefilling", "decoding"} <= set(states), (seed, states)
    assert max(further) <= STEP_TOKENS, (seed, "one further chunk at the most", max(further))
    done: Counter[Path] = Counter()
    for machine in world.machines.values():
        for (name, _), tokens in machine.computed.items():
            done[world.core.path(world.submitted[name][1])] += tokens
    for tenant, tokens in world.emitted_tokens.items():
        done["standard", *tenant.split("/")] += 2 * tokens
    assert {path: round(bill, 3) for path, bill in queue.bill.items() if round(bill, 3)} == dict(done), seed


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_cancels_leak_nothing_and_charge_what_was_done(seed: int) -> None:
    spam(seed, 1500)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_cancels_leak_nothing() -> None:
    spam(99, 100_000)
