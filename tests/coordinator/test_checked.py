"""A message is checked before anything changes: what peers may not say, and what becomes of a bug in a check."""

from dataclasses import replace

import msgspec
import pytest

from coordinator.core import HANDLERS, Core
from coordinator.events import Configured, PeerDown, PeerUp, ProtocolViolation, Received, Send, Tick
from coordinator.recovery.processes import EMPTY_POOL_S_MAX
from coordinator.reporting.status import COUNTER_MAX
from proto.codec import decode, to_frames
from proto.errors import CancelReason
from proto.limits import MAX_MODELS
from proto.messages import (
    Cancel,
    ClusterState,
    Finished,
    HandedOver,
    Hello,
    Rejected,
    Released,
    Role,
    StatusRequest,
    StepDone,
    Submit,
)
from proto.progress import DecodeProgress
from proto.sampling import Sampling
from runtime.tenancy.tenants import open_tenants
from scheduler.lifecycle import RequestState
from tests.coordinator.world import Harness, submit, worker_hello


def two_models(kv_overcommit: float = 1.0) -> Harness:
    """One pair of workers for each of two models, 10 and 20, 12 and 22."""
    h = Harness.make(1, 1)
    h.core.accounts.limits = replace(h.core.limits, kv_overcommit=kv_overcommit)
    for role, incarnation in ((Role.PREFILL, 12), (Role.DECODE, 22)):
        h.post(PeerUp(incarnation, msgspec.structs.replace(worker_hello(role, incarnation), model="other")))
    return h


def claimed(h: Harness) -> Submit:
    """A request whose prefill worker was lost: it has its room on the decode worker, and may come again."""
    first = submit("a", 8, max_tokens=20)
    h.receive(1, first)
    h.post(PeerDown(10, "lost"))
    h.receive(20, Released("a", 1))
    return msgspec.structs.replace(first, attempt=2)


def violations(h: Harness, incarnation: int, message: object, blob: bytes | None = None) -> list[str]:
    actions = h.receive(incarnation, message) if blob is None else h.post(Received(incarnation, message, blob))  # type: ignore[arg-type]
    return [action.reason for action in actions if isinstance(action, ProtocolViolation)]


CHANGES = {
    "model": {"model": "other"},
    "tenant": {"tenant": "b"},
    "priority_class": {"priority_class": "batch"},
    "priority": {"priority": 5},
    "choices": {"choices": 2},
    "first_choice": {"first_choice": 1},
    "sampling": {"sampling": Sampling(max_tokens=21)},
    "the prompt": {"prompt_tokens": 9},
    "deadline_ms": {"deadline_ms": 5.0},
}


@pytest.mark.parametrize("field", CHANGES)
def test_retry_may_not_change_request(field: str) -> None:
    """The next attempt of a request may not change its model, tenant, sampling or other fixed fields."""
    h = two_models()
    again = claimed(h)
    (why,) = violations(h, 1, msgspec.structs.replace(again, **CHANGES[field]))  # type: ignore[arg-type]
    assert field in why and h.core.cluster.requests["a"].attempt == 1
    assert violations(h, 1, again) == [] and h.core.cluster.requests["a"].attempt == 2


def test_resume_changes_are_allowed() -> None:
    """A resume may change prompt length, prompt logprobs and hashes, but not take back sent tokens."""
    h = two_models()
    again = claimed(h)
    sampling = msgspec.structs.replace(again.sampling, prompt_logprobs=-1)
    resumed = msgspec.structs.replace(
        again, prompt_tokens=11, resumed_tokens=3, sampling=sampling, block_hashes=b"a" * 16, hash_block_size=4
    )
    assert violations(h, 1, resumed) == []
    lost = msgspec.structs.replace(resumed, attempt=3, prompt_tokens=10, resumed_tokens=2)
    assert violations(h, 1, lost), "tokens that were sent are not unsent"


def test_other_model_leaves_no_claim() -> None:
    """The two ways in which the coordinator ended."""
    h = two_models()
    again = msgspec.structs.replace(claimed(h), model="other")
    assert violations(h, 1, again)
    h.post(PeerDown(20, "restarted"))
    h.post(PeerUp(13, worker_hello(Role.PREFILL, 13)))
    h.post(PeerUp(23, worker_hello(Role.DECODE, 23)))
    h.receive(1, submit("b", 8))
    h = two_models(kv_overcommit=2.0)
    assert violations(h, 1, msgspec.structs.replace(claimed(h), model="other"))
    h.receive(1, Cancel("a", 2, CancelReason.DISCONNECTED))
    h.receive(20, DecodeProgress(1, 0, 5))


def test_early_release_drops_worker() -> None:
    """A worker that lets go of a running request commits a protocol violation."""
    h = Harness.make(1, 1)
    h.receive(1, submit("a", 8))
    assert violations(h, 10, Released("a", 1))
    (step,) = h.core.cluster.workers[10].steps.values()
    h.receive(10, StepDone(0, step[0].chunks, 1.0, 8))
    h.receive(10, HandedOver("a", 1, 9, 1.0))
    assert h.core.cluster.requests["a"].state is RequestState.DECODING
    assert violations(h, 20, Released("a", 1)) and h.core.cluster.requests["a"].state is RequestState.DECODING


