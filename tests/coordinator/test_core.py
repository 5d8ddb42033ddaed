"""The core's promises, one event at a time and under seeded chaos."""

import msgspec
import pytest

from coordinator.events import Limits, PeerDown, PeerUp, Received, Tick
from coordinator.reporting.status import status
from proto.codec import encode
from proto.drain import Draining
from proto.errors import CancelReason, Interrupt, Reject
from proto.limits import MAX_FRAME_BYTES, MAX_TEXT_CHARS
from proto.messages import (
    Accepted,
    Cancel,
    Chunk,
    ClusterState,
    Finished,
    HandedOver,
    Interrupted,
    Message,
    Ping,
    Prefill,
    Rejected,
    Release,
    Released,
    Reserve,
    Role,
    StatusRequest,
    Step,
    StepDone,
    WorkFailed,
)
from proto.parts import Held, Room
from proto.status import KvHeld, KvPair, KvPairs, StatusReport
from scheduler.lifecycle import TERMINAL, TRANSITIONS, IllegalTransition, RequestState, Trigger, advance
from tests.coordinator.world import Harness, RandomWorld, gateway_hello, submit, worker_hello
from tests.helpers import first


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("trigger", Trigger)
def test_every_transition_is_listed_or_illegal(state: RequestState, trigger: Trigger) -> None:
    """Every pair of state and trigger is in the transition table or illegal."""
    if (state, trigger) in TRANSITIONS:
        assert state not in TERMINAL
        advance(state, trigger)
    else:
        with pytest.raises(IllegalTransition):
            advance(state, trigger)


def test_live_states_can_be_ended() -> None:
    """Every live state can be cancelled and can fail."""
    for state in set(RequestState) - TERMINAL:
        assert TRANSITIONS[(state, Trigger.CANCEL)] is RequestState.CANCELLED
        assert TRANSITIONS[(state, Trigger.FAIL)] is RequestState.FAILED


def test_life_from_submit_to_finish() -> None:
    """A request goes from submit to finish, and all its blocks come back."""
    h = Harness.make()
    h.receive(1, submit("a", 10, max_tokens=4))
    assert h.take(Accepted, 1) == [Accepted("a", 1)]
    [reserve], [prefill], [step] = h.take(Reserve, 20), h.take(Prefill, 10), h.take(Step, 10)
    assert isinstance(reserve, Reserve) and isinstance(prefill, Prefill) and isinstance(step, Step)
    assert reserve.kv_blocks == 4  # 10 + 4 - 1 tokens in blocks of 4
    assert prefill.decode.incarnation == 20 and prefill.gateway.incarnation == 1
    assert step.chunks == (Chunk("a", 1, 0, 10),)
    h.receive(10, StepDone(0, step.chunks, 5.0, 0))
    assert h.core.cluster.requests["a"].state is RequestState.HANDING_OVER
    h.receive(10, HandedOver("a", 1, 1234, 1.0))
    assert h.core.cluster.requests["a"].state is RequestState.DECODING
    assert h.core.cluster.workers[10].free_blocks == 1000
    h.receive(20, Finished("a", 1, 4, 0))
    assert h.ended == {"a": [RequestState.FINISHED]} and not h.core.cluster.requests
    assert h.core.cluster.workers[20].free_blocks == 1000 and not h.take(Release)


def test_long_prompts_are_chunked() -> None:
    """Long prompts are computed in chunks that end at block borders, two steps in flight."""
    h = Harness.make(limits=Limits(step_tokens=10))
    h.receive(1, submit("a", 30))
    first, second = (m for m in h.take(Step))
    assert isinstance(first, Step) and isinstance(second, Step)
    assert [c.length for s in (first, second) for c in s.chunks] == [8, 8], "chunks end at block borders"
    h.receive(10, StepDone(0, first.chunks, 1.0, 0))
    [third] = h.take(Step)
    assert isinstance(third, Step) and third.chunks == (Chunk("a", 1, 16, 8),)


