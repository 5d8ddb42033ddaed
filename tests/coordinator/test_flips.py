"""A worker changes its role: what the coordinator orders, when it lets it go, and when it gives a change up."""

import msgspec
import pytest

from coordinator.events import PeerDown, PeerUp, Tick
from coordinator.recovery.draining import KEPT_S_MAX
from coordinator.recovery.flips import CACHE_TOLD_S, REGISTER_S_MAX
from coordinator.reporting.status import status
from proto.drain import Drained, Draining, DrainRequest, Flip, FlipAnswer, FlipFailed, FlipRequest
from proto.errors import CancelReason, Interrupt
from proto.limits import PROTOCOL_VERSION, flips_at_once
from proto.messages import (
    Accepted,
    CacheEvents,
    Cancel,
    Finished,
    HandedOver,
    Hello,
    Interrupted,
    Message,
    Release,
    Released,
    Reserve,
    Role,
    StepDone,
    Submit,
)
from proto.policy import PolicyAction, PolicyRequest
from proto.progress import DecodeProgress
from proto.status import FlipStatus
from scheduler.workers.worker import DecodeWorker
from tests.coordinator.test_draining import again, compute, decoding, placed_on
from tests.coordinator.world import Harness, named, submit, worker_hello


def ask(h: Harness, worker: str, role: Role, *, hand_over_ms: float = 0.0, force: bool = False, why: str = "") -> str:
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "flip-1")))
    h.receive(5, FlipRequest(worker, role, hand_over_ms, force, why))
    (answer,) = h.take(FlipAnswer, 5)
    h.post(PeerDown(5, "said goodbye"))
    assert isinstance(answer, FlipAnswer)
    return answer.refusal


def come_back(h: Harness, before: int, now: int, role: Role) -> None:
    """The worker goes as `before`, and registers in its new role."""
    name = h.core.cluster.workers[before].hello.name
    h.post(PeerDown(before, "said goodbye"))
    h.post(PeerUp(now, msgspec.structs.replace(worker_hello(role, now), name=name, flipped_from=before)))


def last(h: Harness) -> FlipStatus:
    return status(h.core.state).flips[-1]


def test_flip_waits_until_worker_is_empty() -> None:
    """A worker changes its role once it holds nothing, and its first step proves the change."""
    h = Harness.make(decode=2)
    decoding(h, submit("a"))
    name = next(w.hello.name for w in h.core.cluster.workers.values() if w.allocations)
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.allocations)
    assert not ask(h, name, Role.PREFILL, why="more prompts")
    assert h.take(Flip, own) == [Flip(Role.PREFILL, 0.0)]
    assert h.take(Release, own) == [Release("a", 1)] and not h.take(Drained) and last(h).state == "draining"
    h.now += 0.1
    h.receive(own, Released("a", 1, 1))
    assert h.take(Drained, own) and last(h).state == "registering"
    h.now += 0.02
    come_back(h, own, 40, Role.PREFILL)
    flip = last(h)
    assert (flip.state, flip.before, flip.role, flip.why) == ("done", Role.DECODE, Role.PREFILL, "more prompts")
    assert (round(flip.drained_ms), round(flip.commit_ms), flip.first_step_ms) == (100, 20, 0.0)
    h.post(PeerDown(10, "no heartbeat"))
    h.now += 0.01
    h.receive(1, submit("b"))
    compute(h, 40)
    assert round(last(h).first_step_ms) == 10 and [w.steps for w in status(h.core.state).workers if w.name == name] == [
        1
    ]
    assert h.core.cluster.counters["flips"] == 1 and not h.core.cluster.counters["prefill_restarted"]


def moving(h: Harness, role: Role = Role.PREFILL) -> int:
    """A worker with a stream is about to change its role; returns its incarnation."""
    decoding(h, named(submit("a"), 1))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.is_decode and w.allocations)
    assert not ask(h, f"decode-{own}", role)
    return own


def interrupted(h: Harness) -> list[tuple[str, Interrupt]]:
    return [(one.request_id, one.reason) for one in h.take(Interrupted) if isinstance(one, Interrupted)]


