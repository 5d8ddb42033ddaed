"""Deadlines are judged by what one prefill worker can do, and never by rates that nobody has measured."""

import random

import msgspec
import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from proto.errors import Reject
from proto.messages import Role, Submit
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.request import Request
from scheduler.waiting.line import WaitingLine
from scheduler.workers.pool import Pool
from scheduler.workers.worker import PrefillWorker
from tests.coordinator.world import MODEL, submit, worker_hello
from tests.uniform_cluster import UniformCluster

TIMING = Timing(prefill_step_s=0.01)


def refused(world: UniformCluster) -> list[tuple[str, Reject]]:
    return [(message.request_id, message.reason) for message in world.rejected]


@pytest.mark.parametrize("first_tokens", [8, 100, 300])
def test_early_deadlines_are_not_refused(first_tokens: int) -> None:
    """Whatever ran first: the first step counted for a fifth of its rate, and a short one shows a worker slower than it is."""
    world = UniformCluster(timing=TIMING)
    world.submit("unmeasured", "o", 4000, deadline_ms=550.0)
    world.cancel("unmeasured")
    world.run(10.0)
    world = UniformCluster(timing=TIMING)
    world.submit("first", "o", first_tokens)
    world.run(10.0)
    world.submit("second", "o", 4000, deadline_ms=900.0)  # 650 ms alone
    world.run(20.0)
    assert refused(world) == [] and world.requests["second"].state == "finished"


def test_short_steps_keep_measured_rate() -> None:
    """Short steps do not lower the measured rate of a worker."""
    world = UniformCluster(timing=TIMING)
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
    """A waiting request is refused as soon as no single worker can finish its prompt in time."""
    timing = Timing(prefill_tokens_per_s=1000.0)
    limits = Limits(priority_classes={"standard": PriorityClass()})
    world = UniformCluster(limits, timing, prefill=8, decode=8, max_seqs=1)
    for number in range(8):
        world.submit(f"run{number}", "o", 1000)
    world.run(2.5)
    for number in range(8):
        world.submit(f"busy{number}", "o", 4000)
    world.submit("plain", "o", 100)
    world.submit("lost", "o", 2000, deadline_ms=5000.0)
    world.run(world.now + 2.5)
    assert refused(world) == []
    world.run(world.now + 1.0)  # it would still take 2 s on one worker, or 250 ms on all eight
    assert refused(world) == [("lost", Reject.DEADLINE)]


def waiting(line: WaitingLine, name: str, tokens: int, deadline_s: float, tokens_per_s: float = 1000.0) -> Request:
    wanted = msgspec.structs.replace(submit(name, tokens), deadline_ms=1000 * deadline_s)
    request = Request(name, 1, wanted, b"", 0.0, 0.0, ("standard", "o", "u"), waits=True)
    line.add(request)
    line.watch_deadline(request, tokens_per_s)
    return request


def leave(line: WaitingLine, request: Request) -> None:
    request.waits = False
    line.remove(request)


def test_any_infeasible_deadline_is_found() -> None:
    """Any infeasible deadline is found, not only the one due first, and with the cached tokens of that time."""
    line = WaitingLine(Limits(), {})
    short, long = waiting(line, "short", 100, 2.0), waiting(line, "long", 4500, 5.0)
    assert line.next_due() == 0.5
    assert list(line.overdue(0.6, 1000.0, lambda submit: 200)) == [], "the rest of it is cached"
    assert line.next_due() == pytest.approx(1.9)
    found = []
    for request in line.overdue(4.9, 1000.0, lambda submit: submit.prompt_tokens):
        found.append(request)
        leave(line, request)
    assert found == [short, long] and not len(line)


@pytest.mark.parametrize("seed", range(20))
def test_random_late_requests_are_found(seed: int) -> None:
    """In random runs every late request is found, and none that can still be in time."""
    rnd, line, there, now, late = random.Random(seed), WaitingLine(Limits(), {}), list[Request](), 0.0, 0
    cached = {number: rnd.randint(0, 500) for number in range(400)}

    def uncached(submit: Submit) -> int:
        return max(submit.prompt_tokens - cached[int(submit.request_id)], 1)

    for number in range(400):
        now += rnd.random() / 4
        there.append(waiting(line, str(number), rnd.randint(1, 5000), now + rnd.uniform(1.0, 30.0)))
        for found in line.overdue(now, 1000.0, uncached):
            assert found.deadline is not None and found.deadline - uncached(found.submit) / 1000 <= now
            there.remove(found)
            leave(line, found)
            late += 1
        assert all(one.deadline is not None and one.deadline - uncached(one.submit) / 1000 > now for one in there)
        if there:
            leave(line, there.pop(rnd.randrange(len(there))))
    assert late > 5 and len(line._deadlines) <= 2 * len(there) + 600


def test_later_attempt_has_until_its_deadline() -> None:
    """A later attempt whose client has no token yet may wait until its deadline."""
    line = WaitingLine(Limits(), {})
    request = waiting(line, "a", 1000, 3.0)
    leave(line, request)
    request.submit, request.waits = msgspec.structs.replace(request.submit, attempt=2), True
    line.add(request)
    line.watch_deadline(request, 1000.0)
    assert list(line.overdue(2.5, 1000.0, lambda submit: submit.prompt_tokens)) == []
    assert next(line.overdue(3.0, 1000.0, lambda submit: submit.prompt_tokens)) is request
