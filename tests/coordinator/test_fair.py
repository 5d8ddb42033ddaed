"""The fair queue's promises, over random traces."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest

from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES, PriorityClass
from scheduler.fairness.fair_node import Ring, SortedRow
from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.held_shares import HeldShares
from scheduler.fairness.tenant_queue import Entry, TenantQueue
from scheduler.limits import ring_weights
from tests.coordinator.fair_traces import Job, Trace
from tests.coordinator.turns import Answer, MoveTo, pop
from tests.helpers import first


class InArrivalOrder(FairQueue[Job]):
    """The negative control: whoever's request came first is next, whatever it has had already."""

    def first(self, keys: Iterable[int], shares: HeldShares | None = None) -> Entry[Job] | None:
        queues = [leaf.rows[key] for leaf in self._leaves.values() for key in keys if key in leaf.rows]
        return min(
            (queue.first() for queue in queues if isinstance(queue, TenantQueue)),
            key=lambda e: e.item.arrival,
            default=None,
        )


def check_traces(seeds: range, events: int = 150) -> None:
    for seed in seeds:
        trace = Trace(seed, events=events, errors=seed % 4 >= 2).run()
        assert trace.violation <= 1e-9, (seed, trace.violation)
        assert trace.idle_with_work == 0, seed


@pytest.mark.parametrize("block", first(1, range(6)))
def test_service_difference_is_bounded(block: int) -> None:
    """Service of two backlogged tenants differs by no more than the bound."""
    check_traces(range(block * 200, (block + 1) * 200))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_bound_holds_over_long_traces() -> None:
    """The bound on service holds over ten thousand longer traces."""
    check_traces(range(10_000, 20_000), events=300)


def test_arrival_order_breaks_bound() -> None:
    """Serving in arrival order instead of ring order breaks the bound."""
    assert any(Trace(seed, InArrivalOrder).run().violation > 1e-9 for seed in range(100))


FREE, PLACED = -1, 1


def one_chunk(cost: int) -> Terms:
    return Terms(float(cost), True, PLACED)


def backlog(queue: FairQueue[int], path: tuple[str, ...], entries: int, cost: int = 256) -> None:
    for _ in range(entries):
        queue.push(cost, path, FREE, 0.0, 1)


def drain(queue: FairQueue[int], chunks: int) -> dict[tuple[str, ...], float]:
    """Serve so many chunks; the cost served by tenant."""
    served: dict[tuple[str, ...], float] = {}
    for _ in range(chunks):
        found = pop(queue, (PLACED, FREE), one_chunk)
        assert found.entry is not None, "idle with work waiting"
        path = found.entry.leaf.path
        served[path] = served.get(path, 0.0) + found.cost
    return served


def test_shares_follow_weights() -> None:
    """Shares follow weights within one percent after 200 rounds."""
    weights = {"a": 1.0, "b": 2.5, "c": 7.0}
    queue = FairQueue[int](256, weights)
    for name in weights:
        backlog(queue, (name,), 1500)
    served = drain(queue, int(200 * sum(weights.values())))
    total = sum(served.values())
    for name, weight in weights.items():
        assert abs(served[(name,)] / total / (weight / sum(weights.values())) - 1) <= 0.01


def test_jain_index_with_mixed_costs() -> None:
    """Jain's index of a hundred tenants with different costs is at least 0.999."""
    queue = FairQueue[int]()
    rnd = random.Random(1)
    for tenant in range(100):
        for _ in range(600):
            queue.push(rnd.randint(1, 64 if tenant % 2 else 256), (str(tenant),), FREE, 0.0, 1)
    served = list(drain(queue, 30_000).values())
    assert sum(served) ** 2 / (100 * sum(x * x for x in served)) >= 0.999


@pytest.mark.parametrize("floor", [0.05, 0.2])
def test_lowest_class_keeps_its_floor(floor: float) -> None:
    """The lowest priority class keeps its floor share under endless work above it."""
    priority_classes = {**DEFAULT_PRIORITY_CLASSES, "batch": PriorityClass(0.1, floor)}
    queue = FairQueue[int](256, ring_weights(priority_classes))
    for priority_class in priority_classes:
        for user in range(1 if priority_class == "batch" else 20):
            backlog(queue, (priority_class, "o", str(user)), 8000 if priority_class == "batch" else 1000)
    served = drain(queue, 13_000)
    assert abs(served[("batch", "o", "0")] / sum(served.values()) - floor) <= 0.005