def test_step_takes_several_prompts() -> None:
    """One step takes chunks of several prompts."""
    h = Harness.make(limits=Limits(step_tokens=16, steps_in_flight=1))
    h.receive(1, submit("a", 3))
    h.take(Step)
    for name, tokens in (("b", 5), ("c", 20), ("d", 5)):
        h.receive(1, submit(name, tokens))
    h.receive(10, StepDone(0, (Chunk("a", 1, 0, 3),), 1.0, 0))
    [step] = h.take(Step)
    # The long one is due later than the short ones that came with it, and gets what they leave, in whole blocks.
    assert isinstance(step, Step) and step.chunks == (Chunk("b", 1, 0, 5), Chunk("d", 1, 0, 5), Chunk("c", 1, 0, 4))


def test_placement_needs_room_for_whole_life() -> None:
    """A request is placed only with room for its whole life, and those that have room go ahead."""
    h = Harness.make(kv_blocks=10)
    h.receive(1, submit("big", 8, max_tokens=25))  # 32 tokens: 8 blocks in decode
    h.receive(1, submit("second", 8, max_tokens=9))  # 16 tokens: 4 blocks
    h.receive(1, submit("small", 1, max_tokens=1))
    assert [r.id for r in h.core.cluster.queues["m"]] == ["second"]
    assert [m.request_id for m in h.take(Reserve) if isinstance(m, Reserve)] == ["big", "small"]
    h.receive(10, StepDone(0, (Chunk("big", 1, 0, 8),), 1.0, 0))
    h.receive(20, Finished("big", 1, 25, 0))
    assert [m.request_id for m in h.take(Reserve) if isinstance(m, Reserve)] == ["second"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [(submit("x", 4000, max_tokens=98), Reject.TOO_LONG), (submit("x", 2000, max_tokens=2000), Reject.TOO_LARGE)],
)
def test_oversized_request_is_rejected(message: Message, reason: Reject) -> None:
    """A request that is too long or too large is rejected with a reason, and nothing is reserved."""
    h = Harness.make(kv_blocks=500)
    h.receive(1, message)
    [answer] = h.take(Rejected)
    assert isinstance(answer, Rejected) and answer.reason is reason and answer.message
    assert not h.core.cluster.requests and h.core.cluster.workers[20].free_blocks == 500


def test_rejections_name_their_reason() -> None:
    """A full queue, an unknown model and a missing role each reject a request with their own reason."""
    h = Harness.make(limits=Limits(queue_requests_max=2), max_seqs=1)
    for name in "abcd":
        h.receive(1, submit(name))
    [answer] = h.take(Rejected)
    assert isinstance(answer, Rejected) and (answer.request_id, answer.reason) == ("d", Reject.QUEUE_FULL)
    assert 1.0 <= answer.retry_after_s <= 60.0
    empty = Harness.make(0, 0)
    empty.receive(1, submit("f"))
    assert [m.reason for m in empty.take(Rejected) if isinstance(m, Rejected)] == [Reject.UNKNOWN_MODEL]
    half = Harness.make(1, 0)
    half.receive(1, submit("f"))
    assert [m.reason for m in half.take(Rejected) if isinstance(m, Rejected)] == [Reject.NO_CAPACITY]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_requests_wait_for_worker_restart(role: Role) -> None:
    """New requests wait while the last worker of a role is started again."""
    h = Harness.make(limits=Limits(queue_wait_s_max=60.0), kv_blocks=500)
    lost, again = (10, 11) if role is Role.PREFILL else (20, 21)
    h.post(PeerDown(lost, "killed"))
    h.receive(1, submit("waits"))
    h.receive(1, submit("too-long", 4000, max_tokens=98))
    h.receive(1, submit("too-large", 2000, max_tokens=2000))
    assert [m.request_id for m in h.take(Accepted) if isinstance(m, Accepted)] == ["waits"]
    reasons = [m.reason for m in h.take(Rejected) if isinstance(m, Rejected)]
    assert reasons == [Reject.TOO_LONG, Reject.TOO_LARGE], "the lost worker stands for the next one"
    h.post(PeerUp(again, worker_hello(role, again)))
    assert [m.request_id for m in h.take(Reserve) if isinstance(m, Reserve)] == ["waits"]
    h.post(PeerDown(again, "killed"))
    h.now += 61.0
    h.receive(1, submit("late"))
    assert [m.reason for m in h.take(Rejected) if isinstance(m, Rejected)] == [Reject.NO_CAPACITY]


