"""Revisions of one model side by side: who gets which, what stays where it is, and what a rollout changes."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.events import Configured, PeerDown, PeerUp, Received
from coordinator.policy_keeper import PolicyFile, PolicyKeeper
from coordinator.policy_versions import PolicyInForce
from coordinator.reporting import status
from coordinator.rollouts.plan import Rollout, RolloutError, apply
from proto.errors import Interrupt, Reject
from proto.messages import ClusterState, Finished, Hello, Message, Prefill, Rejected, Reserve, Role
from proto.policy import PolicyAnswer, RevisionStatus, RolloutAction, RolloutAnswer, RolloutRequest
from runtime.tenancy.tenants import open_tenants
from tests.coordinator.test_draining import decoding
from tests.coordinator.test_sessions import submit as turn_of
from tests.coordinator.world import MODEL, Harness, RandomWorld, submit, worker_hello

NEW = f"{MODEL}@v2"


def of_revision(hello: Hello, revision: str = "v2", fingerprint: str = "f") -> Hello:
    return msgspec.structs.replace(hello, model=f"{MODEL}@{revision}", revision=revision, fingerprint=fingerprint)


def side_by_side(rollout: Rollout | None = None) -> Harness:
    """Prefill 10 and decode 20 serve the revision without a name, prefill 11 and decode 21 serve v2."""
    h = Harness.make()
    for role, incarnation in ((Role.PREFILL, 11), (Role.DECODE, 21)):
        h.post(PeerUp(incarnation, of_revision(worker_hello(role, incarnation), fingerprint="revision=2")))
    if rollout is not None:
        roll_out(h, rollout)
    h.sent.clear()
    return h


def roll_out(h: Harness, rollout: Rollout) -> None:
    h.post(Configured(open_tenants(), 0.0, None, PolicyInForce(1, rollouts={MODEL: rollout})))


def pool_of(h: Harness, request_id: str) -> str:
    return h.core.cluster.requests[request_id].submit.model


def submitted(h: Harness, count: int) -> Counter[str]:
    for number in range(count):
        h.receive(1, submit(f"r{number}"))
    return Counter(pool_of(h, f"r{number}") for number in range(count))


def test_other_revision_gets_nothing_before_start() -> None:
    """Workers of another revision may join, and get no requests until a rollout starts."""
    h = side_by_side()
    assert submitted(h, 20) == {MODEL: 20}


def test_share_of_requests_goes_to_trial() -> None:
    """A trial gets its share of the requests, each is placed on a pair of one revision, and each has one answer."""
    h = side_by_side(Rollout("", "v2", 0.3))
    found = submitted(h, 300)
    assert found.keys() == {MODEL, NEW} and found[NEW] == pytest.approx(90, abs=30)
    placed = {10: 20, 11: 21}
    for send in h.sent:
        if isinstance(send.message, Prefill):
            assert placed[send.incarnation] == send.message.decode.incarnation


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.text(min_size=1, max_size=20), st.booleans())
def test_larger_share_keeps_smaller_share(one: float, other: float, name: str, by_organisation: bool) -> None:
    """A larger share has all requests and organisations of a smaller one."""
    request = msgspec.structs.replace(submit("r"), request_id=name, tenant=f"{name}/user")
    if Rollout("", "v2", min(one, other), by_organisation).tries(request):
        assert Rollout("", "v2", max(one, other), by_organisation).tries(request)


def test_named_organisations_go_to_trial() -> None:
    """Organisations that are named get the trial with all their users, and others do not."""
    rollout = Rollout("", "v2", organisations=("acme",))
    tenants = {name: msgspec.structs.replace(submit("r"), tenant=name) for name in ("acme", "acme/ann", "lab")}
    assert [name for name, request in tenants.items() if rollout.tries(request)] == ["acme", "acme/ann"]


@pytest.mark.parametrize(("trial", "stays"), [("v2", NEW), (None, MODEL)])
def test_streams_stay_on_their_revision(trial: str | None, stays: str) -> None:
    """A stream whose worker is lost goes on in its revision, whatever a rollout has changed meanwhile."""
    h = side_by_side(Rollout("", trial, 1.0))
    request = submit("r", max_tokens=20)
    decoding(h, request, 11 if trial else 10)
    roll_out(h, Rollout("" if trial else "v2"))
    lost = 21 if trial else 20
    h.post(PeerDown(lost, "killed"))
    h.receive(1, msgspec.structs.replace(request, attempt=2, prompt_tokens=13, resumed_tokens=3, pool=stays))
    assert pool_of(h, "r") == stays and not h.take(Rejected) and not h.protocol_violation
    assert not h.take(Reserve, 41 - lost), "it waits for a worker of its revision"
    back = worker_hello(Role.DECODE, 30)
    h.post(PeerUp(30, of_revision(back, fingerprint="revision=2") if trial else back))
    assert h.take(Reserve, 30)


def test_new_coordinator_keeps_revisions() -> None:
    """A coordinator that does not know a stream resumes it in the revision that its tokens came from, once that has workers."""
    h = side_by_side(Rollout("v2"))
    resumed = msgspec.structs.replace(submit("a", 13, attempt=2, resumed=3), pool=MODEL)
    h.receive(1, resumed)
    assert pool_of(h, "a") == MODEL
    h.receive(1, msgspec.structs.replace(resumed, request_id="b", pool=f"{MODEL}@v3"))
    assert [one.reason for one in h.take(Rejected) if isinstance(one, Rejected)] == [Reject.UNKNOWN_MODEL]
    h.receive(1, msgspec.structs.replace(submit("c", attempt=2)))
    assert pool_of(h, "c") == NEW, "it has no tokens yet"


def test_pool_of_another_model_is_misbehaviour() -> None:
    """A request cannot reach the workers of another model by naming them as its pool."""
    h = side_by_side()
    for pool in ("other", f"{MODEL}x@v2", "other@v2"):
        h.receive(1, msgspec.structs.replace(submit("a"), pool=pool))
    assert len(h.protocol_violation) == 3 and not h.core.cluster.requests


def test_sessions_stay_until_their_lease_ends() -> None:
    """After a promotion, next turns go to the revision that keeps their KV while they are expected, and others do not."""
    h = side_by_side(Rollout("", "v2", 0.0))
    prompt = tuple(range(10, 32))
    h.now = 1.0  # time 0 means: no first token yet

    def play(name: str, tokens: tuple[int, ...], ends: int = 0) -> str:
        request, blob = turn_of(tokens)
        h.post(Received(1, msgspec.structs.replace(request, request_id=name), blob))
        pool = pool_of(h, name)
        if ends:
            decoding(h, msgspec.structs.replace(request, request_id=name), 10)
            h.receive(ends, Finished(name, 1, 8, 0))
        return pool

    assert play("first", prompt, ends=20) == MODEL
    roll_out(h, Rollout("v2"))
    assert play("other", (99, *prompt)) == NEW
    shown = {one.revision: one for one in status.revisions(h.core.state, h.now)}
    assert (shown[""].in_force, shown[""].sessions, shown["v2"].in_force) == (False, 1, True)
    assert play("next", (*prompt, 1, 2, 3, 4, 5), ends=20) == MODEL
    h.now += 3000.0
    assert {one.revision: one.sessions for one in status.revisions(h.core.state, h.now)}[""] == 0
    assert play("late", (*prompt, *range(1, 30))) == NEW


def test_trial_without_workers_gets_nothing() -> None:
    """While the revision on trial cannot serve, the one in force gets its requests; the opposite does not happen."""
    h = side_by_side(Rollout("", "v2", 1.0))
    h.post(PeerDown(21, "killed"))
    assert submitted(h, 5) == {MODEL: 5}
    h.post(PeerUp(31, of_revision(worker_hello(Role.DECODE, 31), fingerprint="revision=2")))
    h.post(PeerDown(20, "killed"))
    roll_out(h, Rollout("", "v2", 0.0))
    h.receive(1, submit("late"))
    assert pool_of(h, "late") == MODEL


def test_trial_that_is_too_small_is_passed_over() -> None:
    """A request that the revision on trial cannot hold goes to the one in force."""
    h = Harness.make()
    for role, incarnation in ((Role.PREFILL, 11), (Role.DECODE, 21)):
        small = worker_hello(role, incarnation, context_tokens=50)
        h.post(PeerUp(incarnation, of_revision(small)))
    roll_out(h, Rollout("", "v2", 1.0))
    h.receive(1, submit("short"))
    h.receive(1, submit("long", 100))
    assert (pool_of(h, "short"), pool_of(h, "long")) == (NEW, MODEL)


def test_gateways_hear_of_model_in_force() -> None:
    """Gateways know one model, served while its revision in force has workers, with that revision's limits."""
    h = side_by_side()
    roll_out(h, Rollout("v2"))
    h.post(PeerDown(20, "killed"))
    told = [one.servable_models for one in h.take(ClusterState, 1) if isinstance(one, ClusterState)]
    assert set(told) == {(MODEL,)}
    h.post(PeerDown(21, "killed"))
    assert h.cluster_states()[-1] == ((), ())