def test_stream_resumes_when_kv_is_known() -> None:
    """A stream is resumed once its worker prefills and has told its cached blocks."""
    h = Harness.make(decode=2)
    own = moving(h)
    h.receive(own, Released("a", 1, 1))
    come_back(h, own, 40, Role.PREFILL)
    assert not interrupted(h), "what it has cached is not known yet"
    h.receive(40, CacheEvents(b"k" * 16, b""))
    assert interrupted(h) == [("a", Interrupt.DRAINED)] and not h.core.members.keeping
    h.receive(40, CacheEvents(b"l" * 16, b""))
    assert not h.take(Interrupted), "once"


@pytest.mark.parametrize("request_", [submit("a"), named(submit("a", choices=2), 1)], ids=["unnamed", "choices"])
def test_unfindable_stream_resumes_at_once(request_: Submit) -> None:
    """A stream whose KV cannot be found again is resumed at once."""
    h = Harness.make(decode=2)
    decoding(h, request_)
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.is_decode and w.allocations)
    assert not ask(h, f"decode-{own}", Role.PREFILL)
    assert interrupted(h) == [("a", Interrupt.DRAINED)] and not h.core.members.keeping


def test_stream_wait_for_flip_is_bounded() -> None:
    """A stream does not wait for a worker that stays away, cannot change or has nothing cached."""
    h = Harness.make(decode=2)
    own = moving(h)
    assert h.core.next_deadline() == KEPT_S_MAX
    h.now = KEPT_S_MAX
    h.post(Tick())
    assert interrupted(h) == [("a", Interrupt.DRAINED)], "nothing is let go of yet"
    h = Harness.make(decode=2)
    own = moving(h)
    h.receive(own, FlipFailed("no room"))
    assert interrupted(h) == [("a", Interrupt.DRAINED)]
    h = Harness.make(decode=2)
    own = moving(h)
    h.receive(own, Released("a", 1, 1))
    come_back(h, own, 40, Role.PREFILL)
    h.now = CACHE_TOLD_S
    h.post(Tick())
    assert interrupted(h) == [("a", Interrupt.DRAINED)], "it has nothing cached, and so says nothing"


def test_cancelled_stream_is_not_resumed() -> None:
    """A stream whose client leaves while it waits for a role change is over."""
    h = Harness.make(decode=2)
    own = moving(h, Role.MIXED)
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    h.now = KEPT_S_MAX
    h.post(Tick())
    assert not h.take(Interrupted) and not h.core.members.keeping and own in h.core.cluster.workers


def test_prefill_worker_becomes_decode() -> None:
    """An idle prefill worker becomes a decode worker."""
    h = Harness.make(prefill=2)
    assert not ask(h, "prefill-10", Role.DECODE, hand_over_ms=500.0)
    assert h.take(Flip, 10) == [Flip(Role.DECODE, 500.0)] and h.take(Drained, 10), "it was idle"
    come_back(h, 10, 40, Role.DECODE)
    h.receive(40, DecodeProgress(3, 10, 0))
    assert last(h).state == "done" and not h.core.members.unproven


def test_flip_gives_requests_time() -> None:
    """Streams have their hand-over time to finish before a role change."""
    h = Harness.make(decode=2)
    decoding(h, submit("a"))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.allocations)
    assert not ask(h, f"decode-{own}", Role.PREFILL, hand_over_ms=2000.0)
    assert not h.take(Interrupted)
    h.take(Reserve)
    h.receive(1, submit("b"))
    compute(h, 10)
    assert not placed_on(h.take(Reserve, own))
    h.receive(own, Finished("a", 1, 4, 4))
    assert h.take(Drained, own) and not h.take(Interrupted)


