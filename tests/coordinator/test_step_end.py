"""Why a prefill step has no more tokens, and a decode batch no more sequences; errors of estimates; the oldest waits."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from coordinator.core import Core
from coordinator.events import Limits, PeerUp
from coordinator.reporting.metrics import CoordinatorMetrics
from proto.limits import MAX_CHUNKS_PER_STEP
from proto.messages import CacheEvents, Finished, HandedOver, Role, Step, StepDone
from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES, PriorityClass
from scheduler.decisions import StepEnd
from scheduler.placement.steps import decode_limits
from scheduler.request import Suspicion
from scheduler.waiting.rates import Ratios
from tests.coordinator.test_cache import hashes
from tests.coordinator.world import MODEL, Harness, gateway_hello, named, submit, worker_hello

LARGE: Mapping[str, int] = {"kv_blocks": 4096, "max_seqs": 512}
SMALL = Limits(step_tokens=16, steps_in_flight=1)


def scene(limits: Limits = SMALL, prefill: Mapping[str, int] = LARGE, decode: Mapping[str, int] = LARGE) -> Harness:
    """A prefill worker, 10, that is busy with a step of `busy`; what comes next waits for its end."""
    s = Harness(Core(limits))
    s.post(PeerUp(1, gateway_hello(1)))
    s.post(PeerUp(10, worker_hello(Role.PREFILL, 10, **prefill)))  # type: ignore[arg-type]
    s.post(PeerUp(20, worker_hello(Role.DECODE, 20, **decode)))  # type: ignore[arg-type]
    s.receive(1, submit("busy", s.core.limits.step_tokens, max_tokens=1))
    s.core.cluster.pools[MODEL].step_ends.clear()
    return s


def done(s: Harness, number: int = 0) -> None:
    """Its step `number` is computed."""
    s.now += 0.1
    step, _ = s.core.cluster.workers[10].steps[number]
    s.receive(10, StepDone(number, step.chunks, 1.0, 0))


def ends(s: Harness) -> dict[str, int]:
    return dict(s.core.cluster.pools[MODEL].step_ends)


def test_step_ends_full_or_nothing_waits() -> None:
    """A step ends because it is full, or because nothing waits."""
    s = scene()
    s.receive(1, submit("a", 20))
    done(s)
    assert ends(s) == {StepEnd.FULL: 1}
    done(s, 1)
    assert ends(s) == {StepEnd.FULL: 1, StepEnd.NOTHING_WAITS: 1}


@pytest.mark.parametrize(
    ("limits", "prefill", "decode", "choices", "end"),
    [
        (SMALL, LARGE, {**LARGE, "max_seqs": 2}, 1, StepEnd.NO_DECODE_SEQUENCES),
        (SMALL, LARGE, {**LARGE, "max_seqs": 6}, 3, StepEnd.NO_DECODE_SEQUENCES),
        (SMALL, LARGE, {**LARGE, "kv_blocks": 7}, 1, StepEnd.NO_DECODE_KV),
        (SMALL, {**LARGE, "max_seqs": 2}, LARGE, 1, StepEnd.NO_ROOM_IN_PREFILL),
        (SMALL, {**LARGE, "kv_blocks": 5}, LARGE, 1, StepEnd.NO_ROOM_IN_PREFILL),
    ],
)
def test_step_ends_where_room_runs_out(
    limits: Limits, prefill: dict[str, int], decode: dict[str, int], choices: int, end: StepEnd
) -> None:
    """A step has only the first of two requests if the second finds no room, and the limit is named."""
    s = scene(limits, prefill, decode)
    for name in ("a", "b"):
        s.receive(1, submit(name, 4, choices=choices))
    done(s)
    [step] = [step for step in s.take(Step) if isinstance(step, Step) and step.step_id == 1]
    assert [chunk.request_id for chunk in step.chunks] == ["a"] and ends(s) == {end: 1}


def test_step_ends_at_tpot_target() -> None:
    """On a worker that has not been measured, a target allows eight sequences."""
    targets = {**DEFAULT_PRIORITY_CLASSES, "standard": PriorityClass(4.0, tpot_ms=30.0)}
    s = scene(Limits(step_tokens=64, steps_in_flight=1, priority_classes=targets))
    for number in range(9):
        s.receive(1, submit(f"r{number}", 4))
    done(s)
    assert ends(s) == {StepEnd.TPOT_TARGET: 1}
    assert decode_limits(s.core.cluster.pools[MODEL], s.core.cluster.queues[MODEL]) == {StepEnd.TPOT_TARGET: 1}


def test_step_ends_at_chunk_limit() -> None:
    """A step ends at the number of chunks that a message may have."""
    s = scene(Limits(step_tokens=4096, steps_in_flight=1))
    for number in range(MAX_CHUNKS_PER_STEP + 1):
        s.receive(1, submit(f"r{number}", 4, max_tokens=1))
    done(s)
    assert ends(s) == {StepEnd.MAX_CHUNKS: 1}


def test_suspect_step_is_counted_as_own() -> None:
    """A suspect runs in a step of its own, and both steps end for this reason."""
    s = scene()
    s.receive(1, submit("a", 4))
    s.receive(1, submit("suspect", 4))
    suspect = s.core.cluster.requests["suspect"]
    suspect.suspicion = Suspicion(1, 4)
    s.core.cluster.pools[MODEL].suspects["suspect"] = suspect
    done(s)
    assert ends(s) == {StepEnd.OWN_STEP: 1}, "nothing is put before it meanwhile"
    done(s, 1)
    assert ends(s) == {StepEnd.OWN_STEP: 2}


def test_draining_worker_step_ends_closed() -> None:
    """A draining worker finishes its own prompt, and its step ends because it is closed to others."""
    s = scene()
    s.receive(1, submit("long", 20))
    done(s)
    s.receive(1, submit("waits", 4))
    s.core.cluster.workers[10].draining = True
    s.core.cluster.draining[10] = s.core.cluster.workers[10]
    s.core.cluster.pools[MODEL].step_ends.clear()
    done(s, 1)
    assert ends(s) == {StepEnd.WORKER_CLOSED: 1}


@pytest.mark.parametrize(("moves_max", "end"), [(3, StepEnd.BOUND_ELSEWHERE), (2, StepEnd.GAVE_UP)])
def test_step_ends_if_requests_wait_elsewhere(moves_max: int, end: StepEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends because requests are bound to another worker that has their KV cached, or after too many moves."""
    monkeypatch.setattr("scheduler.placement.steps.MOVES_PER_TURN_MAX", moves_max)
    s = Harness.make(2, limits=SMALL, **LARGE)  # type: ignore[arg-type]
    s.receive(10, CacheEvents(hashes(200), b""))
    s.receive(1, named(submit("busy", 816), 1))
    s.receive(1, submit("other", 16))
    for number in range(3):
        s.receive(1, named(submit(f"r{number}", 816), 1))
    s.core.cluster.pools[MODEL].step_ends.clear()
    s.receive(1, msgspec.structs.replace(submit("own", 4), deadline_ms=500.0))
    s.now += 0.1
    step, _ = s.core.cluster.workers[11].steps[0]
    s.receive(11, StepDone(0, step.chunks, 1.0, 0))
    assert ends(s) == {end: 1}


