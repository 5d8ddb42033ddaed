"""What becomes of requests whose worker is lost or hangs: room that is kept for them, how many may come back at once, and which
pairs of workers are left out for a while."""

import random

import msgspec
import pytest

from coordinator.events import Limits, PeerDown, PeerUp, Tick
from coordinator.reporting import status
from proto.errors import CancelReason, Interrupt, Reject
from proto.messages import (
    Accepted,
    Cancel,
    Chunk,
    Finished,
    HandedOver,
    Interrupted,
    Message,
    Prefill,
    Rejected,
    Release,
    Released,
    Reserve,
    Role,
    Step,
    StepDone,
    WorkFailed,
)
from proto.progress import Hung
from scheduler.lifecycle import RequestState
from scheduler.waiting.retries import WINDOW_S, RetryBudget
from scheduler.workers.circuit_breakers import OPEN_S, OPEN_S_MAX, TRIP_AFTER, Breakers
from tests.coordinator.world import Harness, submit, worker_hello

# --- a stream that is resumed ---------------------------------------------------------------------------------------------


def place_again(numerics: dict[int, str]) -> int:
    """Where a stream goes on that began on decode worker 20, which is gone; those that are left have these numerics."""
    h = Harness.make(1, 0)
    h.post(PeerUp(20, msgspec.structs.replace(worker_hello(Role.DECODE, 20), numerics="kernels 1")))
    h.receive(1, submit("a"))
    assert h.core.cluster.requests["a"].decode_incarnation == 20
    for incarnation, kind in numerics.items():
        h.post(PeerUp(incarnation, msgspec.structs.replace(worker_hello(Role.DECODE, incarnation), numerics=kind)))
    h.post(PeerDown(20, "killed"))
    h.receive(1, submit("a", 11, attempt=2, resumed=1))
    return h.core.cluster.requests["a"].decode_incarnation


@pytest.mark.parametrize("same", [21, 22, 23])
def test_resume_prefers_same_kernels(same: int) -> None:
    """A stream resumes on the worker that computes the same bits as its lost one."""
    kinds = dict.fromkeys((21, 22, 23), "kernels 2")
    assert place_again({**kinds, same: "kernels 1"}) == same


def test_resume_falls_back_to_other_kernels() -> None:
    """A stream resumes on a worker with other kernels if no worker has the same ones."""
    assert place_again({21: "kernels 2", 22: "kernels 3"}) in (21, 22)


# --- a worker that hangs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_hung_worker_is_fenced_at_once(role: Role) -> None:
    """A worker that reports a hang is fenced before its link ends, and its later messages are ignored."""
    h = Harness.make(2, 2)
    h.receive(1, submit("a"))
    request = h.core.cluster.requests["a"]
    hung = request.prefill_incarnation if role is Role.PREFILL else request.decode_incarnation
    hello = h.core.members.peers[hung]
    h.receive(hung, Hung(31_000.0))
    assert [m.attempt for m in h.take(Interrupted, 1) if isinstance(m, Interrupted)] == [1]
    assert hung not in h.core.cluster.workers and h.core.cluster.counters[f"{role}_hung"] == 1
    state, ends = request.state, dict(h.ended)
    for late in (Finished("a", 1, 3, 0), WorkFailed("a", 1, Interrupt.ENGINE_ERROR, "late"), Hung(1.0)):
        assert h.receive(hung, late) == []
    h.post(PeerDown(hung, "connection closed"))
    assert (request.state, h.ended) == (state, ends) and h.core.cluster.counters[f"{role}_lost"] == 1
    assert "hung" in (h.core.refusal(hello) or "")


def test_restarted_process_is_counted() -> None:
    """A worker that returns with another incarnation counts as restarted, a lost link alone does not."""
    h = Harness.make()
    first = h.core.members.peers[10]
    h.post(PeerDown(10, "connection closed"))
    h.post(PeerUp(10, first))
    assert h.core.cluster.counters["prefill_restarted"] == 0, "its link was lost, no more"
    h.post(PeerDown(10, "killed"))
    h.post(PeerUp(99, msgspec.structs.replace(first, incarnation=99)))
    assert h.core.cluster.counters["prefill_restarted"] == 1


def test_left_out_pair_is_in_status() -> None:
    """The status names a pair that is left out and its number of failed transfers."""
    h = cluster()
    for number in range(TRIP_AFTER):
        h.one(f"r{number}", works=False)
    [said] = status.status(h.core.state).circuit_open
    assert "prefill-10 → decode-20" in said and f"{TRIP_AFTER} transfers" in said


# --- how many come back --------------------------------------------------------------------------------------------------