def test_drained_worker_is_not_awaited() -> None:
    """A new request is rejected if the last worker of a role was drained."""
    h = Harness.make()
    h.receive(20, Draining(1e6))
    h.post(PeerDown(20, "drained"))
    h.receive(1, submit("new"))
    assert [m.reason for m in h.take(Rejected) if isinstance(m, Rejected)] == [Reject.NO_CAPACITY]


def states_of_a_life() -> list[tuple[RequestState, Harness]]:
    """A core with request `a` in each of its live states."""
    found = []
    for state in (
        RequestState.QUEUED,
        RequestState.PREFILLING,
        RequestState.HANDING_OVER,
        RequestState.DECODING,
        RequestState.INTERRUPTED,
    ):
        h = Harness.make()
        if state is RequestState.QUEUED:
            h = Harness.make(max_seqs=1)
            h.receive(1, submit("blocker"))
        h.receive(1, submit("a", 10))
        if state in (RequestState.HANDING_OVER, RequestState.DECODING):
            h.receive(10, StepDone(0, (Chunk("a", 1, 0, 10),), 1.0, 0))
        if state is RequestState.DECODING:
            h.receive(10, HandedOver("a", 1, 1, 1.0))
        if state is RequestState.INTERRUPTED:
            h.receive(20, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "planted"))
        assert h.core.cluster.requests["a"].state is state
        found.append((state, h))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("state", "h"), states_of_a_life(), ids=lambda v: v.value if isinstance(v, RequestState) else ""
)
def test_cancel_frees_everything(state: RequestState, h: Harness) -> None:
    """A cancel in any state gives all blocks back once the workers have released them."""
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    assert h.ended["a"] == [RequestState.CANCELLED] and "a" not in h.core.cluster.requests
    for incarnation in {s.incarnation for s in h.sent if isinstance(s.message, Release)}:
        assert ("a", 1) in h.core.cluster.workers[incarnation].allocations, "blocks are held until the worker lets go"
        h.receive(incarnation, Released("a", 1))
    assert all(("a", 1) not in w.allocations for w in h.core.cluster.workers.values())


def test_foreign_or_old_cancel_is_ignored() -> None:
    """A cancel by another gateway or of an older attempt does nothing."""
    h = Harness.make()
    h.post(PeerUp(2, gateway_hello(2)))
    h.receive(1, submit("a"))
    h.receive(2, Cancel("a", 1, CancelReason.DISCONNECTED))
    h.receive(1, submit("a", attempt=2))
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    assert "a" in h.core.cluster.requests
    h.receive(2, submit("a"))
    assert [m.reason for m in h.take(Rejected, 2) if isinstance(m, Rejected)] == [Reject.DUPLICATE]


@pytest.mark.parametrize("lost", [10, 20])
def test_lost_worker_moves_next_attempt(lost: int) -> None:
    """A lost worker interrupts its request, and the next attempt runs elsewhere."""
    h = Harness.make(2, 2)
    h.receive(1, submit("a"))
    request = h.core.cluster.requests["a"]
    lost = request.prefill_incarnation if lost == 10 else request.decode_incarnation
    other = request.decode_incarnation if lost == request.prefill_incarnation else request.prefill_incarnation
    h.post(PeerDown(lost, "killed"))
    [told] = h.take(Interrupted, 1)
    assert isinstance(told, Interrupted) and told.attempt == 1
    assert h.take(Release, other) == [Release("a", 1)]
    h.receive(1, submit("a", attempt=2))
    assert h.core.cluster.requests["a"].state is RequestState.PREFILLING
    assert lost not in (request.prefill_incarnation, request.decode_incarnation)
    # What the first attempt still says is dropped.
    h.receive(other, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "late"))
    h.receive(other, Finished("a", 1, 3, 0))
    assert h.core.cluster.requests["a"].state is RequestState.PREFILLING