def test_floors_leave_rest_to_weights() -> None:
    """Floors leave the rest to weights, and floors that leave nothing are an error."""
    weights = ring_weights({"a": PriorityClass(3), "b": PriorityClass(1), "c": PriorityClass(0.001, 0.2)})
    assert weights["c"] == 0.2 and abs(weights["a"] - 0.6) < 1e-12 and abs(sum(weights.values()) - 1) < 1e-12
    with pytest.raises(ValueError, match="floor_share"):
        ring_weights({"a": PriorityClass(1, 0.5), "b": PriorityClass(1, 0.5)})


def test_many_users_get_one_share() -> None:
    """A thousand users of one organisation get as much as one user of another."""
    queue = FairQueue[int]()
    for user in range(1000):
        backlog(queue, ("many", str(user)), 2)
    backlog(queue, ("one", "u"), 1000)
    assert abs(drain(queue, 1000)[("one", "u")] - 500 * 256) <= 256


def test_idleness_drops_credit_keeps_debt() -> None:
    """An idle tenant loses its credit and keeps its debt."""
    queue = FairQueue[int]()
    backlog(queue, ("a",), 1, 10)
    drain(queue, 1)
    queue.adjust(("a",), 5000.0)
    queue.adjust(("c",), -100_000.0)
    for name in "abc":
        backlog(queue, (name,), 40, 500)
    served = drain(queue, 40)
    assert served[("b",)] == served[("c",)], "nobody saves up while idle"
    assert abs(served[("b",)] - served[("a",)] - 5010) <= 1000


def test_refund_takes_effect_at_once() -> None:
    """A refund that ends a debt takes effect at once."""
    queue = FairQueue[int]()
    queue.adjust(("a",), 1e6)
    backlog(queue, ("a",), 100, 10)
    backlog(queue, ("b",), 100, 10)
    assert ("a",) not in drain(queue, 10)
    queue.adjust(("a",), -1e6)
    assert drain(queue, 10)[("a",)] >= 40


def test_overcharge_while_busy_comes_back() -> None:
    """An overcharge comes back to a busy tenant, though it was never ahead."""
    queue = FairQueue[int]()
    for name in "ab":
        backlog(queue, (name,), 100, 10)
    drain(queue, 2)
    queue.adjust(("a",), -200.0)
    served = drain(queue, 40)
    assert abs(served[("a",)] - served[("b",)] - 200) <= 20


def test_long_prompt_is_overtaken_in_bounds() -> None:
    """A long prompt holds up no short one of its tenant, and is overtaken a limited number of times."""
    queue = FairQueue[str](overtaken_max=4)
    queue.push("long", ("a",), FREE, 0.0, 1000)
    order = []
    for _ in range(40):
        if len(queue) == 1:
            queue.push("short", ("a",), FREE - 1, 0.0, 1)
        found = pop(queue, (PLACED, FREE, FREE - 1), lambda item: Terms(256.0, item == "short", PLACED))
        assert found.entry is not None
        order.append(found.entry.item)
    assert order[:5] == ["short"] * 4 + ["long"]
    turns = [turn for turn, item in enumerate(order) if item == "long"]
    assert all(b - a in (5, 6) for a, b in pairwise(turns)), "one short may have joined before it"


@pytest.mark.parametrize("seed", range(30))
def test_overtakings_respect_the_limit(seed: int) -> None:
    """By chunks of those that arrived later, of an entry that nobody in its queue joined before."""
    rnd = random.Random(seed)
    queue = FairQueue[int](overtaken_max=5)
    overtaken: dict[Entry[int], int] = {}
    most = 0
    for now in range(400):
        for _ in range(rnd.choice([0, 1, 3])):
            entry = queue.push(now, ("a",), FREE - rnd.randrange(3), rnd.random() * 10, rnd.randint(1, 6))
            overtaken[entry] = 0
        if overtaken and rnd.random() < 0.1:
            gone = rnd.choice(list(overtaken))
            queue.remove(gone)
            del overtaken[gone]
        last = rnd.random() < 0.4
        keys = [key for key in (PLACED, FREE, FREE - 1, FREE - 2) if rnd.random() < 0.9]
        first = {entry for entry in overtaken if entry.key in keys and entry.queue.oldest is entry}
        found = pop(queue, keys, lambda _, last=last: Terms(256.0, last, PLACED))  # type: ignore[misc]
        if found.entry is None:
            continue
        served = found.entry
        for other in first - {served}:
            overtaken[other] += served.seq > other.seq
            most = max(most, overtaken[other])
        overtaken[served] = 0
        if last:
            del overtaken[served]
    assert most == 5, "and the limit is not idle"