def interrupted(h: Harness, *names: str) -> None:
    """Their prefill worker is lost, and another one comes."""
    for name in names:
        h.receive(1, submit(name))
    lost = next(incarnation for incarnation, peer in h.core.members.peers.items() if peer.role is Role.PREFILL)
    h.post(PeerDown(lost, "killed"))
    h.post(PeerUp(lost + 100, worker_hello(Role.PREFILL, lost + 100)))
    for release in h.take(Release, 20):
        assert isinstance(release, Release)
        h.receive(20, Released(release.request_id, release.attempt))
    h.sent.clear()


def test_retries_over_budget_wait_and_return() -> None:
    """Retries over the budget are put off, not lost, and accepted once the window has passed."""
    h = Harness.make(limits=Limits(retry_floor=2, retry_share=0.0, steps_in_flight=4))
    interrupted(h, "a", "b", "c")
    for name in "abc":
        h.receive(1, submit(name, attempt=2))
    assert len(h.take(Accepted)) == 2
    [refused] = h.take(Rejected)
    assert isinstance(refused, Rejected) and refused.reason is Reject.RETRY_BUDGET
    assert 0 < refused.retry_after_s <= WINDOW_S
    assert h.core.cluster.requests["c"].state is RequestState.INTERRUPTED and not h.ended, "it is not lost"
    for _ in range(20):
        h.now += 0.1
        h.receive(1, submit("c", attempt=2))
    assert len(h.take(Rejected)) == 20 and not h.take(Accepted)
    h.now = WINDOW_S
    h.receive(1, submit("c", attempt=2))
    assert len(h.take(Accepted)) == 1, "what was refused does not count"
    assert h.core.cluster.counters["retries"] == 3 and h.core.cluster.counters["retries_put_off"] == 21


def test_cancelled_retry_counts_when_it_returns() -> None:
    """A choice that was put off and cancelled still counts as a retry when it comes back."""
    h = Harness.make(limits=Limits(retry_floor=1, retry_share=0.0, steps_in_flight=4))
    interrupted(h, "a")
    h.receive(1, Cancel("a", 1, CancelReason.ABANDONED))
    for choice in (0, 1):
        h.receive(1, msgspec.structs.replace(submit(f"a.c{choice}", attempt=2), first_choice=choice))
    assert len(h.take(Accepted)) == 1 and len(h.take(Rejected)) == 1
    h.receive(1, Cancel("a.c1", 2, CancelReason.ABANDONED))
    h.receive(1, msgspec.structs.replace(submit("a.c1", attempt=3), first_choice=1))
    assert len(h.take(Rejected)) == 1 and not h.take(Accepted)