def test_prefill_loss_spares_decoding_stream() -> None:
    """The loss of the prefill worker after hand-over does not touch the stream."""
    h = dict(states_of_a_life())[RequestState.DECODING]
    h.post(PeerDown(10, "killed"))
    assert h.core.cluster.requests["a"].state is RequestState.DECODING and not h.take(Interrupted)


def test_silent_gateway_request_fails() -> None:
    """An interrupted request fails after 30 s if its gateway stays silent."""
    h = dict(states_of_a_life())[RequestState.INTERRUPTED]
    assert h.core.next_deadline() == 30.0
    h.now = 30.0
    h.post(Tick())
    assert h.ended["a"] == [RequestState.FAILED] and h.core.next_deadline() is None


def test_waiting_too_long_expires() -> None:
    """A request that waits for longer than 120 s is rejected as expired."""
    h = dict(states_of_a_life())[RequestState.QUEUED]
    assert h.core.next_deadline() == 120.0
    h.now = 121.0
    h.post(Tick())
    assert h.ended["a"] == [RequestState.EXPIRED]
    assert [m.reason for m in h.take(Rejected) if isinstance(m, Rejected)] == [Reject.EXPIRED]


def test_lost_gateway_cancels_its_requests() -> None:
    """A lost gateway cancels its own requests and no others."""
    h = Harness.make()
    h.post(PeerUp(2, gateway_hello(2)))
    h.receive(1, submit("a"))
    h.receive(2, submit("b"))
    h.post(PeerDown(1, "killed"))
    assert h.ended == {"a": [RequestState.CANCELLED]} and list(h.core.cluster.requests) == ["b"]


def test_repeated_submit_is_accepted_once() -> None:
    """A repeated submit is acknowledged again, but placed once."""
    h = Harness.make()
    h.receive(1, submit("a"))
    h.receive(1, submit("a"))
    assert len(h.take(Accepted)) == 2 and len(h.take(Prefill)) == 1


def test_ended_attempt_submit_is_interrupted() -> None:
    """Its tokens may have been lost on their way, and the gateway waits for them."""
    h = Harness.make()
    h.receive(1, submit("a"))
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    h.receive(1, submit("a"))
    assert [(m.request_id, m.attempt) for m in h.take(Interrupted)] == [("a", 1)]  # type: ignore[attr-defined]
    h.receive(1, submit("a", attempt=2))
    assert h.core.cluster.requests["a"].attempt == 2


def test_cancelled_prompts_are_freed() -> None:
    """Lanes and lists clear out what has left them later."""
    h = Harness.make(kv_blocks=3)
    for number in range(20):
        h.receive(1, submit(f"r{number}", 9, max_tokens=3))
    left = [h.core.cluster.requests[f"r{number}"] for number in range(2, 20)]
    assert all(request.blob for request in left)
    for request in left:
        h.receive(1, Cancel(request.id, 1, CancelReason.DISCONNECTED))
    assert not any(request.blob for request in left)


def test_finish_may_overtake_hand_over() -> None:
    """A finish may arrive before the hand-over, and the request ends."""
    h = dict(states_of_a_life())[RequestState.HANDING_OVER]
    h.receive(20, Finished("a", 1, 4, 0))
    assert h.ended["a"] == [RequestState.FINISHED]
    assert h.take(Release, 10) == [Release("a", 1)]
    h.receive(10, HandedOver("a", 1, 1, 1.0))
    h.receive(10, Released("a", 1))
    assert h.core.cluster.workers[10].free_blocks == 1000