@pytest.mark.parametrize(
    ("worker", "role", "why"),
    [
        ("decode-9", Role.PREFILL, "no worker is called 'decode-9'; there are decode-20, prefill-10, prefill-11"),
        ("decode-20", Role.DECODE, "decode-20 is a decode worker already"),
        ("prefill-10", Role.GATEWAY, "cannot take the role gateway; the roles are prefill, decode and mixed"),
        ("decode-20", Role.PREFILL, "decode-20 is the only decode worker of m that takes work"),
    ],
)
def test_impossible_flip_is_refused(worker: str, role: Role, why: str) -> None:
    """An impossible role change is refused with a reason, and nothing is ordered."""
    h = Harness.make(prefill=2)
    assert why in ask(h, worker, role)
    assert not h.core.cluster.draining and not h.take(Flip) and not h.core.members.flips


def test_worker_that_alone_fits_a_stream_stays() -> None:
    """A worker keeps its role while it runs a stream that no other worker could hold; by force, the stream waits for it."""
    h = Harness.make(decode=1)
    decoding(h, submit("a", 100))
    h.post(PeerUp(29, worker_hello(Role.DECODE, 29, kv_blocks=2)))
    assert "holds a request that fits no other decode worker" in ask(h, "decode-20", Role.PREFILL)
    assert not ask(h, "decode-20", Role.PREFILL, force=True)
    h.receive(20, Released("a", 1))
    come_back(h, 20, 30, Role.PREFILL)
    h.receive(1, again(submit("a", 100), 3))
    assert h.take(Accepted, 1) and h.core.cluster.requests["a"].waits


def test_last_worker_flips_only_by_force() -> None:
    """The last worker of a role changes its role only by force."""
    h = Harness.make()
    assert "--force" in ask(h, "decode-20", Role.PREFILL)
    assert not ask(h, "decode-20", Role.PREFILL, force=True)
    assert h.take(Drained, 20)


def test_flipping_worker_is_not_drained() -> None:
    """A worker that changes its role is not drained meanwhile, nor changed if it drains or is about to end."""
    h = Harness.make(prefill=3, decode=2)
    decoding(h, submit("a"))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.is_decode and w.allocations)
    assert not ask(h, f"decode-{own}", Role.PREFILL, hand_over_ms=1e6)
    assert ask(h, f"decode-{own}", Role.PREFILL).startswith(f"decode-{own} is changing its role to prefill")
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "drain-1")))
    h.receive(5, DrainRequest(f"decode-{own}", True, 0.0))
    assert "is changing its role" in str(h.sent[-1].message) and h.core.cluster.workers[own].draining
    h.receive(11, Draining(1e6))
    h.receive(own, Finished("a", 1, 4, 4))
    come_back(h, own, 40, Role.PREFILL)
    assert "is about to end" in ask(h, "prefill-11", Role.DECODE)
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "drain-1")))
    h.receive(5, DrainRequest("prefill-10", False, 1e6))
    assert "is drained; crossdock drain prefill-10 --undo first" in ask(h, "prefill-10", Role.DECODE)


def test_concurrent_flips_are_limited() -> None:
    """A limited number of workers change roles at once, and each change ends by itself."""
    h = Harness.make(prefill=12)
    names = [f"prefill-{10 + at}" for at in range(flips_at_once(13))]
    assert not any(ask(h, name, Role.DECODE) for name in names)
    assert "8 workers of m are changing" in ask(h, "prefill-18", Role.DECODE)
    come_back(h, 11, 40, Role.DECODE)
    h.post(PeerDown(12, "said goodbye"))
    h.post(PeerUp(41, msgspec.structs.replace(worker_hello(Role.PREFILL, 41), name="prefill-12")))
    states = {flip.worker: flip.state for flip in status(h.core.state).flips}
    assert states["prefill-11"] == "done" and states["prefill-12"] == "failed"
    assert {states[name] for name in names if name[-2:] not in ("11", "12")} == {"registering"}
    assert len(h.core.members.flipping) == 6 and not ask(h, "prefill-18", Role.DECODE)
    h.now = REGISTER_S_MAX
    h.post(Tick())
    assert not h.core.members.flipping and not h.core.cluster.draining, "nothing came of them, and they serve again"


