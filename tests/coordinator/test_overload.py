"""What happens when more comes than fits, in virtual time: nothing idles, the right ones go, and they come back one by one."""

import random
import statistics
from collections import Counter
from collections.abc import Iterable
from math import inf

import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import ClientRequest, Timing
from proto.errors import Reject
from proto.messages import Rejected, Submit
from scheduler.fairness.fair_queue import FairQueue
from scheduler.fairness.tenant_queue import Entry, TenantQueue
from scheduler.request import Request
from scheduler.waiting.rates import Rate
from tests.coordinator.world import MODEL, Harness, submit
from tests.helpers import first
from tests.uniform_cluster import UniformCluster


class FirstCome(FairQueue[Request]):
    """First come, first served, over all tenants: what fairness must not cost throughput against."""

    def _first(self, keys: Iterable[int]) -> Entry[Request] | None:
        queues = [leaf.rows[key] for leaf in self._leaves.values() for key in keys if key in leaf.rows]
        heads = [queue.first() for queue in queues if isinstance(queue, TenantQueue)]
        return min(heads, key=lambda entry: (entry.item.arrived, entry.item.id), default=None)


class Watched(UniformCluster):
    """Counts the seconds of prefill workers that are idle while something waits."""

    idle_with_work_s = 0.0

    def advance(self, to_s: float) -> None:
        if to_s > self.now and any(len(queue) for queue in self.core.cluster.queues.values()):
            self.idle_with_work_s += (to_s - self.now) * sum(not worker.computing for worker in self.prefill.values())
        super().advance(to_s)


def work(seed: int, first_come: bool) -> Watched:
    """Twenty seconds of a mixed load, somewhat more than two workers do."""
    timing = Timing(prefill_step_s=0.002, decode_step_s=0.01)
    world = Watched(timing=timing, prefill=2, decode=2, progress=False)
    if first_come:
        world.core.cluster.queues[MODEL].fair = FirstCome()
    rnd, now, n = random.Random(seed), 0.0, 0
    while (now := now + rnd.expovariate(18.0)) < 20.0:
        n += 1
        tokens = min(int(rnd.lognormvariate(6.6, 1.0)) + 1, 16_000)
        who = f"o{rnd.randrange(4)}/u{rnd.randrange(5)}"
        world.at(now, world.submit, f"r{n}", who, tokens, 64)
    world.run(20.0)
    return world


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_fairness_costs_no_throughput(seed: int) -> None:
    """The fair order computes 99 % of the tokens of first come, first served, and idles no worker with work."""
    fair, first_come = work(seed, False), work(seed, True)
    assert computed_tokens(fair) >= 0.99 * computed_tokens(first_come) > 0.8 * 2 * 20 * 8192
    busy_s = sum(worker.busy_s for worker in fair.prefill.values())
    assert fair.idle_with_work_s <= 0.005 * busy_s, (fair.idle_with_work_s, busy_s)


def computed_tokens(world: UniformCluster) -> int:
    return sum(worker.computed_tokens for worker in world.prefill.values())


def goodput(times: float, seed: int) -> tuple[float, int]:
    """Requests of ten tenants with a first token within 4 s, per second, at so many times what one worker does; and the
    greatest number known to the coordinator."""
    world = UniformCluster(Limits(queue_requests_max=16), Timing(prefill_step_s=0.002))
    rnd, now, most, n = random.Random(seed), 0.0, 0, 0
    while (now := now + rnd.expovariate(times * 8192 / 1024)) < 60.0:
        n += 1
        world.at(now, world.submit, f"r{n}", f"o{n % 10}", 1024)
    while world.next_s < inf:
        world.step()
        most = max(most, len(world.core.cluster.requests))
    return sum(ttft_s <= 4.0 for ttft_s in world.ttft_s.values()) / 60.0, most


@pytest.mark.parametrize("seed", first(1, range(2)))
def test_overload_does_not_reduce_goodput(seed: int) -> None:
    """Five times the load leaves at least 95 % of the peak goodput, and the coordinator's memory bounded."""
    found = {times: goodput(times, seed) for times in (0.8, 1.0, 1.5, 2.0, 5.0)}
    peak = max(rate for rate, _ in found.values())
    assert found[5.0][0] >= 0.95 * peak, found
    assert found[5.0][1] <= 40, "what the coordinator remembers does not grow with the load"