def test_one_token_answer_ends_in_prefill() -> None:
    """An answer of one token finishes in prefill, and the decode worker is released."""
    h = Harness.make()
    h.receive(1, submit("a", max_tokens=1))
    h.receive(10, Finished("a", 1, 1, 0))
    assert h.ended["a"] == [RequestState.FINISHED] and h.take(Release, 20) == [Release("a", 1)]


def test_early_decode_release_is_no_verdict() -> None:
    """A decode worker's early release leaves the verdict to the prefill worker."""
    h = Harness.make()
    h.receive(1, submit("a", max_tokens=1))
    h.receive(20, Released("a", 1))
    assert h.core.cluster.requests["a"].state is RequestState.PREFILLING and not h.take(Interrupted)
    h.receive(10, Finished("a", 1, 1, 0))
    assert h.ended["a"] == [RequestState.FINISHED] and not h.take(Release)


def test_newer_attempt_replaces_waiting_one() -> None:
    """A newer attempt takes the place of the one that waits."""
    h = dict(states_of_a_life())[RequestState.QUEUED]
    h.receive(1, submit("a", attempt=2))
    assert h.core.cluster.requests["a"].attempt == 2 and [r.id for r in h.core.cluster.queues["m"]] == ["a"]


def test_cancel_reaches_absent_worker() -> None:
    """A cancel reaches a worker that was away when the cancel came."""
    h = Harness.make(1, 0)
    h.receive(1, Cancel("old", 2, CancelReason.DISCONNECTED))
    hello = msgspec.structs.replace(worker_hello(Role.DECODE, 22, kv_blocks=10), held=(Held("old", 1, 7, 1),))
    h.post(PeerUp(22, hello))
    assert h.take(Release, 22) == [Release("old", 1)]


def test_unplaceable_request_lets_others_pass() -> None:
    """A request that no present worker can hold lets others pass."""
    h = Harness.make(1, 1, max_seqs=1)
    h.receive(1, submit("running"))
    big = worker_hello(Role.DECODE, 21, kv_blocks=2000, max_seqs=1)
    h.post(PeerUp(21, msgspec.structs.replace(big, name="big")))
    h.receive(1, submit("big", 3000, max_tokens=1090))
    small_incarnations = [w for w in (20, 21) if h.core.cluster.workers[w].capacity.kv_blocks == 1000]
    h.post(PeerDown(21, "killed"))
    h.receive(1, submit("big", 3000, attempt=2, max_tokens=1090))
    h.receive(1, submit("small"))
    h.receive(10, StepDone(0, (Chunk("running", 1, 0, 10),), 1.0, 0))
    h.receive(10, HandedOver("running", 1, 1, 1.0))
    h.receive(20, Finished("running", 1, 4, 0))
    assert small_incarnations == [20] and h.core.cluster.requests["small"].state is RequestState.PREFILLING
    assert "big" not in h.core.cluster.requests or h.core.cluster.requests["big"].state in (
        RequestState.QUEUED,
        RequestState.INTERRUPTED,
    )


def test_registration_updates_cluster_state() -> None:
    """A worker with another fingerprint is refused, and gateways hear when workers come and go."""
    h = Harness.make()
    assert "fingerprint" in (h.core.refusal(worker_hello(Role.DECODE, 30, fingerprint="other")) or "")
    assert h.core.refusal(worker_hello(Role.DECODE, 30)) is None
    assert h.core.refusal(gateway_hello(3)) is None
    h.post(PeerDown(20, "gone"))
    assert h.take(ClusterState, 1) == [ClusterState(())]
    h.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
    assert h.take(ClusterState, 1) == [ClusterState(("m",), (4,), rooms=(Room(4096, 4000, 1000, 4),))]


