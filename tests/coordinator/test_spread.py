"""Events of the whole cluster with a long queue: the work is spread over events."""

import pytest

from coordinator.events import Limits, PeerDown, PeerUp, Tick
from proto.messages import Role
from scheduler import cluster
from tests.coordinator.world import Harness, submit, worker_hello

STEPS_PER_EVENT = 8
WAITING = 3 * STEPS_PER_EVENT


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STEPS_PER_EVENT", STEPS_PER_EVENT)


def full() -> Harness:
    h = Harness.make(prefill=1, decode=1, limits=Limits(queue_requests_max=10_000, tenant_queue_max=10_000))
    for number in range(WAITING):
        h.receive(1, submit(f"r{number}", 8))
    return h


def ticks(h: Harness) -> int:
    """Lets the coordinator go on until nothing is due now; returns in how many events it did."""
    events = 0
    while (due := h.core.next_deadline()) is not None and due <= h.now:
        h.post(Tick())
        events += 1
    return events


def test_lost_gateway_ends_requests_by_parts() -> None:
    """The requests of a lost gateway end over several events, and each of them ends."""
    h = full()
    ticks(h)
    before = len(h.core.cluster.requests)
    h.post(PeerDown(1, "killed"))
    assert before - len(h.core.cluster.requests) == STEPS_PER_EVENT
    assert ticks(h) >= 2
    assert not h.core.cluster.requests and not h.core.members.orphans and not h.core.members.lost_gateways
    assert len(h.core.cluster.queues["m"]) == 0 and h.core.cluster.queues["m"].fair.size == 0


def test_returned_gateway_gets_orphan_anew() -> None:
    """A gateway that comes back before its requests have ended can submit one of them again."""
    h = full()
    h.post(PeerDown(1, "link closed"))
    last = f"r{WAITING - 1}"
    assert last in h.core.members.orphans
    h.post(PeerUp(1, worker_hello(Role.GATEWAY, 1)))
    h.receive(1, submit(last, 8, attempt=2))
    ticks(h)
    assert list(h.core.cluster.requests) == [last]


def test_turns_are_refreshed_by_parts() -> None:
    """Requests that only a lost worker could hold have no turn until one like it joins, in whatever number of events."""
    h = Harness.make(prefill=1, decode=0, limits=Limits(queue_requests_max=10_000, tenant_queue_max=10_000))
    for number, kv_blocks in ((20, 8), (21, 100)):
        h.post(PeerUp(number, worker_hello(Role.DECODE, number, kv_blocks=kv_blocks, max_seqs=1)))
    for number in range(WAITING):
        h.receive(1, submit(f"r{number}", 40))
    queue = h.core.cluster.queues["m"]
    h.post(PeerDown(21, "drained"))
    assert 0 < sum(request.entry is None for request in queue) < len(queue)
    ticks(h)
    assert all(request.entry is None for request in queue)
    h.post(PeerUp(22, worker_hello(Role.DECODE, 22, kv_blocks=100, max_seqs=1)))
    ticks(h)
    assert len(queue) > WAITING - 3 and all(request.entry is not None for request in queue)