def fleet(seed: int, clients: int = 1000) -> tuple[list[float], list[float]]:
    """All come at once, with prompts of their own, and come back when told: times of the first retries, and of those that
    failed again."""
    world = UniformCluster(Limits(queue_requests_max=64), Timing(prefill_tokens_per_s=16384.0))
    retries: list[float] = []
    failed: list[float] = []

    def come(name: str) -> None:
        number = 10_000 * seed + int(name.strip("+").partition("-")[2])
        world.submit(name, "o", 512, prompt=number.to_bytes(4, "little") + bytes(4 * 511))

    def again(request: ClientRequest) -> None:
        submit, rejected = request.submit, request.rejected
        if rejected is None:
            return
        assert rejected.reason in (Reject.QUEUE_FULL, Reject.SHED) and rejected.retry_after_s >= 1.0
        if "+" in submit.request_id:
            failed.append(world.now)
            return
        retries.append(world.now + rejected.retry_after_s)
        world.at(retries[-1], come, submit.request_id + "+")

    world.on_end = again
    for n in range(16):
        world.at(0.1 * n, world.submit, f"warm{n}", "o", 512)
    for n in range(clients):
        world.at(5.0, come, f"c{seed}-{n}")
    world.run(1000.0)
    return retries, failed


@pytest.mark.parametrize("seed", first(1, range(1, 4)))
def test_retry_after_spreads_the_fleet(seed: int) -> None:
    """Clients that obey retry_after are mostly let in at the first retry and do not all come at once."""
    retries, failed = fleet(seed)
    assert len(retries) > 800 and len(failed) <= 0.1 * len(retries), (len(retries), len(failed))
    per_s = Counter(int(when - min(retries)) for when in retries)
    seconds = [per_s[s] for s in range(max(per_s) + 1)][:-1]  # the last one is not a whole second
    assert max(seconds) / statistics.mean(seconds) <= 1.5, seconds


def test_largest_backlog_is_shed_first() -> None:
    """The newest request of the largest backlog is shed from a full queue for a tenant with a small one."""
    h = Harness.make(limits=Limits(queue_requests_max=10), max_seqs=1)
    for n in range(11):
        h.receive(1, with_tenant(f"big{n}", "big/a"))
    assert not h.take(Rejected)
    h.receive(1, with_tenant("small", "small/b"))
    [shed] = h.take(Rejected)
    assert isinstance(shed, Rejected) and (shed.request_id, shed.reason) == ("big10", Reject.SHED)
    assert shed.retry_after_s >= 1.0 and "small" in h.core.cluster.requests and h.ended["big10"] == ["rejected"]
    h.receive(1, with_tenant("big11", "big/a"))
    [refused] = h.take(Rejected)
    assert isinstance(refused, Rejected) and (refused.request_id, refused.reason) == ("big11", Reject.QUEUE_FULL)


def test_many_users_do_not_hide_backlog() -> None:
    """An organisation's backlog is counted over all its users when requests are shed."""
    h = Harness.make(limits=Limits(queue_requests_max=20), max_seqs=1)
    h.receive(1, with_tenant("first", "many/x"))
    for n in range(18):
        h.receive(1, with_tenant(f"many{n}", f"many/u{n}"))
    for n in range(4):
        h.receive(1, with_tenant(f"small{n}", "small/b"))
    assert {m.request_id[:4] for m in h.take(Rejected) if isinstance(m, Rejected)} == {"many"}


def test_lowest_priority_class_is_shed_first() -> None:
    """The lowest priority class is shed first, and a newcomer of that class is refused itself."""
    h = Harness.make(limits=Limits(queue_requests_max=3), max_seqs=1)
    for n, priority_class in enumerate(["standard", "interactive", "batch", "standard"]):
        h.receive(1, with_tenant(f"{priority_class}{n}", f"o{n}", priority_class))
    h.receive(1, with_tenant("new", "o9", "interactive"))
    assert [m.request_id for m in h.take(Rejected) if isinstance(m, Rejected)] == ["batch2"]
    h.receive(1, with_tenant("late", "o8", "batch"))
    assert [m.request_id for m in h.take(Rejected) if isinstance(m, Rejected)] == ["late"]


