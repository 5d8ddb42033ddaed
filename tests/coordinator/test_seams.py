"""Where the parts of the core meet: what peers may send at bad moments, and what must not wait or stay for ever."""

import gc
from types import SimpleNamespace

import msgspec
import pytest

from coordinator.accounting.billing import Remembered
from coordinator.events import Configured, Limits, PeerDown, PeerUp
from coordinator.main import Coordinator
from coordinator.outbox import Outbox
from proto.codec import decode, to_frames
from proto.errors import CancelReason, Reject
from proto.messages import (
    Accepted,
    Cancel,
    Chunk,
    Finished,
    HandedOver,
    Prefill,
    Rejected,
    Release,
    Released,
    Role,
    StatusRequest,
    Step,
    StepDone,
    Submit,
)
from proto.parts import Held
from proto.progress import DecodeProgress, Joined
from proto.status import StatusReport
from runtime.tenancy.tenants import parse
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from tests.coordinator.world import MODEL, Harness, gateway_hello, submit, worker_hello


def test_deadline_is_kept_once():
    """Each deadline is kept once however often workers come and go."""
    queue = WaitQueue(Limits())
    for number in range(200):
        due = msgspec.structs.replace(submit(f"r{number}"), deadline_ms=60_000.0)
        queue.push(Request(due.request_id, 1, due, b"", 0.0, 0.0, ("standard", "o", "u")))
    for _ in range(5):
        for can_run in (False, True):
            for request in list(queue):
                queue.refresh_eligibility(request, can_run)
    assert len(queue.line._deadlines) == 200
    assert len(list(queue.line.overdue(60.0, 0.0, lambda submit: submit.prompt_tokens))) == 200


@pytest.mark.parametrize(
    ("name", "attempt", "refused"), [("new", 1, True), ("a", 1, False), ("b", 1, False), ("b", 2, True)]
)
def test_lagging_ledger_refuses_only_new_requests(name: str, attempt: int, refused: bool):
    """A ledger that lags behind refuses new requests only, not those known already."""
    world = Harness.make()
    world.receive(1, submit("a"))
    world.receive(1, submit("b"))
    world.receive(1, Cancel("b", 1, CancelReason.DISCONNECTED))
    process = SimpleNamespace(ledger=SimpleNamespace(behind=True), core=world.core)
    assert Coordinator._is_too_much(process, submit(name, attempt=attempt)) is refused  # type: ignore[arg-type]


def test_uncommitted_requests_are_refused():
    """Requests whose rows the ledger could not write are refused, past the outbox, and withdrawn; later attempts wait."""
    world, outbox, told = Harness.make(), Outbox(), []
    for name, attempt in (("new", 1), ("resumed", 2)):
        world.receive(1, submit(name, attempt=attempt))
        outbox.opened(name)
    process = SimpleNamespace(
        ledger=SimpleNamespace(behind=True, trouble=lambda now: "storage: the disk is full"),
        core=world.core,
        outbox=outbox,
        peers={1: SimpleNamespace(incarnation=1, send=told.append)},
        metrics=SimpleNamespace(refused_behind=0),
        driver=SimpleNamespace(post=world.post),
    )
    process._refuse = lambda peer, submit: Coordinator._refuse(process, peer, submit)  # type: ignore[arg-type]
    for _ in range(2):
        Coordinator._refuse_uncommitted(process)  # type: ignore[arg-type]
    [refused] = told
    assert (refused.request_id, refused.reason) == ("new", Reject.STORAGE)
    assert "storage" in refused.message and refused.retry_after_s > 0
    assert world.ended == {"new": ["cancelled"]} and "resumed" in world.core.cluster.requests


def release_all(world: Harness, name: str, emitted: int = 0) -> None:
    world.receive(20, Released(name, 1, emitted))
    world.receive(10, Released(name, 1))