def test_one_concurrent_flip_is_given_up() -> None:
    """One of two concurrent role changes is given up when no other worker of the role is left."""
    h = Harness.make(prefill=1, decode=3)
    for name in "abc":
        decoding(h, submit(name))
    busy = [w.incarnation for w in h.core.cluster.workers.values() if w.is_decode and w.allocations]
    assert len(busy) == 3, "a stream on each"
    first, second, third = busy
    assert not ask(h, f"decode-{first}", Role.PREFILL, hand_over_ms=1e6)
    assert not ask(h, f"decode-{second}", Role.PREFILL, hand_over_ms=1e6)
    assert "is the only decode worker" in ask(h, f"decode-{third}", Role.PREFILL)
    h.post(PeerDown(third, "no heartbeat"))
    states = [flip.state for flip in status(h.core.state).flips]
    assert states == ["failed", "draining"], "the first serves again, so the second may go"


def test_peer_loss_cancels_flip() -> None:
    """A role change is given up when the other worker of the role is lost."""
    h = Harness.make(decode=2)
    decoding(h, submit("a"))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.allocations)
    ask(h, f"decode-{own}", Role.PREFILL, hand_over_ms=1e6)
    h.post(PeerDown(41 - own, "no heartbeat"))
    assert h.take(Draining, own) == [Draining(None)] and not h.core.cluster.draining
    assert last(h).state == "failed" and f"as decode-{41 - own} is gone" in last(h).failure
    h.receive(own, Finished("a", 1, 4, 4))
    assert not h.take(Drained, own)
    h.take(Reserve)
    h.receive(1, submit("b"))
    assert placed_on(h.take(Reserve, own)) == {"b"}, "it serves again"


def test_peer_drain_cancels_flip() -> None:
    """A role change is given up when the other worker of the role drains first."""
    h = Harness.make(prefill=2, decode=2, max_seqs=1)
    decoding(h, submit("a"))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.allocations)
    ask(h, f"decode-{own}", Role.PREFILL, hand_over_ms=1e6)
    h.receive(1, submit("b", 64))
    h.receive(1, submit("c", 64))
    h.receive(41 - own, Draining(1e6))
    h.receive(own, Finished("a", 1, 4, 4))
    assert h.take(Draining, own) == [Draining(None)] and not h.take(Drained, own)
    assert "has become the only decode worker" in last(h).failure
    assert h.core.cluster.requests["c"].decode_incarnation == own, "it is placed at once, without another event"


def test_lost_link_or_failure_cancels_flip() -> None:
    """A role change is given up if the worker's connection is lost or it cannot change."""
    h = Harness.make(decode=2)
    decoding(h, submit("a"))
    own = next(w.incarnation for w in h.core.cluster.workers.values() if w.allocations)
    ask(h, f"decode-{own}", Role.PREFILL, hand_over_ms=1e6)
    h.post(PeerDown(own, "no heartbeat"))
    assert "the connection to it was lost: no heartbeat" in last(h).failure and not h.core.members.flipping
    h.post(PeerUp(own, worker_hello(Role.DECODE, own)))
    assert not h.core.cluster.draining
    other = 41 - own
    ask(h, f"decode-{other}", Role.PREFILL)
    h.receive(other, FlipFailed("--keys: there is no prefill.key_secret"))
    assert last(h).failure == "--keys: there is no prefill.key_secret" and not h.core.cluster.draining
    assert h.core.cluster.counters["flips_failed"] == 2


def test_late_flip_is_given_up() -> None:
    """A worker that does not register in its new role in time is no longer waited for."""
    h = Harness.make(decode=2)
    ask(h, "decode-20", Role.PREFILL)
    assert h.core.next_deadline() == REGISTER_S_MAX
    h.take(Draining)
    h.now = REGISTER_S_MAX
    h.post(Tick())
    assert "did not register as a prefill worker" in last(h).failure
    assert h.take(Draining, 20) == [Draining(None)] and not h.core.cluster.draining, "it is still there, and serves"