def with_tenant(name: str, tenant: str, priority_class: str = "", tokens: int = 10, deadline_ms: float = 0.0) -> Submit:
    made = submit(name, tokens)
    return Submit(
        name,
        1,
        made.model,
        tokens,
        made.sampling,
        tenant=tenant,
        priority_class=priority_class,
        deadline_ms=deadline_ms,
    )


def test_unreachable_deadline_is_refused() -> None:
    """A deadline that the projected wait does not allow is refused when the request is submitted."""
    world = UniformCluster(timing=Timing(prefill_tokens_per_s=1000.0))
    world.submit("measured", "o", 1000)
    world.run(5.0)
    world.submit("never", "o", 1000, deadline_ms=500)
    [refused] = world.rejected
    assert (refused.request_id, refused.reason, refused.retry_after_s) == ("never", Reject.DEADLINE, 0.0)
    for n in range(10):
        world.submit(f"long{n}", f"o{n}", 1000)
    world.submit("late", "a/late", 1000, deadline_ms=3000)
    world.submit("soon", "b/soon", 100, deadline_ms=3000)
    world.run(100.0)
    assert world.requests["soon"].state == "finished"
    assert [r.request_id for r in world.rejected] == ["never", "late"], "it would have to share with ten others"
    assert world.rejected[1].reason is Reject.DEADLINE and 5.0 < world.rejected[1].retry_after_s < 12.0


def test_default_target_spares_short_overload() -> None:
    """The default target refuses nothing in the first ten seconds of an overload, and what comes late after them."""
    world, refused_at = UniformCluster(timing=Timing(prefill_tokens_per_s=1000.0)), list[float]()
    world.on_end = lambda request: refused_at.append(world.now) if request.rejected else None
    world.submit("measured", "o", 1000)
    world.run(5.0)
    for n in range(40):
        world.at(5.0 + 0.5 * n, world.submit, f"r{n}", "o", 1000)
    world.run(100.0)
    assert refused_at and 15.0 < min(refused_at) < 21.0, "the first is expected late at 7.5 s"
    assert len(world.ttft_s) == 41 - len(refused_at)


def test_missed_deadline_stops_prefill() -> None:
    """A request whose deadline passes expires before its last chunk is computed."""
    world = UniformCluster(timing=Timing(prefill_tokens_per_s=1000.0))
    world.submit("measured", "o", 1000)
    world.run(5.0)
    world.submit("late", "a/late", 1000, deadline_ms=3000)
    for worker in world.prefill.values():
        worker.engine.timing = Timing(prefill_tokens_per_s=200.0)  # not what was measured when it was let in
    world.run(100.0)
    assert world.requests["late"].state == "expired"
    computed = sum(worker.computed[("late", 1)] for worker in world.prefill.values())
    assert 0 < computed < 1000, "its last chunk was never computed"
    assert [r.request_id for r in world.rejected] == ["late"]


def test_earliest_deadline_of_tenant_goes_first() -> None:
    world = UniformCluster(Limits(steps_in_flight=1), Timing(prefill_tokens_per_s=1000.0))
    world.submit("running", "o", 256)
    for name, deadline_ms in (("third", 30_000), ("first", 10_000), ("second", 20_000)):
        world.submit(name, "o", 256, deadline_ms=deadline_ms)
    world.run(100.0)
    assert list(world.ttft_s) == ["running", "first", "second", "third"]


def test_rate_is_accurate_early_and_forgets() -> None:
    """A rate is within 15 % after a few seconds, and falls to zero once nothing is added."""
    rate = Rate(0.0)
    for second in range(1, 100):
        rate.add(50.0, float(second))
        if second > 5:
            assert abs(rate.per_s(float(second)) / 50 - 1) < 0.15, second
    assert rate.per_s(200.0) < 0.01
