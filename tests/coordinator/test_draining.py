"""A worker that drains gets nothing new, keeps what it has until its time is up, and is told when nothing is left."""

from collections.abc import Iterable

import msgspec
import pytest

from coordinator.admission import NO_CAPACITY_S
from coordinator.events import Limits, PeerDown, PeerUp, Tick
from coordinator.recovery import draining
from coordinator.reporting.status import status
from proto.drain import DrainAnswer, Drained, Draining, DrainRequest
from proto.errors import CancelReason, Interrupt, Reject
from proto.limits import PROTOCOL_VERSION
from proto.messages import (
    Accepted,
    Cancel,
    Chunk,
    Finished,
    HandedOver,
    Hello,
    Interrupted,
    Prefill,
    Rejected,
    Release,
    Released,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
)
from proto.parts import Held
from proto.progress import Hung
from proto.status import Process
from tests.coordinator.world import Harness, gateway_hello, submit, worker_hello

PATH = ("standard", "default", "")


def compute(h: Harness, incarnation: int) -> list[Chunk]:
    """All steps that this prefill worker was sent, until there is none."""
    computed: list[Chunk] = []
    while steps := h.take(Step, incarnation):
        for step in steps:
            assert isinstance(step, Step)
            computed += step.chunks
            h.receive(incarnation, StepDone(step.step_id, step.chunks, 1.0, 0))
    return computed


def decoding(h: Harness, request: Submit, prefill: int = 10) -> None:
    h.receive(1, request)
    compute(h, prefill)
    h.receive(prefill, HandedOver(request.request_id, request.attempt, 100, 1.0))
    assert h.core.cluster.requests[request.request_id].state == "decoding"


def again(request: Submit, resumed: int) -> Submit:
    """What the gateway submits when a drain has cut it short behind so many tokens."""
    return msgspec.structs.replace(
        request,
        attempt=request.attempt + 1,
        prompt_tokens=request.prompt_tokens + resumed,
        resumed_tokens=resumed,
        drained_attempts=request.drained_attempts + 1,
    )


def placed_on(messages: Iterable[object]) -> set[str]:
    return {message.request_id for message in messages if isinstance(message, Prefill | Reserve)}


def test_draining_worker_finishes_its_streams() -> None:
    """A draining worker gets nothing new, and its streams end where they are."""
    h = Harness.make(decode=2)
    decoding(h, submit("a"))
    (there,) = (incarnation for incarnation in (20, 21) if h.core.cluster.workers[incarnation].allocations)
    h.receive(there, Draining(30_000.0))
    for number in range(8):
        h.receive(1, submit(f"r{number}"))
        compute(h, 10)
    assert len(placed_on(h.take(Reserve, 41 - there))) == 8
    h.now = 29.0
    h.post(Tick())
    assert not h.take(Interrupted) and not h.take(Drained)
    h.receive(there, Finished("a", 1, 4, 4))
    assert h.take(Drained, there) == [Drained()]
    h.post(PeerDown(there, "said goodbye"))
    assert h.core.cluster.counters["decode_drained"] == 1 and not h.core.cluster.counters["decode_lost"]


def test_placed_prompt_chunks_go_on() -> None:
    """Chunks of a prompt placed on a draining worker go on."""
    h = Harness.make(prefill=2, limits=Limits(step_tokens=8))
    h.receive(1, submit("long", 100))
    (there,) = (incarnation for incarnation in (10, 11) if h.core.cluster.workers[incarnation].allocations)
    h.receive(there, Draining(30_000.0))
    h.receive(1, submit("new", 8))
    assert sum(chunk.length for chunk in compute(h, there)) == 100
    assert placed_on(h.take(Prefill, 21 - there)) == {"new"}
    h.receive(there, HandedOver("long", 1, 100, 1.0))
    assert h.take(Drained, there)


def test_failure_after_drain_is_charged() -> None:
    """A failure after a drain is charged like any other."""
    h = Harness.make()
    decoding(h, submit("a", 10, max_tokens=50))
    h.receive(20, Draining(0.0))
    h.receive(20, Released("a", 1, 20))
    h.post(PeerUp(22, worker_hello(Role.DECODE, 22)))
    second = again(submit("a", 10, max_tokens=50), 21)
    decoding(h, second)
    assert h.core.cluster.requests["a"].attempt_progress.paid_tokens == 31
    h.post(PeerDown(22, "killed"))
    h.receive(1, msgspec.structs.replace(second, attempt=3))
    assert h.core.cluster.requests["a"].attempt_progress.paid_tokens == 0