def test_decode_limits_name_their_reason() -> None:
    """The decode limit is no waiting request, no free sequence, or a full batch."""
    s = scene(decode={**LARGE, "max_seqs": 2})
    pool, queue = s.core.cluster.pools[MODEL], s.core.cluster.queues[MODEL]
    assert decode_limits(pool, queue) == {StepEnd.NOTHING_WAITS: 1}
    s.receive(1, submit("two", 4, choices=2))
    done(s)
    assert decode_limits(pool, queue) == {StepEnd.NO_DECODE_SEQUENCES: 1}
    s.receive(1, submit("one", 4))
    assert decode_limits(pool, queue) == {StepEnd.FULL: 1}


# --- estimates and waits ------------------------------------------------------------------------------------------------


def value(s: Harness, name: str, **labels: Any) -> float | None:
    registry = CoordinatorMetrics(s.core.state, lambda: s.now).registry
    return registry.get_sample_value(f"crossdock_coordinator_{name}", {"model": MODEL, **labels})


def test_metrics_use_step_end_names() -> None:
    """The metrics label steps and decode batches with the names of the step ends."""
    s = scene()
    s.receive(1, submit("a", 20))
    done(s)
    assert value(s, "prefill_steps_total", limit="full") == 1
    assert value(s, "decode_batches", limit="nothing_waits") == 1