def test_restarted_worker_keeps_old_role() -> None:
    """A worker killed and started again during a role change keeps its old role."""
    h = Harness.make(decode=2)
    ask(h, "decode-20", Role.PREFILL)
    h.post(PeerDown(20, "no heartbeat"))
    h.post(PeerUp(30, msgspec.structs.replace(worker_hello(Role.DECODE, 30), name="decode-20")))
    assert last(h).failure == "it was started again" and not h.core.members.flipping
    assert not h.core.cluster.draining and h.core.cluster.counters["decode_restarted"] == 1


@pytest.mark.parametrize(
    "request_", [FlipRequest("decode-20", Role.PREFILL, 0.0), PolicyRequest(PolicyAction.ROLLBACK)]
)
def test_flips_and_policy_need_operator_tool(request_: Message) -> None:
    """A role change or policy request from a gateway is a protocol violation."""
    h = Harness.make(decode=2)
    h.receive(1, request_)
    assert h.protocol_violation and not h.core.cluster.draining and not h.core.members.flips


def test_foreign_steps_prove_nothing() -> None:
    """Steps of other workers and unknown steps do not prove a role change."""
    h = Harness.make(decode=2)
    ask(h, "decode-20", Role.PREFILL)
    come_back(h, 20, 40, Role.PREFILL)
    h.receive(21, DecodeProgress(3, 10, 0))
    h.receive(40, StepDone(99, (), 1.0, 0))
    assert not last(h).first_step_ms


# --- mixed workers ----------------------------------------------------------------------------------------------------


def mixed_up(h: Harness, first: int, name: str = "m-0", pid: int = 7, flipped_from: int = 0) -> tuple[int, int]:
    """A mixed worker's two registrations: `first` of prefill, and the next one of decode."""
    for at, role in enumerate((Role.PREFILL, Role.DECODE)):
        hello = msgspec.structs.replace(
            worker_hello(role, first + at), name=f"{name}-{role}", process=name, host="h", pid=pid,
            flipped_from=flipped_from,
        )  # fmt: skip
        h.post(PeerUp(first + at, hello))
    return first, first + 1


def test_prompt_is_not_sliced_for_itself() -> None:
    """A mixed worker's steps are bounded for streams that run, not for the place that a prompt has in decode."""
    h = Harness.make(prefill=0, decode=0)
    prefill, decode = (h.core.cluster.workers[one] for one in mixed_up(h, 40))
    assert isinstance(decode, DecodeWorker)
    decode.step_fit.add(1.0, 50.0)
    h.receive(1, submit("a"))
    assert decode.allocations and not prefill.pace.slice_ms
    compute(h, 40)
    h.receive(40, HandedOver("a", 1, 100, 1.0))
    assert prefill.pace.slice_ms > 0
    h.receive(41, Finished("a", 1, 4, 4))
    assert not prefill.pace.slice_ms


def test_mixed_worker_flips_when_empty() -> None:
    """A mixed worker goes when both its roles are empty, and comes back in one."""
    h = Harness.make(prefill=1, decode=0)
    prefill, decode = mixed_up(h, 40)
    decoding(h, submit("a"))
    mixed_up(h, 50, "m-1", 8)
    assert not ask(h, "m-0", Role.PREFILL, hand_over_ms=1e6)
    order = Flip(Role.PREFILL, 1e6)
    assert h.take(Flip, prefill) == [order] == h.take(Flip, decode)
    assert not h.take(Drained), "one of its roles has a stream"
    assert ask(h, "m-0", Role.PREFILL).startswith("m-0 is changing its role to prefill")
    h.receive(decode, Finished("a", 1, 4, 4))
    assert h.take(Drained, prefill) and h.take(Drained, decode) and last(h).state == "registering"
    for incarnation in (prefill, decode):
        h.post(PeerDown(incarnation, "said goodbye"))
    h.post(PeerUp(60, msgspec.structs.replace(worker_hello(Role.PREFILL, 60), name="m-0", flipped_from=decode)))
    flip = last(h)
    assert (flip.worker, flip.before, flip.role, flip.state) == ("m-0", "mixed", "prefill", "done")
    assert not h.core.members.flipping and not h.core.cluster.draining
    assert not h.core.cluster.counters["prefill_restarted"] and not h.core.cluster.counters["decode_restarted"]


