"""What requests waited for, as gateways are told and `crossdock explain` shows."""

import pytest

from coordinator.event_log.timeline import Placed
from coordinator.events import Limits, PeerDown, PeerUp, Tick
from launcher.admin.explain_words import summary
from proto.errors import Reject, WaitReason
from proto.messages import Chunk, Finished, HandedOver, Rejected, Role, StepDone, WaitReport, Waits
from tests.coordinator.logged_core import as_logged
from tests.coordinator.test_timeline import ONE_STEP, Scene, story_of
from tests.coordinator.world import Harness, submit, worker_hello


def placed(h: Harness) -> dict[str, Waits]:
    return {m.request_id: m.waits for m in h.take(WaitReport) if isinstance(m, WaitReport)}


def chunk(name: str) -> Chunk:
    return Chunk(name, 1, 0, 8)


def test_wait_is_split_by_who_was_served() -> None:
    """A request that waits behind one of its tenant and one of another is told half a wait for each, as `explain` says."""
    h = Scene.of()
    h.come("own", "a")
    h.come("other", "b")
    h.come("last", "a")
    h.step(0, chunk("own"))
    h.step(1, chunk("other"))
    waits = placed(h)
    assert waits["last"].own_queue == pytest.approx(100.0) and waits["last"].other_tenants == pytest.approx(100.0)
    assert waits["other"].other_tenants == pytest.approx(200.0) and not waits["other"].own_queue
    assert "own" not in waits, "a wait that nobody felt is not reported"
    entries = story_of(as_logged(h.core), "last")
    (entry,) = [one for one in entries if isinstance(one, Placed)]
    assert entry.waits == waits["last"]
    assert "it waited for own queue 0.100 s, other tenants 0.100 s" in summary(entries)


def test_wait_for_room_is_no_room() -> None:
    """A request waits for its turn while a prompt is computed, and for room once decode is found to have none."""
    h = Harness.make(limits=ONE_STEP, max_seqs=1)
    h.receive(1, submit("runs"))
    h.receive(1, submit("waits"))
    h.now = 3.0
    h.receive(10, StepDone(0, (Chunk("runs", 1, 0, 8),), 1.0, 0))
    h.receive(10, StepDone(1, (Chunk("runs", 1, 8, 2),), 1.0, 0))
    h.receive(10, HandedOver("runs", 1, 0, 0.0))
    h.now = 5.0
    h.receive(20, Finished("runs", 1, 4, 0))
    assert placed(h)["waits"] == Waits(own_queue=3000.0, no_room=2000.0)


def test_wait_for_worker_is_cold_start() -> None:
    """A request that waits while no decode worker is up is told that it was a cold start."""
    h = Harness.make(limits=Limits(queue_wait_s_max=20.0))
    h.post(PeerDown(20, "killed"))
    h.receive(1, submit("a"))
    h.now = 2.0
    h.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
    assert placed(h)["a"] == Waits(cold_start=2000.0)


def rejected(h: Harness) -> Rejected:
    (one,) = h.take(Rejected)
    assert isinstance(one, Rejected)
    return one


def test_rejection_says_what_it_waited_for() -> None:
    """An expired request is told its wait; one that is rejected at once is told what it would have waited for."""
    h = Harness.make(limits=Limits(queue_wait_s_max=20.0, tenant_queue_max=1), max_seqs=1)
    h.receive(1, submit("runs"))
    h.receive(1, submit("waits"))
    h.now = 1.0
    h.receive(1, submit("more"))
    one = rejected(h)
    assert (one.reason, one.because, one.waits) == (Reject.QUEUE_FULL, WaitReason.NO_ROOM, Waits())
    h.now = 20.0
    h.post(Tick())
    one = rejected(h)
    assert (one.reason, one.because) == (Reject.EXPIRED, WaitReason.NO_ROOM)
    assert one.waits.no_room == pytest.approx(20_000.0)


def test_full_queue_names_whose_requests_wait() -> None:
    """A rejection because a tenant has too many requests waiting names its own queue."""
    h = Scene.of(Limits(step_tokens=8, steps_in_flight=1, quantum_tokens=0.0, tenant_queue_max=2))
    for name in ("runs", "a1", "a2", "a3"):
        h.come(name, "a")
    assert rejected(h).because is WaitReason.OWN_QUEUE