def test_output_ratio_counts_longer_answer() -> None:
    """A tenant of which nothing is known is expected to have answers of 128 tokens."""
    s = Harness.make(limits=SMALL, **LARGE)  # type: ignore[arg-type]
    s.receive(1, submit("a", 8, max_tokens=1000))
    done(s)
    s.receive(10, HandedOver("a", 1, 100, 3.0))
    s.receive(20, Finished("a", 1, 256, 0))
    labels = {"priority_class": "standard"}
    assert value(s, "output_estimate_ratio_sum", **labels) == 2.0
    assert value(s, "output_estimate_ratio_bucket", le="2.0", **labels) == 1
    assert value(s, "output_estimate_ratio_bucket", le="1.33", **labels) == 0
    assert value(s, "output_estimate_ratio_count", **labels) == 1


def test_wait_ratio_compares_with_projection() -> None:
    """A wait is recorded as its ratio to the projected wait, and a short wait is not."""
    s = scene(decode={**LARGE, "max_seqs": 1})
    s.receive(1, submit("a", 4))
    s.core.cluster.requests["a"].projected_s = 0.5
    done(s)
    s.receive(10, HandedOver("busy", 1, 100, 3.0))
    s.now = 2.0
    s.receive(20, Finished("busy", 1, 1, 0))
    assert value(s, "wait_projection_ratio_sum", priority_class="standard") == pytest.approx(4.0)
    assert value(s, "wait_projection_ratio_count", priority_class="standard") == 1, "a short wait is no error"


def test_ratios_continue_after_absence() -> None:
    s = scene()
    ratios = s.core.cluster.queues[MODEL].output_ratios["standard"] = Ratios()
    ratios.add(0.2)
    metrics = CoordinatorMetrics(s.core.state, lambda: 0.0)
    other = scene()
    metrics.registry.carry_over()
    metrics._core = other.core.state
    other.core.cluster.queues[MODEL].output_ratios["standard"] = Ratios()
    other.core.cluster.queues[MODEL].output_ratios["standard"].add(20.0)
    name, labels = "crossdock_coordinator_output_estimate_ratio", {"model": MODEL, "priority_class": "standard"}
    assert metrics.registry.get_sample_value(f"{name}_bucket", {**labels, "le": "10.0"}) == 1
    assert metrics.registry.get_sample_value(f"{name}_count", labels) == 2
    assert metrics.registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(20.2)


def test_oldest_wait_is_current_longest() -> None:
    """The oldest wait is that of the request that waits longest now, per priority class."""
    s = scene(decode={**LARGE, "max_seqs": 1})
    for name in ("first", "second"):
        s.now += 1.0
        s.receive(1, submit(name, 4))
    s.now = 5.0
    assert value(s, "oldest_wait_seconds", priority_class="standard") == 4.0
    assert value(s, "oldest_wait_seconds", priority_class="batch") == 0.0
    done(s)
    s.receive(10, HandedOver("busy", 1, 100, 3.0))
    s.receive(20, Finished("busy", 1, 1, 0))
    assert not s.core.cluster.requests["first"].waits
    assert value(s, "oldest_wait_seconds", priority_class="standard") == pytest.approx(s.now - 2.0)
