"""Deadlines are judged by what one prefill worker can do, and never by rates that nobody has measured."""

import random

import msgspec
import pytest

from coordinator.events import Limits
from proto.errors import Reject
from proto.messages import Role, Submit
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.request import Request
from scheduler.waiting.latest_starts import STEPS_MAX, LatestStarts
from scheduler.workers.pool import Pool
from scheduler.workers.worker import PrefillWorker
from simulation.cluster.cluster import VirtualCluster
from simulation.cluster.surroundings import Timing
from tests.coordinator.world import MODEL, submit, worker_hello

TIMING = Timing(prefill_step_s=0.01)


def refused(world: VirtualCluster) -> list[tuple[str, Reject]]:
    return [(message.request_id, message.reason) for message in world.rejected]


@pytest.mark.parametrize("first_tokens", [8, 100, 300])
def test_early_deadlines_are_not_refused(first_tokens: int) -> None:
    """Whatever ran first: the first step counted for a fifth of its rate, and a short one shows a worker slower than it is."""
    world = VirtualCluster(timing=TIMING)
    world.submit("unmeasured", "o", 4000, deadline_ms=550.0)
    world.cancel("unmeasured")
    world.run(10.0)
    world = VirtualCluster(timing=TIMING)
    world.submit("first", "o", first_tokens)
    world.run(10.0)
    world.submit("second", "o", 4000, deadline_ms=900.0)  # 650 ms alone
    world.run(20.0)
    assert refused(world) == [] and world.requests["second"].state == "finished"


def test_short_steps_keep_measured_rate() -> None:
    """Short steps do not lower the measured rate of a worker."""
    world = VirtualCluster(timing=TIMING)
    world.submit("long", "o", 4096)
    world.run(5.0)
    measured = world.core.cluster.pools[MODEL].fastest_tokens_per_s()
    for number in range(40):
        world.submit(f"short{number}", "o", 8)
        world.run(world.now + 1.0)
    assert world.core.cluster.pools[MODEL].fastest_tokens_per_s() == measured > 5000


def test_new_worker_refuses_no_deadline() -> None:
    """A newly joined worker without a measured rate is no reason to refuse a deadline."""
    pool = Pool(MODEL)
    for incarnation, tokens_per_s in ((10, 1000.0), (11, 0.0)):
        worker = PrefillWorker(worker_hello(Role.PREFILL, incarnation))
        pool.add(worker)
        if tokens_per_s:
            worker.measure(256, 256.0)
            worker.tokens_in_flight = 5000
            pool.changed(worker)
    assert pool.least_prefill_s(500) == pytest.approx(0.5), "the new one has nothing before it"
    pool.prefill[11].draining = True
    pool.changed(pool.prefill[11])
    assert pool.least_prefill_s(500) == pytest.approx(5.5)


def test_deadline_assumes_one_worker() -> None:
    """A full queue sheds the one that no single worker can finish in time, and not one that waits without a deadline."""
    timing = Timing(prefill_tokens_per_s=1000.0)
    limits = Limits(queue_requests_max=3, priority_classes={"standard": PriorityClass()})
    world = VirtualCluster(limits, timing, prefill=8, decode=8, max_seqs=1)
    for number in range(8):
        world.submit(f"run{number}", "o", 1000)
    world.run(2.5)
    for number in range(8):
        world.submit(f"busy{number}", "o", 4000)
    world.submit("plain", "o", 100)
    world.submit("lost", "o", 2000, deadline_ms=5000.0)
    world.submit("plain2", "o", 100)
    world.run(world.now + 3.5)  # it would still take 2 s on one worker, or 250 ms on all eight
    world.submit("new", "other", 100)
    assert refused(world) == [("lost", Reject.SHED)]


def waiting(name: str, tokens: int, deadline_s: float) -> Request:
    wanted = msgspec.structs.replace(submit(name, tokens), deadline_ms=1000 * deadline_s)
    return Request(name, 1, wanted, b"", 0.0, 0.0, ("standard", "o", "u"), waits=True)


def test_any_infeasible_deadline_is_found() -> None:
    """Any infeasible deadline is found, not only the one due first."""
    starts = LatestStarts()
    short, long = waiting("short", 100, 2.0), waiting("long", 9000, 5.0)
    for request in (short, long):
        starts.add(request, 2)
    assert starts.first_too_late(1.0, 0.0, lambda submit: submit.prompt_tokens) is None
    assert starts.first_too_late(1.0, 1000.0, lambda submit: submit.prompt_tokens) is long
    assert starts.first_too_late(1.0, 4000.0, lambda submit: submit.prompt_tokens) is None
    assert starts.first_too_late(1.0, 1000.0, lambda submit: 200) is None, "the rest of it is cached"
    assert starts.first_too_late(1.0, 1000.0, lambda submit: submit.prompt_tokens) is None, "that is found out lazily"


@pytest.mark.parametrize("seed", range(20))
def test_random_late_requests_are_found(seed: int) -> None:
    """A late request is found in random runs whenever there is one."""
    rnd = random.Random(seed)
    starts, there, now, rate = LatestStarts(), list[Request](), 0.0, 1000.0
    cached = {number: rnd.randint(0, 500) for number in range(400)}

    def uncached(submit: Submit) -> int:
        return max(submit.prompt_tokens - cached[int(submit.request_id)], 1)

    looked = 0
    for number in range(400):
        now += rnd.random() / 4
        rate *= rnd.uniform(0.98, 1.02)
        one = waiting(str(number), rnd.randint(1, 5000), now + rnd.uniform(1.0, 30.0))
        there.append(one)
        starts.add(one, len(there))
        found = starts.first_too_late(now, rate, uncached)
        late = [r for r in there if r.deadline is not None and r.deadline - uncached(r.submit) / rate < now]
        assert (found in late) if found is not None else len([r for r in late if _surely(r, now, rate, uncached)]) == 0
        looked += found is not None
        for gone in ([found] if found is not None else []) + rnd.sample(there, 1):
            if gone.waits:
                gone.waits = False
                there.remove(gone)
    assert looked > 5
    assert len(starts._heap) + len(starts._fresh) <= 2 * len(there) + 600 and STEPS_MAX < 400


def _surely(request: Request, now: float, rate: float, uncached: object) -> bool:
    """Late even at a rate that is a quarter higher: order is only kept up to that."""
    assert callable(uncached) and request.deadline is not None
    return bool(request.deadline - uncached(request.submit) / (1.25 * rate) < now)


def test_resumed_request_has_no_deadline() -> None:
    """It waits again, and has been entered before: in an overload the coordinator looks at it."""
    starts = LatestStarts()
    request = waiting("a", 100, 1.0)
    starts.add(request, 1)
    assert starts.first_too_late(0.0, 1000.0, lambda submit: submit.prompt_tokens) is None
    request.submit = msgspec.structs.replace(request.submit, attempt=2, resumed_tokens=3)
    assert starts.first_too_late(9.0, 1000.0, lambda submit: submit.prompt_tokens) is None
    starts.add(other := waiting("b", 100, 1.0), 2)
    other.submit = msgspec.structs.replace(other.submit, attempt=2, resumed_tokens=3)
    assert starts.first_too_late(9.0, 1000.0, lambda submit: submit.prompt_tokens) is None