def test_worker_becomes_mixed() -> None:
    """A worker becomes mixed once both its roles are registered."""
    h = Harness.make(prefill=2, decode=1)
    assert not ask(h, "prefill-10", Role.MIXED)
    h.post(PeerDown(10, "said goodbye"))
    hello = msgspec.structs.replace(worker_hello(Role.DECODE, 41), name="prefill-10-decode", process="prefill-10")
    h.post(PeerUp(41, msgspec.structs.replace(hello, flipped_from=10)))
    assert last(h).state == "registering"
    hello = msgspec.structs.replace(worker_hello(Role.PREFILL, 40), name="prefill-10-prefill", process="prefill-10")
    h.post(PeerUp(40, msgspec.structs.replace(hello, flipped_from=10)))
    assert last(h).state == "done" and h.core.cluster.counters["flips"] == 1
    h.now = 1.0
    h.receive(41, DecodeProgress(3, 10, 0))
    assert last(h).first_step_ms == 1000.0, "the first step of either"
    h.now = 2.0
    h.core.members.confirm_flip(40, h.now)
    assert last(h).first_step_ms == 1000.0 and not h.core.members.unproven


def test_lost_link_keeps_mixed_worker() -> None:
    """Both roles of a mixed worker stay if one connection is lost during its role change."""
    h = Harness.make(decode=1)
    prefill, decode = mixed_up(h, 40)
    assert not ask(h, "m-0", Role.DECODE)
    assert h.take(Drained, prefill) and h.take(Drained, decode)
    h.take(Draining)
    h.post(PeerDown(prefill, "no heartbeat"))
    own = msgspec.structs.replace(
        worker_hello(Role.PREFILL, prefill), name="m-0-prefill", process="m-0", host="h", pid=7
    )
    h.post(PeerUp(prefill, own))
    assert last(h).failure == "the connection to it was lost" and h.take(Draining, decode) == [Draining(None)]
    assert not h.core.cluster.draining and not h.core.members.flipping


def test_mixed_roles_flip_together() -> None:
    """The roles of a mixed worker change together or not at all."""
    h = Harness.make(prefill=1, decode=0)
    mixed_up(h, 40)
    assert "m-0-decode is one role of the mixed worker m-0" in ask(h, "m-0-decode", Role.PREFILL)
    assert "m-0 is a mixed worker already" in ask(h, "m-0", Role.MIXED)
    assert "m-0-decode is the only decode worker of m that takes work" in ask(h, "m-0", Role.PREFILL)
    h.post(PeerUp(20, worker_hello(Role.DECODE, 20)))
    h.post(PeerDown(41, "no heartbeat"))
    assert "registered in one of its roles alone" in ask(h, "m-0", Role.PREFILL)


def test_duplicate_mixed_names_are_refused() -> None:
    """A role change is refused if two mixed workers have the same name."""
    h = Harness.make(prefill=1, decode=1)
    mixed_up(h, 40)
    mixed_up(h, 50, pid=8)
    assert "2 workers are called 'm-0': give each a --name of its own" in ask(h, "m-0", Role.PREFILL)


def test_failed_flip_records_no_step_time() -> None:
    """A role change that was given up records no time of a first step."""
    h = Harness.make(prefill=2, decode=1)
    h.now = 1_000.0
    assert not ask(h, "prefill-10", Role.MIXED)
    h.post(PeerDown(10, "said goodbye"))
    hello = msgspec.structs.replace(worker_hello(Role.DECODE, 41), name="prefill-10-decode", process="prefill-10")
    h.post(PeerUp(41, msgspec.structs.replace(hello, flipped_from=10)))
    h.now += 60.0
    h.post(Tick())
    assert last(h).state == "failed"
    h.receive(41, DecodeProgress(3, 10, 0))
    assert not last(h).first_step_ms