def test_revision_with_other_tokenizer_is_refused() -> None:
    """Workers of a revision with another tokenizer or configuration are refused, and told what to do."""
    h = Harness()
    first = msgspec.structs.replace(worker_hello(Role.PREFILL, 10), fingerprint="model=a;tokenizer=1;revision=x")
    h.post(PeerUp(10, first))
    for fingerprint, why in (
        ("model=a;tokenizer=2;revision=y", "tokenizer is 1"),
        ("model=b;tokenizer=1", "model is a"),
    ):
        refusal = h.core.refusal(of_revision(worker_hello(Role.PREFILL, 11), fingerprint=fingerprint)) or ""
        assert why in refusal and "--model-id" in refusal
    assert h.core.refusal(of_revision(worker_hello(Role.PREFILL, 11), fingerprint="model=a;tokenizer=1;rope=")) is None


def test_revisions_are_counted_apart() -> None:
    """Status counts what came, finished and failed in each revision since the rollout changed."""
    h = side_by_side(Rollout("", "v2", 1.0))
    for name in ("a", "b"):
        decoding(h, submit(name), 11)
    h.receive(21, Finished("a", 1, 4, 0))
    h.core.state.interrupt(h.core.cluster.requests["b"], Interrupt.DECODE_LOST, "planted")
    h.now += 60.0
    h.receive(1, submit("c"))
    old, new = status.revisions(h.core.state, h.now)
    assert (old.revision, old.offered, old.in_force, old.on_trial) == ("", 0, True, False)
    assert (new.offered, new.finished, new.failed, new.running, new.share) == (3, 1, 1, 1, 1.0)
    roll_out(h, Rollout("v2"))
    assert status.revisions(h.core.state, h.now)[1].offered == 0