def test_early_gateway_return_keeps_one_bill():
    """A gateway that resubmits before workers released the last attempt gets one bill for all attempts."""
    world = Harness.make()
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.post(PeerDown(1, "silent"))
    world.post(PeerUp(1, gateway_hello(1)))
    world.receive(1, Cancel("a", 1, CancelReason.ABANDONED))
    world.receive(1, submit("a", attempt=2))
    assert [message.attempt for message in world.take(Accepted)] == [1, 2]  # type: ignore[attr-defined]
    bill = world.core.accounts.billing.bills["a"]
    world.receive(10, StepDone(step.step_id, (), 1.0, 0))  # type: ignore[attr-defined]
    release_all(world, "a", emitted=3)
    assert world.core.accounts.billing.bills["a"] is bill and bill.counters.output_tokens == 1 + 3, (
        "one bill for all attempts"
    )
    world.receive(1, Cancel("a", 2, CancelReason.DISCONNECTED))
    for incarnation in (10, 20):
        world.receive(incarnation, Released("a", 2))
    for step in world.take(Step):
        world.receive(10, StepDone(step.step_id, (), 1.0, 0))  # type: ignore[attr-defined]
    assert not world.core.accounts.billing.bills


def test_refused_reopened_bill_ends_as_before():
    """A bill reopened by a refused resubmit ends as cancelled, as it was before."""
    world = Harness.make()
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.post(PeerDown(1, "silent"))
    world.post(PeerUp(1, gateway_hello(1)))
    world.core.accounts.limits = type(world.core.limits)(tenant_queue_max=0)
    world.receive(1, submit("a", attempt=2))
    assert world.take(Rejected)[0].reason is Reject.QUEUE_FULL  # type: ignore[attr-defined]
    assert world.core.accounts.billing.bills["a"].counters.outcome == "cancelled"
    world.receive(10, StepDone(step.step_id, (), 1.0, 0))  # type: ignore[attr-defined]
    release_all(world, "a")
    assert not world.core.accounts.billing.bills


def test_id_with_open_bill_is_duplicate():
    """A request id whose bill is still open is rejected as a duplicate."""
    world = Harness.make()
    world.receive(1, submit("a"))
    world.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    release_all(world, "a")
    world.core.state.ended = Remembered(1.0, 1)  # as after many more requests; its chunk is still out
    world.receive(1, submit("a"))
    assert world.take(Rejected)[0].reason is Reject.DUPLICATE  # type: ignore[attr-defined]


def test_large_request_skips_small_prefill_worker():
    """A request too large for one idle prefill worker runs on another one."""
    world = Harness.make()
    world.post(PeerUp(9, worker_hello(Role.PREFILL, 9, kv_blocks=4)))
    world.receive(1, submit("a", 100))
    assert world.take(Prefill, 10), "nothing would ever come free here, and nobody would look again"


def test_full_worker_blocks_no_idle_worker():
    """A prefill worker that finds no room does not keep an idle one from work."""
    world = Harness.make(max_seqs=1)
    world.receive(1, submit("a"))
    (step,) = world.take(Step)
    world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))  # type: ignore[attr-defined]
    world.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
    world.post(PeerUp(11, worker_hello(Role.PREFILL, 11)))
    world.core.cluster.workers[11].tokens_forwarded = 1  # the full one is asked first
    world.receive(1, submit("b"))
    assert world.take(Prefill, 11)


def test_empty_decode_worker_is_used_again():
    """A decode worker that ran short of blocks is used again once it is empty."""
    world = Harness.make(limits=Limits(kv_overcommit=2.0))
    world.receive(1, submit("a", 8, max_tokens=50))
    (step,) = world.take(Step)
    world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 8))  # type: ignore[attr-defined]
    world.receive(10, HandedOver("a", 1, 1, 1.0))
    world.receive(20, DecodeProgress(1, 0, 5, (Joined("a", 1, 0),)))
    assert world.take(Release, 20)
    world.receive(20, Released("a", 1, 3))
    world.take(Prefill)
    world.receive(1, submit("b", 8))
    assert world.take(Prefill, 10), "no step begins there that could say that blocks are there"


def test_removed_class_keeps_no_floor():
    """A priority class that is no longer in the tenants file keeps no floor share."""
    world = Harness.make()
    text = '[priority_classes.{0}]\nweight = 1.0\nfloor_share = 0.6\n[tenants.default]\npriority_class = "{0}"\n'
    world.post(Configured(parse(text.format("old")), 0.0))
    world.receive(1, submit("a"))
    world.post(Configured(parse(text.format("new")), 0.0))
    world.receive(1, submit("b"))
    assert [message.request_id for message in world.take(Accepted)] == ["a", "b"]  # type: ignore[attr-defined]


def test_worker_without_blocks_is_refused():
    assert "KV block" in str(Harness.make().core.refusal(worker_hello(Role.PREFILL, 30, kv_blocks=0)))