def test_equal_deadlines_run_in_order() -> None:
    """However many it has, and under whichever key: with equal deadlines, requests are computed one after the other."""
    queue = FairQueue[str](overtaken_max=3)
    for name in ("a", "b", "c"):
        queue.push(name, ("t",), FREE, 10.0, 8)
    left = {"a": 8, "b": 8, "c": 8}

    def offer(item: str) -> Terms:
        left[item] -= 1
        return Terms(256.0, not left[item], PLACED)

    order = [found.entry.item for _ in range(24) if (found := pop(queue, (PLACED, FREE), offer)).entry]
    assert order == ["a"] * 8 + ["b"] * 8 + ["c"] * 8


def test_restricted_tenant_keeps_its_share() -> None:
    """A tenant that cannot run on one worker keeps its share on the others."""
    queue = FairQueue[str]()
    for name in "ab":
        for _ in range(200):
            queue.push(name, (name,), FREE if name == "a" else FREE - 1, 0.0, 1)
    served = {"a": 0, "b": 0}
    for turn in range(200):
        keys = (FREE, FREE - 1) if turn % 2 == 0 else (FREE - 1,)
        found = pop(queue, keys, lambda _: Terms(256.0, True, PLACED))
        assert found.entry is not None
        served[found.entry.item] += 1
    assert served["a"] >= 95, "half of the workers can run it, and it gets half of the service"


def test_unplaceable_requests_hide_no_tenant() -> None:
    """A thousand requests without room hide no other tenant, and cost one offer for each queue key."""
    queue = FairQueue[int]()
    for user in range(1000):
        queue.push(user, ("attacker", str(user)), FREE - user % 10, 0.0, 1)
    queue.push(1000, ("victim",), FREE - 10, 0.0, 1)
    asked: list[int] = []

    def full(item: int) -> Answer:
        asked.append(item)
        return None if item < 1000 else Terms(1.0, True, PLACED)

    found = pop(queue, [FREE - key for key in range(11)], full)
    assert found.entry is not None and found.entry.item == 1000
    assert len(asked) == 11
    assert pop(queue, [FREE], full).entry is None and len(asked) == 12
    assert len(queue) == 1000


def test_moved_requests_let_others_by() -> None:
    """Requests moved to another queue key let others by."""
    queue = FairQueue[int]()
    backlog(queue, ("a",), 64)
    backlog(queue, ("b",), 1, 7)
    found = pop(queue, (FREE,), lambda cost: MoveTo(2) if cost == 256 else Terms(7.0, True, PLACED))
    assert found.entry is not None and found.entry.leaf.path == ("b",) and queue.has(2) and not queue.has(FREE)
    assert len(queue) == 64 and pop(queue, (2,), one_chunk).entry is not None


def test_first_tells_turn_without_charge() -> None:
    """The method `first` tells the entry whose turn it is, and charges nothing."""
    queue = FairQueue[str]()
    assert queue.first((FREE,)) is None
    first, second = (queue.push(name, (name,), FREE - n, 0.0, 1) for n, name in enumerate("ab"))
    for _ in range(3):
        assert queue.first((FREE, FREE - 1)) is first and queue.first((FREE - 1,)) is second
    assert queue.goes_before(first, second) and not queue.goes_before(second, first)
    queue.charge(("a",), 1.0)
    assert queue.first((FREE, FREE - 1)) is second and queue.goes_before(second, first)


def test_no_key_of_tenant_starves() -> None:
    """No queue key of a tenant starves beside its others."""
    queue = FairQueue[str](overtaken_max=4)
    queue.push("large", ("a",), FREE - 1, 1e6, 1)
    served = []
    for now in range(20):
        queue.push("small", ("a",), FREE, float(now), 1)
        found = pop(queue, (FREE, FREE - 1), lambda _: Terms(1.0, True, PLACED))
        assert found.entry is not None
        served.append(found.entry.item)
    assert served.index("large") == 4


def test_pop_cost_is_independent_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rings that a pop looks at does not grow with the number of tenants."""
    looked = 0
    first = Ring.first

    def count(ring: Ring) -> SortedRow:
        nonlocal looked
        looked += 1
        return first(ring)

    monkeypatch.setattr(Ring, "first", count)
    counts = []
    for tenants in (10, 1000):
        queue = FairQueue[int]()
        for number in range(tenants):
            queue.push(1, ("standard", str(number % 7), str(number)), FREE - number % 20, 0.0, 1)
        looked = 0
        assert pop(queue, [FREE - key for key in range(20)], one_chunk).entry is not None
        counts.append(looked)
    assert counts[1] <= 3 * 20 and counts[1] <= 4 * counts[0]