# --- commands -----------------------------------------------------------------------------------------------------------------


def there(*revisions: str) -> list[RevisionStatus]:
    return [RevisionStatus(MODEL, name, 1, 1, in_force=not at) for at, name in enumerate(revisions)]


START = RolloutRequest(RolloutAction.START, revision="v2", share=0.1)


def test_rollout_starts_grows_and_ends() -> None:
    """A rollout grows by a further start, and ends with the new revision in force or the old one."""
    known = there("", "v2")
    begun = apply({}, START, known)
    grown = apply(begun, msgspec.structs.replace(START, share=0.5), known)
    assert grown == {MODEL: Rollout("", "v2", 0.5)}
    assert apply(grown, RolloutRequest(RolloutAction.PROMOTE), known) == {MODEL: Rollout("v2")}
    assert apply(grown, RolloutRequest(RolloutAction.ABORT), known) == {MODEL: Rollout("")}


@pytest.mark.parametrize(
    ("asked", "known", "why"),
    [
        (START, there(""), "needs a prefill and a decode worker"),
        (START, [*there(""), RevisionStatus(MODEL, "v2", 1, 0)], "needs a prefill and a decode worker"),
        (START, there("v2", ""), "in force already"),
        (msgspec.structs.replace(START, share=0.0), there("", "v2"), "needs a share or organisations"),
        (START, [*there("", "v2"), RevisionStatus("n", "v2", 1, 1)], "m, n; name one with --model-id"),
        (RolloutRequest(RolloutAction.PROMOTE), there("", "v2"), "no revision is on trial"),
        (RolloutRequest(RolloutAction.ABORT, MODEL), there("", "v2"), "no revision of m is on trial"),
    ],
)
def test_impossible_rollout_is_refused(asked: RolloutRequest, known: Sequence[RevisionStatus], why: str) -> None:
    """A request of crossdock rollout that cannot be met is refused with its reason."""
    with pytest.raises(RolloutError, match=why):
        apply({}, asked, known)