def test_claim_of_waiting_attempt_is_violation():
    """A decode worker that claims to hold an attempt that still waits is dropped."""
    world = Harness.make(decode=0)
    world.post(PeerUp(20, worker_hello(Role.DECODE, 20, kv_blocks=4)))
    world.receive(1, submit("a"))
    world.receive(1, submit("b"))  # waits: there is room for one
    hello = msgspec.structs.replace(worker_hello(Role.DECODE, 21), held=(Held("b", 1, 4, 1),))
    world.post(PeerUp(21, hello))
    assert [bad.incarnation for bad in world.protocol_violation] == [21]


def test_wrong_chunk_report_is_violation():
    """A prefill worker that reports other chunks than it was given is dropped."""
    world = Harness.make(limits=Limits(step_tokens=8))
    world.receive(1, submit("a", 100))
    step = world.take(Step)[0]
    world.receive(10, StepDone(step.step_id, (Chunk("a", 1, 0, 100),), 1.0, 0))  # type: ignore[attr-defined]
    world.receive(10, HandedOver("a", 1, 1, 1.0))
    assert len(world.protocol_violation) == 2
    assert world.core.cluster.requests["a"].state == "prefilling"


def test_cut_off_hashes_are_a_violation():
    """A gateway that sends cut-off block hashes is dropped."""
    world = Harness.make()
    world.receive(1, msgspec.structs.replace(submit("a"), block_hashes=b"123", hash_block_size=4))
    assert len(world.protocol_violation) == 1 and not world.sent


def test_large_byte_counts_are_reported():
    """Status reports carry byte counts over the limit of ordinary counts."""
    world = Harness.make()
    world.core.cluster.counters["kv_bytes_moved"] = 1 << 41
    world.receive(1, StatusRequest())
    (report,) = world.take(StatusReport)
    assert decode(to_frames(report)) == (report, b"")


@pytest.mark.parametrize("tenant", ["t", "u"])
def test_cancelled_queued_requests_are_freed(tenant):
    """Cancelled requests behind one that waits leave no objects or queue rows behind."""
    world = Harness.make(max_seqs=1)
    world.receive(1, submit("runs"))
    world.receive(1, msgspec.structs.replace(submit("waits"), tenant="t", deadline_ms=1e6))
    for number in range(1000):
        name = f"r{number}"
        world.receive(1, msgspec.structs.replace(submit(name), tenant=tenant, deadline_ms=1e7))
        world.receive(1, Cancel(name, 1, CancelReason.DISCONNECTED))
    gc.collect()
    assert sum(isinstance(thing, Request) and thing.id[0] == "r" for thing in gc.get_objects()) < 300
    queue = world.core.cluster.queues[MODEL]
    assert sum(row.size for node in queue.fair._leaves.values() for row in node.rows.values()) == len(queue.fair) == 1


def test_bypasses_are_bounded_per_request() -> None:
    """Two large requests are in turn before small ones. Room is kept for the first, then the second waits beside it."""
    allowed, most = 3, 0
    world = Harness.make(limits=Limits(bypasses_max=allowed), kv_blocks=40)
    world.receive(1, one_of("hog", "h", 4, 77))  # 20 blocks
    run_prefill(world)
    for name in ("big1", "big2"):
        world.receive(1, one_of(name, name, 4, 97))  # 25 blocks
    for number in range(16):
        world.receive(1, one_of(f"small{number}", f"s{number}", 4, 13))
        run_prefill(world)
        for request in list(world.core.cluster.requests.values()):
            most = max(most, request.attempt_progress.bypassed)
            if request.id.startswith("small") and request.state == "decoding":
                world.receive(20, Finished(request.id, 1, 13, 0))
        leaving = {6: ("hog", 77), 10: ("big1", 97), 14: ("big2", 97)}.get(number)
        if leaving is not None:
            world.receive(20, Finished(leaving[0], 1, leaving[1], 0))
            run_prefill(world)
    assert {"hog", "big1", "big2"} <= set(world.ended)
    assert most == allowed


def one_of(name: str, tenant: str, tokens: int, max_tokens: int) -> Submit:
    return msgspec.structs.replace(submit(name, tokens, max_tokens=max_tokens), tenant=tenant)


def run_prefill(world: Harness) -> None:
    """Whatever was dispatched is computed and handed over at once."""
    while steps := world.take(Step, 10):
        for step in steps:
            assert isinstance(step, Step)
            world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
            for chunk in step.chunks:
                world.receive(10, HandedOver(chunk.request_id, 1, 1, 1.0))
