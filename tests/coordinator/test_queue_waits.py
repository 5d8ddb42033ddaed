"""How long requests may wait for a place: by priority class, and longer once they had one."""

import msgspec
import pytest

from coordinator.events import Limits, PeerDown, PeerUp, Tick
from proto.errors import CancelReason, Reject
from proto.messages import Cancel, Finished, HandedOver, Rejected, Reserve, Role, Step, StepDone
from runtime.tenancy.priority_classes import PriorityClass
from runtime.tenancy.tenants import TenantsError, parse
from tests.coordinator.world import MODEL, Harness, submit, worker_hello

BANDS = {
    "interactive": PriorityClass(4.0, queue_wait_s=5.0),
    "standard": PriorityClass(1.0),
    "batch": PriorityClass(1.0, queue_wait_s=50.0),
}


def full(limits: Limits) -> Harness:
    """Its one decode worker has room for one request, and it is taken."""
    h = Harness.make(limits=limits, max_seqs=1)
    h.receive(1, submit("runs"))
    h.sent.clear()
    return h


def expire_at(h: Harness, now: float) -> list[tuple[str, Reject]]:
    h.now = now
    h.post(Tick())
    return [(m.request_id, m.reason) for m in h.take(Rejected) if isinstance(m, Rejected)]


def test_each_class_has_its_longest_wait() -> None:
    """Requests expire after the longest wait of their priority class, or the general one if it has none."""
    h = full(Limits(priority_classes=BANDS, queue_wait_s_max=20.0))
    for priority_class in ("batch", "standard", "interactive"):
        h.receive(1, msgspec.structs.replace(submit(priority_class), priority_class=priority_class))
    assert h.core.next_deadline() == pytest.approx(5.0)
    assert expire_at(h, 4.9) == []
    assert expire_at(h, 5.0) == [("interactive", Reject.EXPIRED)]
    assert h.core.next_deadline() == pytest.approx(20.0)
    assert expire_at(h, 21.0) == [("standard", Reject.EXPIRED)]
    assert expire_at(h, 51.0) == [("batch", Reject.EXPIRED)]
    assert h.core.next_deadline() is None


def test_resumed_stream_has_its_own_wait() -> None:
    """A resumed request may wait longer than its class allows, up to resumed_wait_s_max."""
    h = Harness.make(limits=Limits(priority_classes=BANDS, queue_wait_s_max=5.0, resumed_wait_s_max=30.0), max_seqs=1)
    h.receive(1, submit("a"))
    [step] = h.take(Step)
    assert isinstance(step, Step)
    h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
    h.receive(10, HandedOver("a", 1, 0, 0.0))
    h.post(PeerDown(20, "killed"))
    h.receive(1, submit("a", 12, attempt=2, resumed=2))
    h.receive(1, submit("b", attempt=2))
    assert expire_at(h, 29.0) == []
    assert expire_at(h, 30.0) == [("a", Reject.EXPIRED), ("b", Reject.EXPIRED)]
    assert h.ended["a"] == ["expired"], "the gateway takes the rejection of an accepted request for a failure"


def test_reload_changes_wait_of_queued_requests() -> None:
    """A reload applies the new longest wait to requests that wait already."""
    h = full(Limits(priority_classes=BANDS, queue_wait_s_max=20.0))
    h.receive(1, msgspec.structs.replace(submit("a"), priority_class="batch"))
    queue = h.core.cluster.queues[MODEL]
    queue.replace_limits(Limits(priority_classes={**BANDS, "batch": PriorityClass(1.0, queue_wait_s=2.0)}))
    assert expire_at(h, 2.0) == [("a", Reject.EXPIRED)]


def test_tenants_file_sets_queue_wait() -> None:
    """The tenants file sets a class's longest wait, and zero is refused."""
    priority_classes = parse(
        "[priority_classes.fast]\nweight = 2.0\nqueue_wait_s = 1.5\n[priority_classes.slow]\nweight = 1.0\n"
    ).priority_classes
    assert priority_classes["fast"].queue_wait_s == 1.5 and priority_classes["slow"].queue_wait_s is None
    with pytest.raises(TenantsError, match="queue_wait_s: must be > 0"):
        parse("[priority_classes.fast]\nweight = 2.0\nqueue_wait_s = 0.0\n")


def decoding(h: Harness, name: str, max_tokens: int = 400) -> None:
    h.receive(1, submit(name, max_tokens=max_tokens))
    [step] = h.take(Step)
    assert isinstance(step, Step)
    h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
    h.receive(10, HandedOver(name, 1, 0, 0.0))


def learnt(h: Harness) -> float:
    return h.core.cluster.queues[MODEL].output_estimate(h.core.cluster.requests["probe"])


def probed() -> Harness:
    h = Harness.make()
    decoding(h, "probe")
    return h


def test_stop_string_end_trains_estimate() -> None:
    """An answer that ends with a stop string trains the length estimate as if its worker had ended it."""
    by_worker, by_gateway, left = probed(), probed(), probed()
    before = learnt(by_worker)
    for h in (by_worker, by_gateway, left):
        decoding(h, "a")
    by_worker.receive(20, Finished("a", 1, 20, 0))
    by_gateway.receive(1, Cancel("a", 1, CancelReason.STOP_STRING, 20))
    left.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED, 20))
    assert learnt(by_worker) == learnt(by_gateway) < before
    assert learnt(left) == before, "a client that leaves says nothing of how long answers are"
    by_gateway.receive(20, Finished("a", 1, 20, 0))
    assert learnt(by_gateway) == learnt(by_worker), "the worker's own end of it does not count once more"


def test_resumed_answer_counts_all_tokens() -> None:
    """A resumed answer trains the length estimate with all of its tokens, not only those of its last attempt."""
    ends = {"worker": Finished("a", 2, 60, 0), "gateway": Cancel("a", 2, CancelReason.STOP_STRING, 180)}
    for source, end in ends.items():
        h = probed()
        decoding(h, "a")
        before = learnt(h)
        h.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
        h.post(PeerDown(20, "killed"))
        h.receive(1, submit("a", 130, attempt=2, max_tokens=400, resumed=120))
        assert h.take(Reserve)
        [step] = h.take(Step)
        assert isinstance(step, Step)
        h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
        h.receive(10, HandedOver("a", 2, 0, 0.0))
        h.receive(21 if source == "worker" else 1, end)
        assert learnt(h) > before, "180 tokens, not 60"