def test_adopted_streams_are_drained_too() -> None:
    """It does not know whose they are, so all gateways are told, and the one whose it is goes on."""
    h = Harness.make(decode=2)
    held = (Held("a", 1, 5, 1), Held("gone", 1, 5, 1))
    h.receive(1, Cancel("gone", 1, CancelReason.DISCONNECTED))
    h.post(PeerUp(2, gateway_hello(2)))
    h.post(PeerUp(22, msgspec.structs.replace(worker_hello(Role.DECODE, 22), held=held, hand_over_ms=1000.0)))
    h.sent.clear()
    h.now = 1.0
    h.post(Tick())
    told = [(s.incarnation, s.message) for s in h.sent if isinstance(s.message, Interrupted)]
    expected = Interrupted("a", 1, Interrupt.DRAINED, "decode-22 is drained")
    assert told == [(1, expected), (2, expected)] and h.take(Release, 22) == [Release("a", 1)]
    decoding(h, again(submit("a", 10, max_tokens=50), 21))
    assert h.core.cluster.requests["a"].decode_incarnation != 22 and not h.core.cluster.counters["retries"]
    for name in ("a", "gone"):
        h.receive(22, Released(name, 1, 20))
    assert h.take(Drained, 22)


def test_drained_stream_resumes_first_and_free() -> None:
    """A stream handed over by a drain goes before its tenant's others and is not charged twice."""
    h = Harness.make(limits=Limits(step_tokens=16))
    decoding(h, submit("a", 10, max_tokens=50))
    h.post(PeerUp(21, worker_hello(Role.DECODE, 21, kv_blocks=4)))  # too small for either
    h.receive(20, Draining(1000.0))
    h.receive(1, submit("waits", 16))
    charged = _served(h)
    h.now = h.core.next_deadline() or 0.0
    assert h.now == 1.0
    h.post(Tick())
    assert h.take(Interrupted, 1) == [Interrupted("a", 1, Interrupt.DRAINED, "decode-20 is drained")]
    assert h.take(Release, 20) and not h.take(Drained)
    h.receive(20, Released("a", 1, 20))
    assert h.take(Drained, 20)
    h.receive(1, again(submit("a", 10, max_tokens=50), 21))
    assert isinstance(h.take(Accepted)[-1], Accepted)
    h.post(PeerUp(22, worker_hello(Role.DECODE, 22)))
    assert [chunk.request_id for chunk in compute(h, 10)] == ["a", "a", "waits"], "before its tenant's others"
    h.receive(10, HandedOver("a", 2, 100, 1.0))
    h.receive(22, Finished("a", 2, 29, 4))
    h.receive(10, HandedOver("waits", 1, 100, 1.0))
    h.receive(22, Finished("waits", 1, 4, 4))
    prices = h.core.limits.prices
    due = prices.chunk(10) + prices.output(50) + prices.chunk(16) + prices.output(4)
    service = sum(
        bill.used_tokens for name in ("a", "waits") if (bill := h.core.accounts.billing.settled.get(name)) is not None
    )
    assert service == 10 + 50 + 16 + 4, "nothing is billed twice"
    assert _served(h) == pytest.approx(due) and charged <= due, "nor is its turn"


def _served(h: Harness) -> float:
    """What the fair queue has charged the only tenant, corrections included."""
    leaf = h.core.cluster.queues["m"].fair._leaves[PATH]
    return leaf.round + leaf.owed