def test_returning_worker_keeps_held_blocks() -> None:
    """A worker that comes back keeps the blocks it holds until their stream ends."""
    h = Harness.make(1, 0)
    hello = worker_hello(Role.DECODE, 22, kv_blocks=10)
    h.post(PeerUp(22, msgspec.structs.replace(hello, held=(Held("old", 1, 7, 1),))))
    assert h.core.cluster.workers[22].free_blocks == 3
    h.receive(1, Cancel("old", 1, CancelReason.DISCONNECTED))
    assert h.take(Release, 22) == [Release("old", 1)]
    h.receive(22, Finished("old", 1, 5, 0))
    assert h.core.cluster.workers[22].free_blocks == 10


@pytest.mark.parametrize("incarnation", [1, 10, 20])
def test_wrong_role_message_is_misbehaviour(incarnation: int) -> None:
    """A message that the sender's role may not send is a protocol violation."""
    h = Harness.make()
    wrong: Message = submit("a") if incarnation != 1 else StepDone(0, (), 0.0, 0)
    h.receive(incarnation, wrong)
    h.receive(incarnation, Ping())
    assert len(h.protocol_violation) == 2 and not h.core.cluster.requests


def test_wrong_blob_length_is_misbehaviour() -> None:
    """A blob whose length does not match the prompt is a protocol violation."""
    h = Harness.make()
    h.post(Received(1, submit("a", 10), b"\0" * 39))
    assert len(h.protocol_violation) == 1 and not h.core.cluster.requests


def test_status_reports_workers() -> None:
    """A status report has the running requests, and each worker's blocks by both counts."""
    h = Harness.make()
    h.receive(1, submit("a"))
    h.receive(1, StatusRequest())
    [report] = h.take(StatusReport)
    assert isinstance(report, StatusReport)
    assert [(w.name, w.kv_blocks_used) for w in report.workers] == [("decode-20", 4), ("prefill-10", 3)]
    assert report.running == {"prefilling": 1}
    assert len(h.take(StatusRequest)) == 2, "the workers are asked for their own count"
    h.receive(10, KvHeld(3, 1, 2))
    h.receive(1, StatusRequest())
    [report] = h.take(StatusReport)
    own = {w.name: (w.own_blocks, w.own_blocks_quarantined, w.own_sessions) for w in report.workers}  # type: ignore[attr-defined]
    assert own == {"decode-20": (0, 0, 0), "prefill-10": (3, 1, 2)}


@pytest.mark.parametrize("seed", first(60, range(150)))
def test_chaos_ends_each_request_once(seed: int) -> None:
    """Every accepted request ends exactly once in seeded chaos, and nothing leaks."""
    world = RandomWorld(seed)
    for _ in range(400):
        world.step()
    world.heal()
    for request_id in world.accepted:
        assert len(world.ended[request_id]) == 1, (seed, request_id, world.ended[request_id])
    for worker in world.core.cluster.workers.values():
        assert not worker.allocations and worker.free_blocks == 40, seed
    assert not world.protocol_violation


def test_report_with_many_pairs_fits_frame() -> None:
    """A status report fits its frame however many KV pairs workers report."""
    h = Harness.make(prefill=0, decode=1)
    for number in range(30, 60):
        h.post(PeerUp(number, worker_hello(Role.PREFILL, number)))
        h.receive(number, KvPairs((KvPair(20, "tcp", "x" * MAX_TEXT_CHARS),) * 1024))
    assert len(encode(status(h.core.state))) < MAX_FRAME_BYTES / 8


def test_choices_find_worker_with_sequences() -> None:
    """Several choices find a worker with enough sequences behind larger workers without."""
    h = Harness.make(prefill=1, decode=0)
    for number in range(12):
        large = number < 6
        size = {"kv_blocks": 4000, "max_seqs": 1} if large else {"kv_blocks": 100, "max_seqs": 8}
        h.post(PeerUp(20 + number, worker_hello(Role.DECODE, 20 + number, **size)))  # type: ignore[arg-type]
    h.receive(1, submit("r", choices=2))
    assert h.core.cluster.requests["r"].decode_incarnation >= 26
