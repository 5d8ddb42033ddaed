"""Where the parts of the core meet: what peers may send at bad moments, and what must not wait or stay for ever."""

from coordinator.events import Limits, PeerDown, PeerUp
from proto.errors import CancelReason, Reject
from proto.messages import Accepted, Cancel, HandedOver, Prefill, Rejected, Release, Released, Role, Step, StepDone
from proto.progress import DecodeProgress, Joined
from tests.coordinator.world import Harness, gateway_hello, submit, worker_hello


def release_all(world: Harness, name: str, emitted: int = 0) -> None:
    world.receive(20, Released(name, 1, emitted))
    world.receive(10, Released(name, 1))


def test_a_gateway_comes_back_before_workers_have_let_go():
    world = Harness.make()
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.post(PeerDown(1, "silent"))
    world.post(PeerUp(1, gateway_hello(1)))
    world.receive(1, Cancel("a", 1, CancelReason.ABANDONED))
    world.receive(1, submit("a", attempt=2))
    assert [message.attempt for message in world.take(Accepted)] == [1, 2]
    bill = world.core.billing.bills["a"]
    world.receive(10, StepDone(step.step_id, (), 1.0, 0))
    release_all(world, "a", emitted=3)
    assert world.core.billing.bills["a"] is bill and bill.output_tokens == 3, "one bill for all attempts"
    world.receive(1, Cancel("a", 2, CancelReason.DISCONNECTED))
    for epoch in (10, 20):
        world.receive(epoch, Released("a", 2))
    for step in world.take(Step):
        world.receive(10, StepDone(step.step_id, (), 1.0, 0))
    assert not world.core.billing.bills


def test_a_reopened_bill_that_is_refused_ends_as_before():
    world = Harness.make()
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.post(PeerDown(1, "silent"))
    world.post(PeerUp(1, gateway_hello(1)))
    world.core.limits = type(world.core.limits)(tenant_queue_max=0)
    world.receive(1, submit("a", attempt=2))
    assert world.take(Rejected)[0].reason is Reject.QUEUE_FULL
    assert world.core.billing.bills["a"].outcome == "cancelled"
    world.receive(10, StepDone(step.step_id, (), 1.0, 0))
    release_all(world, "a")
    assert not world.core.billing.bills


def test_an_id_whose_bill_is_open_is_not_taken_again():
    world = Harness.make()
    world.receive(1, submit("a"))
    world.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    release_all(world, "a")
    world.core.ended.clear()  # as after many more requests; its chunk is still out
    world.receive(1, submit("a"))
    assert world.take(Rejected)[0].reason is Reject.DUPLICATE


def test_a_request_too_large_for_one_idle_prefill_worker_runs_on_another():
    world = Harness.make()
    world.post(PeerUp(9, worker_hello(Role.PREFILL, 9, kv_blocks=4)))
    world.receive(1, submit("a", 100))
    assert world.take(Prefill, 10), "nothing would ever come free here, and nobody would look again"


def test_a_full_prefill_worker_does_not_keep_an_idle_one_from_work():
    world = Harness.make(max_seqs=1)
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
    world.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
    world.post(PeerUp(11, worker_hello(Role.PREFILL, 11)))
    world.core.workers[11].tokens_forwarded = 1  # the full one is asked first
    world.receive(1, submit("b"))
    assert world.take(Prefill, 11)


def test_a_decode_worker_that_ran_short_and_is_empty_is_used_again():
    world = Harness.make(limits=Limits(kv_overcommit=2.0))
    world.receive(1, submit("a", 8, max_tokens=50))
    (step,) = world.take(Step)
    world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 8))
    world.receive(10, HandedOver("a", 1, 1, 1.0))
    world.receive(20, DecodeProgress(1, 0, 5, (Joined("a", 1, 0),)))
    assert world.take(Release, 20)
    world.receive(20, Released("a", 1, 3))
    world.take(Prefill)
    world.receive(1, submit("b", 8))
    assert world.take(Prefill, 10), "no step begins there that could say that blocks are there"