def test_hand_over_after_release_interrupts() -> None:
    """A request handed over to a decode worker that has let go of it is interrupted."""
    h = Harness.make(1, 1)
    h.receive(1, submit("a", 8))
    (step,) = h.core.cluster.workers[10].steps.values()
    h.receive(10, StepDone(0, step[0].chunks, 1.0, 8))
    h.receive(20, Released("a", 1))
    h.receive(10, HandedOver("a", 1, 9, 1.0))
    assert h.core.cluster.requests["a"].state is RequestState.INTERRUPTED


def test_bug_in_check_ends_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a message check ends the link and changes no state."""
    h = Harness.make(1, 1)

    def fails(*_: object) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(HANDLERS, Submit, HANDLERS[Submit]._replace(check=fails))
    before = dict(h.core.cluster.requests), list(h.core.cluster.workers[10].steps)
    (action,) = h.core.handle(Received(1, submit("a"), bytes(40)), h.now)
    assert isinstance(action, ProtocolViolation) and action.incarnation == 1
    assert "planted" in action.traceback and "fails" in action.traceback
    assert (dict(h.core.cluster.requests), list(h.core.cluster.workers[10].steps)) == before
    monkeypatch.undo()
    assert violations(h, 1, submit("a")) == [] and "a" in h.core.cluster.requests


def test_bug_after_check_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state may be half changed: the process is to end."""
    h = Harness.make(1, 1)

    def fails(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(HANDLERS, Submit, HANDLERS[Submit]._replace(apply=fails))
    with pytest.raises(ZeroDivisionError):
        h.core.handle(Received(1, submit("a"), bytes(40)), h.now)


# --- models -----------------------------------------------------------------------------------------------------------


def hello_of(number: int, role: Role, incarnation: int) -> Hello:
    return msgspec.structs.replace(worker_hello(role, incarnation), model=f"m{number}")


def test_65th_model_is_refused() -> None:
    """The 65th model is refused, and the cluster state with 64 models can be decoded."""
    h = Harness.make(0, 0)
    for number in range(MAX_MODELS):
        for offset, role in enumerate((Role.PREFILL, Role.DECODE)):
            hello = hello_of(number, role, 1_000 + 2 * number + offset)
            assert h.core.refusal(hello) is None
            for action in h.post(PeerUp(hello.incarnation, hello)):
                if isinstance(action, Send):
                    decode(to_frames(action.message))
    assert "64 models" in (h.core.refusal(hello_of(64, Role.PREFILL, 5_000)) or "")
    assert h.core.refusal(hello_of(3, Role.PREFILL, 5_000)) is None, "one that is known"
    told = [send.message for send in h.sent if isinstance(send.message, ClusterState)]
    assert len(told[-1].servable_models) == MAX_MODELS


def test_empty_model_is_forgotten() -> None:
    """A model without workers is forgotten after an hour."""
    h = Harness.make(1, 1)
    names = []
    for number in range(200):
        hello = hello_of(number, Role.PREFILL, 1_000 + number)
        if h.core.refusal(hello) is None:
            h.post(PeerUp(hello.incarnation, hello))
            h.post(PeerDown(hello.incarnation, "gone"))
            names.append(hello.model)
    assert len(names) == MAX_MODELS - 1 and len(h.core.cluster.pools) == MAX_MODELS
    assert h.core.next_deadline() == h.now + EMPTY_POOL_S_MAX
    h.now += EMPTY_POOL_S_MAX
    h.post(Tick())
    assert len(h.core.cluster.pools) == len(h.core.cluster.queues) == 1, "the one with workers stays"
    assert not h.core.members.empty_pools


def test_awaited_model_is_kept() -> None:
    """A model without workers is kept while a request waits for it."""
    h = Harness.make(1, 1)
    h.receive(1, submit("a", 8))
    for incarnation in (20, 10):
        h.post(PeerDown(incarnation, "lost"))
    (model,) = h.core.members.empty_pools
    h.core.members.empty_pools[model] = h.now - EMPTY_POOL_S_MAX
    h.post(Tick())
    assert list(h.core.cluster.pools) == [model] and h.core.members.empty_pools == {model: h.now}


# --- counts -----------------------------------------------------------------------------------------------------------


def test_lying_worker_leaves_readable_report() -> None:
    """Extreme figures from a worker leave a status report that can be decoded."""
    h = Harness.make(1, 1)
    h.receive(1, submit("a", 8))
    (step,) = h.core.cluster.workers[10].steps.values()
    most = (1 << 40) - 1
    h.receive(10, StepDone(0, step[0].chunks, 1e12, most))
    h.receive(10, HandedOver("a", 1, most, 1e12))
    h.receive(20, Finished("a", 1, most, most, 1 << 20))
    h.core.cluster.counters["kv_bytes_moved"] = COUNTER_MAX + 5
    h.post(PeerUp(5, msgspec.structs.replace(worker_hello(Role.PREFILL, 5), role=Role.OBSERVER)))
    for action in h.receive(5, StatusRequest()):
        if isinstance(action, Send):
            decode(to_frames(action.message))


def test_rejection_of_long_name_fits() -> None:
    """A rejection that names a model of 512 characters fits its message."""
    core = Core()
    core.handle(Configured(open_tenants(), 0.0), 0.0)
    core.handle(PeerUp(1, Hello(10, Role.GATEWAY, 1, "g")), 0.0)
    long = msgspec.structs.replace(submit("a"), model="\0" * 512)
    (rejected,) = [a.message for a in core.handle(Received(1, long, bytes(40)), 0.0) if isinstance(a, Send)]
    assert isinstance(decode(to_frames(rejected))[0], Rejected)