@pytest.mark.parametrize("drained", [False, True])
def test_single_choices_count_as_retries(drained: bool) -> None:
    """Choices that come back one by one count as retries, unless a drain ended their attempt."""
    h = Harness.make(limits=Limits(retry_floor=1, retry_share=0.0, steps_in_flight=4))
    h.receive(1, submit("r", choices=2))
    h.post(PeerDown(10, "killed"))
    h.post(PeerUp(11, worker_hello(Role.PREFILL, 11)))
    h.receive(1, Cancel("r", 1, CancelReason.ABANDONED, 2))
    h.sent.clear()
    for choice in range(2):
        rest = submit(f"r.c{choice}", 11, attempt=2, resumed=1)
        h.receive(1, msgspec.structs.replace(rest, first_choice=choice, drained_attempts=int(drained)))
    assert len(h.take(Accepted)) == (2 if drained else 1)
    assert [said.reason for said in h.take(Rejected) if isinstance(said, Rejected)] == [Reject.RETRY_BUDGET] * (
        not drained
    )


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("choices", [False, True])
def test_resubmit_after_restart_is_no_retry(cancelled: bool, choices: bool) -> None:
    """Nor where its gateway gives up that attempt first, or all choices together to go on with each."""
    h = Harness.make(limits=Limits(retry_floor=1, retry_share=0.0))
    if choices and cancelled:
        h.receive(1, Cancel("r", 1, CancelReason.ABANDONED, 5))
    for number in range(5):
        if cancelled and not choices:
            h.receive(1, Cancel(f"r{number}", 1, CancelReason.ABANDONED, 1))
        rest = submit(f"r.c{number}" if choices else f"r{number}", attempt=2)
        h.receive(1, msgspec.structs.replace(rest, first_choice=number))
    assert len(h.take(Accepted)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_no_window_exceeds_retry_budget(seed: int) -> None:
    """No window has more retries than the budget, and the named waiting time is right."""
    rng = random.Random(seed)
    floor, share, alive = rng.randint(1, 5), rng.choice([0.0, 0.5, 1.0]), 6
    budget, now = RetryBudget(floor, share), 0.0
    let_in: list[float] = []
    for _ in range(500):
        now += rng.expovariate(2.0)
        if budget.allows(alive, now):
            budget.spend(now)
            let_in.append(now)
        else:
            later = now + budget.wait_s(now) + 1e-6
            assert later > now
            assert budget.allows(alive, later), "the time it names is right"
            now = later
    for at in let_in:
        assert sum(at < other + WINDOW_S and other <= at for other in let_in) <= floor + share * alive


# --- pairs that are left out ---------------------------------------------------------------------------------------------


def nothing_held(_: tuple[str, int]) -> bool:
    return False


def test_pair_opens_after_repeated_failures() -> None:
    """A pair is left out after several failures in a row, for longer each time, until a transfer works."""
    breakers, pair, now = Breakers(), (10, 20), 100.0
    for failure in range(1, 12):
        assert breakers.allows(pair, now, nothing_held)
        opened = breakers.failed(pair, placed_at=now, now=now + 0.1)
        now += 0.1
        assert opened == (failure >= TRIP_AFTER)
        if opened:
            open_s = min(OPEN_S * 2 ** (failure - TRIP_AFTER), OPEN_S_MAX)
            assert not breakers.allows(pair, now + open_s - 0.01, nothing_held)
            assert breakers.allows((10, 21), now, nothing_held) and breakers.allows((11, 20), now, nothing_held)
            now += open_s
            assert breakers.wake(now) and not breakers.wake(now)
    breakers.worked(pair)
    assert not breakers.pairs and breakers.failure_rate(pair, now) == 0.0


def test_failures_of_one_incident_count_once() -> None:
    breakers, pair = Breakers(), (10, 20)
    for number in range(10):
        breakers.failed(pair, placed_at=1.0 + number / 100, now=2.0)
    assert breakers.allows(pair, 2.0, nothing_held)


class Cluster(Harness):
    """Requests that go through it one at a time."""

    def one(self, name: str, works: bool, lasts_s: float = 0.1) -> tuple[int, int] | None:
        """The pair it was placed on; None if it waits."""
        self.receive(1, submit(name, 8))
        return self.go_on(name, works, lasts_s)

    def go_on(self, name: str, works: bool, lasts_s: float = 0.1) -> tuple[int, int] | None:
        request = self.core.cluster.requests[name]
        if request.state is RequestState.QUEUED:
            return None
        prefill, decode = request.prefill_incarnation, request.decode_incarnation
        [step] = [m for m in self.take(Step, prefill) if isinstance(m, Step)]
        self.receive(
            prefill, StepDone(step.step_id, step.chunks, 1.0, self.core.cluster.workers[prefill].tokens_forwarded + 8)
        )
        self.now += lasts_s
        if works:
            self.receive(prefill, HandedOver(name, 1, 9, 1.0))
            self.receive(decode, Finished(name, 1, 4, self.core.cluster.workers[decode].tokens_forwarded + 3))
        else:
            self.receive(prefill, WorkFailed(name, 1, Interrupt.TRANSFER_FAILED, "planted"))
            self.receive(decode, Released(name, 1))
            self.receive(1, Cancel(name, 1, CancelReason.ABANDONED))
        return prefill, decode


def cluster(prefill: int = 1, decode: int = 1) -> Cluster:
    made = Harness.make(prefill, decode)
    return Cluster(made.core)


def test_failing_pair_ends_serve_others() -> None:
    """A failing pair is left out, while both of its workers serve requests with others."""
    h, broken = cluster(2, 2), (10, 20)
    pairs: list[tuple[int, int] | None] = []
    for number in range(200):
        request = h.core.cluster.requests
        h.receive(1, submit(f"r{number}", 8))
        found = request[f"r{number}"]
        pair = found.prefill_incarnation, found.decode_incarnation
        pairs.append(h.go_on(f"r{number}", works=pair != broken))
    tries = [index for index, pair in enumerate(pairs) if pair == broken]
    assert None not in pairs and len(tries) <= 8, tries
    assert all(pairs.count(pair) >= 50 for pair in ((10, 21), (11, 20)))


def test_only_pair_gets_single_probes() -> None:
    """The only pair, once it is left out, is tried by one request at a time until it works."""
    h = cluster()
    for number in range(TRIP_AFTER):
        assert h.one(f"r{number}", works=False) == (10, 20)
    assert h.core.cluster.counters["pairs_left_out"] == 1
    for name in ("a", "b"):
        assert h.one(name, works=True) is None, "it waits, rather than fail"
    assert h.core.next_deadline() is not None
    h.now = h.core.next_deadline() or 0.0
    h.post(Tick())
    states = [h.core.cluster.requests[name].state for name in ("a", "b")]
    assert states == [RequestState.PREFILLING, RequestState.QUEUED], "one probe"
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    assert h.core.cluster.requests["b"].state is RequestState.QUEUED, "its blocks are not back yet"
    h.receive(10, Released("a", 1))
    h.receive(20, Released("a", 1))
    assert h.core.cluster.requests["b"].state is not RequestState.QUEUED, (
        "a probe that ends without a verdict makes room for the next"
    )
    h.receive(1, submit("c", 8))
    h.take(Step)
    for step_id, (step, _) in list(h.core.cluster.workers[10].steps.items()):
        h.receive(10, StepDone(step_id, tuple(c for c in step.chunks if c == Chunk("b", 1, 0, 8)), 1.0, 0))
    assert [h.core.cluster.requests[name].state for name in ("b", "c")] == [
        RequestState.HANDING_OVER,
        RequestState.QUEUED,
    ]
    h.receive(10, HandedOver("b", 1, 9, 1.0))
    assert h.core.cluster.requests["c"].state is RequestState.PREFILLING, "it works again"


# --- room that is kept ---------------------------------------------------------------------------------------------------


def full() -> Harness:
    """`a` has all the room in decode and loses its prefill worker; `b` waits for room; another prefill worker is there."""
    h = Harness.make(2, 1, kv_blocks=3)
    h.receive(1, submit("a", 9, max_tokens=3))
    h.receive(1, submit("b", 9, max_tokens=3))
    assert h.core.cluster.requests["b"].state is RequestState.QUEUED
    h.sent.clear()
    h.post(PeerDown(h.core.cluster.requests["a"].prefill_incarnation, "killed"))
    assert h.take(Release, 20) == [Release("a", 1)]
    return h


def test_lost_prefill_keeps_decode_room() -> None:
    """A request whose prefill worker is lost keeps its room on the decode worker for its next attempt."""
    h = full()
    h.receive(20, Released("a", 1))
    h.receive(20, Released("a", 1))
    assert h.core.cluster.requests["b"].state is RequestState.QUEUED, "the room is not free"
    h.receive(1, submit("a", 9, attempt=2, max_tokens=3))
    assert h.core.cluster.requests["a"].state is RequestState.PREFILLING, "at once, though it is not its turn"
    assert [m.request_id for m in sent(h, Prefill)] == [m.request_id for m in sent(h, Reserve)] == ["a"]  # type: ignore[attr-defined]
    assert list(h.core.cluster.workers[20].allocations) == [("a", 2)]


def test_retained_room_is_not_counted_twice() -> None:
    """A next attempt waits until the worker has released the last one, and its room is counted once."""
    h = full()
    h.receive(1, submit("a", 9, attempt=2, max_tokens=3))
    assert h.core.cluster.requests["a"].state is RequestState.QUEUED, "blocks are held until the worker lets go"
    h.receive(20, Released("a", 1))
    assert (
        h.core.cluster.requests["a"].state is RequestState.PREFILLING
        and h.core.cluster.requests["b"].state is RequestState.QUEUED
    )


@pytest.mark.parametrize("released_first", [True, False])
@pytest.mark.parametrize("how", ["cancel", "silence", "decode lost"])
def test_unclaimed_room_is_given_back(how: str, released_first: bool) -> None:
    """Retained room is given back after a cancel, a long silence or the loss of the decode worker."""
    h = full()
    if released_first:
        h.receive(20, Released("a", 1))
    if how == "cancel":
        h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    elif how == "silence":
        h.now += h.core.limits.resubmit_s_max + 0.1
        h.post(Tick())
    else:
        h.post(PeerDown(20, "killed"))
        h.post(PeerUp(21, worker_hello(Role.DECODE, 21, kv_blocks=3)))
    if not released_first:
        h.receive(20, Released("a", 1))
    assert h.core.cluster.requests["b"].state is RequestState.PREFILLING and not h.core.cluster.pools["m"].retained


def sent(h: Harness, kind: type[Message]) -> list[Message]:
    return [s.message for s in h.sent if isinstance(s.message, kind)]


def test_room_kept_twice_is_used_once() -> None:
    """As its own, from before its prefill worker was lost, and since others were let by. Its tenant's weight is high, or it
    would not count as bypassed by those that hold less."""
    h = Harness.make(2, 1, Limits(bypasses_max=1, weights={"standard/default": 10.0}), kv_blocks=5)
    h.receive(1, submit("a", 9, max_tokens=3))
    h.post(PeerDown(h.core.cluster.requests["a"].prefill_incarnation, "killed"))
    h.receive(1, submit("a", 9, attempt=2, max_tokens=3))
    for name in ("small", "smaller"):
        h.receive(1, msgspec.structs.replace(submit(name, 2, max_tokens=2), tenant="other"))
    pool = h.core.cluster.pools["m"]
    assert pool.room_for_large.request is h.core.cluster.requests["a"] and pool.retained
    h.receive(20, Released("a", 1))
    assert h.core.cluster.requests["a"].state is RequestState.PLACED and pool.room_for_large.request is None, (
        "its own step follows"
    )