def test_second_trial_waits_for_first() -> None:
    """Only one revision of a model is on trial at a time."""
    with pytest.raises(RolloutError, match="promote or abort it first"):
        apply({MODEL: Rollout("", "v3", 0.1)}, START, there("", "v2", "v3"))


@pytest.mark.parametrize("durable", [True, False])
def test_rollout_survives_restart(tmp_path: Path, durable: bool) -> None:
    """A rollout is kept through a restart; a coordinator that would forget it refuses to begin one."""
    store = PolicyFile(tmp_path / "policies.json") if durable else None
    answers: list[PolicyAnswer | RolloutAnswer] = []

    async def body() -> PolicyInForce:
        keeper = PolicyKeeper(store, None, {}, lambda *_told: None)
        await keeper.start()
        serving = asyncio.create_task(keeper.serve(tuple, lambda: tuple(there("", "v2"))))
        done = asyncio.Event()
        keeper.on_request(START, lambda answer: (answers.append(answer), done.set()))
        await asyncio.wait_for(done.wait(), 10)
        serving.cancel()
        return (await PolicyKeeper(store, None, {}, lambda *_told: None).start())[1]

    in_force = asyncio.run(body())
    assert in_force.rollouts == ({MODEL: Rollout("", "v2", 0.1)} if durable else {})
    assert durable or "--usage-db or --database" in answers[0].refusal


# --- random worlds ------------------------------------------------------------------------------------------------------------


class TwoRevisions(RandomWorld):
    """Workers of two revisions that die and come back, while rollouts begin, grow, and end either way."""

    def __init__(self, seed: int) -> None:
        self.pools: dict[str, str] = {}  # where each request was first placed
        super().__init__(seed, chaos=0.1)

    def add_worker(self, role: Role) -> None:
        self.next_incarnation += 1
        hello = worker_hello(role, self.next_incarnation, kv_blocks=40, max_seqs=6, context_tokens=100)
        has = Counter(self.core.members.peers[one].revision for one in self.incarnations(role))
        if has["v2"] < has[""]:
            hello = of_revision(hello)
        self.post(PeerUp(self.next_incarnation, hello))

    def step(self) -> None:
        super().step()
        if self.random.random() < 0.02:
            one, other = self.random.choice([("", "v2"), ("v2", "")])
            roll_out(self, Rollout(one, self.random.choice([other, None]), self.random.random()))

    def react(self, incarnation: int, message: Message) -> None:
        if isinstance(message, Prefill):
            one, other = (self.core.members.peers[at] for at in (incarnation, message.decode.incarnation))
            assert one.model == other.model, "a pair crosses revisions"
            if message.attempt == 1:
                self.pools[message.request_id] = one.model
            assert self.pools.get(message.request_id, one.model) == one.model, "a stream changed its revision"
        super().react(incarnation, message)


@pytest.mark.parametrize("seed", range(5))
def test_no_pair_crosses_revisions(seed: int) -> None:
    """Whatever dies while rollouts change: pairs and requests stay within a revision, and all accepted requests end."""
    world = TwoRevisions(seed)
    for _ in range(1500):
        world.step()
    assert set(world.pools.values()) == {MODEL, NEW} and not world.protocol_violation
    world.heal()
    assert world.accepted <= world.ended.keys()