@pytest.mark.parametrize("computed", [0, 1])
def test_drained_chunks_are_charged_once(computed: int) -> None:
    """Chunks cut short by a drain are charged once."""
    h = Harness.make(prefill=1, limits=Limits(step_tokens=8))
    h.receive(1, submit("a", 40, max_tokens=1))
    (first, second) = (step for step in h.take(Step, 10) if isinstance(step, Step))
    h.receive(10, Draining(0.0))
    assert h.take(Interrupted, 1)
    h.receive(10, StepDone(first.step_id, first.chunks[:computed], 1.0, 0))
    h.receive(1, again(submit("a", 40, max_tokens=1), 0))
    h.receive(10, StepDone(second.step_id, (), 1.0, 0))
    h.receive(10, Released("a", 1))
    h.receive(20, Released("a", 1))
    h.post(PeerUp(11, worker_hello(Role.PREFILL, 11)))
    assert sum(chunk.length for chunk in compute(h, 11)) == 40
    h.receive(11, Finished("a", 2, 1, 40))
    assert _served(h) == pytest.approx(h.core.limits.prices.chunk(40) + h.core.limits.prices.output(1))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_draining_last_worker_refuses_new(role: Role) -> None:
    """New requests are refused and accepted ones wait while the only worker of a role drains."""
    h = Harness.make(decode=0)
    h.post(PeerUp(20, worker_hello(Role.DECODE, 20, max_seqs=1)))
    decoding(h, submit("a"))
    h.receive(1, submit("queued"))
    only, other = (10, 11) if role is Role.PREFILL else (20, 21)
    h.receive(only, Draining(0.0))
    assert h.cluster_states()[-1] == ((), ()), "its gateways are not ready"
    h.receive(1, submit("new"))
    (refusal,) = h.take(Rejected)
    assert isinstance(refusal, Rejected) and refusal.request_id == "new" and refusal.reason is Reject.NO_CAPACITY
    assert refusal.message == f"every {role} worker is draining" and refusal.retry_after_s == NO_CAPACITY_S
    if role is Role.DECODE:
        h.receive(20, Released("a", 1, 2))
        h.receive(1, again(submit("a"), 3))
    else:
        h.receive(20, Finished("a", 1, 4, 4))
    h.post(PeerDown(only, "said goodbye"))
    assert not h.take(Rejected)
    h.post(PeerUp(other, worker_hello(role, other)))
    assert h.cluster_states()[-1] == (("m",), (4,))
    compute(h, 10 if role is Role.DECODE else 11)
    assert placed_on(h.take(Reserve)) >= ({"a", "queued"} if role is Role.DECODE else {"queued"})


def test_undone_drain_restores_model() -> None:
    """An undone drain makes the model servable again."""
    h = Harness.make()
    ask(h, "decode-20")
    assert h.cluster_states()[-1] == ((), ())
    ask(h, "decode-20", undo=True)
    assert h.cluster_states()[-1] == (("m",), (4,))
    h.receive(1, submit("b"))
    assert placed_on(h.take(Reserve, 20)) == {"b"}


def test_request_waits_for_draining_worker() -> None:
    """A request that fits only on a draining worker waits without holding up others."""
    h = Harness.make(limits=Limits(bypasses_max=1))
    h.post(PeerUp(21, worker_hello(Role.DECODE, 21, kv_blocks=10)))
    h.receive(20, Draining(1e9))
    h.receive(1, submit("large", 100))
    for number in range(3):
        h.receive(1, submit(f"small{number}", 4))
        compute(h, 10)
    assert not h.take(Rejected) and len(placed_on(h.take(Reserve, 21))) == 3
    h.receive(20, Draining(None))
    assert placed_on(h.take(Reserve, 20)) == {"large"}


def test_next_coordinator_keeps_drain() -> None:
    """A worker that registers as draining gets nothing new from the next coordinator."""
    h = Harness.make()
    h.post(PeerUp(21, msgspec.structs.replace(worker_hello(Role.DECODE, 21), hand_over_ms=500.0)))
    for number in range(4):
        h.receive(1, submit(f"r{number}"))
        compute(h, 10)
    assert len(placed_on(h.take(Reserve, 20))) == 4


def test_loss_while_draining_costs_no_try() -> None:
    """The loss of a draining worker interrupts its streams as drained, which costs no try."""
    h = Harness.make()
    decoding(h, submit("a"))
    h.receive(20, Draining(1e6))
    h.post(PeerDown(20, "no heartbeat"))
    assert [i.reason for i in h.take(Interrupted) if isinstance(i, Interrupted)] == [Interrupt.DRAINED]


def test_hang_while_draining_costs_a_try() -> None:
    """A worker that hangs while it drains is lost, and its stream has spent a try."""
    h = Harness.make()
    decoding(h, submit("a"))
    h.receive(20, Draining(1e6))
    h.receive(20, Hung(5000.0))
    assert [i.reason for i in h.take(Interrupted) if isinstance(i, Interrupted)] == [Interrupt.DECODE_LOST]
    assert h.core.cluster.counters["decode_lost"] == h.core.cluster.counters["decode_hung"] == 1
    assert not h.core.cluster.counters["decode_drained"] and not h.take(Drained)
    assert status(h.core.state).hung == (Process(h.core.members.fenced[20].name, h.core.members.fenced[20].pid),)


def ask(h: Harness, worker: str, *, undo: bool = False) -> DrainAnswer:
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "drain-1")))
    h.receive(5, DrainRequest(worker, undo, 2000.0))
    (answer,) = h.take(DrainAnswer, 5)
    h.post(PeerDown(5, "said goodbye"))
    assert isinstance(answer, DrainAnswer)
    return answer


def test_operator_drains_by_name() -> None:
    """An operator drains a worker by its name, and undoes it."""
    h = Harness.make(decode=2)
    answer = ask(h, "decode-20")
    assert not answer.refusal and [w.name for w in answer.workers if w.draining] == ["decode-20"]
    assert (
        h.take(Draining, 20) == [Draining(2000.0)]
        and [w.draining for w in status(h.core.state).workers].count(True) == 1
    )
    assert not ask(h, "decode-20", undo=True).refusal
    assert h.take(Draining, 20) == [Draining(None)] and not h.core.cluster.draining


def back(h: Harness, knows_ms: float | None) -> None:
    """The worker loses its connection and registers again, with what it knows of its draining."""
    h.post(PeerDown(20, "send failed"))
    h.post(PeerUp(20, msgspec.structs.replace(worker_hello(Role.DECODE, 20), hand_over_ms=knows_ms)))


def test_drain_order_outlives_reconnect() -> None:
    """A drain order, or its undoing, is sent again to a worker that reconnects without knowing it."""
    h = Harness.make(decode=2)
    ask(h, "decode-20")
    h.take(Draining)
    h.now += 0.5
    back(h, None)
    assert h.take(Draining, 20) == [Draining(1500.0)] and list(h.core.cluster.draining) == [20]
    back(h, 1500.0)
    assert not h.take(Draining, 20) and list(h.core.cluster.draining) == [20]
    ask(h, "decode-20", undo=True)
    h.take(Draining)
    back(h, 1500.0)
    assert h.take(Draining, 20) == [Draining(None)] and not h.core.cluster.draining
    back(h, None)
    assert not h.take(Draining, 20) and not h.core.cluster.draining


def test_ending_worker_drains_regardless() -> None:
    """A worker that is about to end drains whatever orders came before."""
    h = Harness.make(decode=2)
    ask(h, "decode-20")
    ask(h, "decode-20", undo=True)
    h.receive(20, Draining(900.0))
    back(h, 900.0)
    assert list(h.core.cluster.draining) == [20]


def test_drain_orders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drain orders are remembered of at most ORDERS_MAX workers."""
    monkeypatch.setattr(draining, "ORDERS_MAX", 2)
    h = Harness.make(decode=3)
    for name in ("decode-20", "decode-21", "decode-20", "decode-22"):
        ask(h, name)
    assert list(h.core.members.drain_orders) == [20, 22]


def test_impossible_drain_is_explained() -> None:
    """A drain of an unknown or ambiguous name, or its undoing at an ending worker, is refused with a reason."""
    h = Harness.make()
    assert ask(h, "decode-9").refusal == "no worker is called 'decode-9'; there are decode-20, prefill-10"
    h.receive(20, Draining(1e6))
    assert "is about to end" in ask(h, "decode-20", undo=True).refusal
    h.post(PeerUp(30, msgspec.structs.replace(worker_hello(Role.DECODE, 30), name="decode-20")))
    assert "2 workers are called" in ask(h, "decode-20").refusal


def test_drain_needs_operator_tool() -> None:
    """A drain request from a gateway is a protocol violation."""
    h = Harness.make()
    h.receive(1, DrainRequest("decode-20", False, 0.0))
    assert h.protocol_violation and not h.core.cluster.draining
