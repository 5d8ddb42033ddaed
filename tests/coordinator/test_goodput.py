"""Goodput in overload: what cannot come in time is refused on arrival, and slow and failing workers are passed by."""

import random
from typing import Any

import pytest

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.cluster.workload import Goal, LoadRequest, LoadStepTimes, PlannedFailure, WorkerSpec, Workload
from proto.parts import Capacity
from runtime.tenancy.tenants import from_tables
from tests.helpers import first

CAPACITY = Capacity(1 << 20, 16, 4096, 1 << 20)
DECODE = WorkerSpec("decode-0", ("decode",), CAPACITY, LoadStepTimes(decode_step_s=0.002))


TARGETS = {"interactive": {"weight": 8, "tpot_ms": 30}, "batch": {"weight": 1}}


def prefill(count: int, slowed: float = 1.0, begin: int = 0) -> list[WorkerSpec]:
    times = LoadStepTimes(prefill_tokens_per_s=8192.0, prefill_step_s=0.002, factor=slowed)
    return [WorkerSpec(f"prefill-{n}", ("prefill",), CAPACITY, times) for n in range(begin, begin + count)]


def load(
    workers: list[WorkerSpec], per_s: float, *, tokens: int = 1024, deadline_ms: float = 0.0, goal_ms: float = 2000.0,
    tenants: int = 1, seed: int = 1, seconds: float = 30.0, failures: tuple[PlannedFailure, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    source, at_s, arrivals = random.Random(seed), 0.0, list[tuple[float, LoadRequest]]()
    while (at_s := at_s + source.expovariate(per_s)) < seconds:
        tenant = f"t{source.randrange(tenants)}"
        arrivals.append((at_s, LoadRequest("all", tenant, "", tokens, 2, 2, deadline_ms, Goal(goal_ms), 0)))
    workload = Workload(
        (*workers, DECODE), tuple(arrivals), duration_s=seconds, failures=failures, seed=seed,
        tenants=from_tables({"tenants": {f"t{n}": {} for n in range(tenants)}}),
    )  # fmt: skip
    found: dict[str, Any] = figures(play(workload))["all"]
    return found


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
@pytest.mark.parametrize("times", first(1, [1.5, 1.2, 3.0]))
@pytest.mark.parametrize(("workers", "tenants"), first(2, [(4, 100), (1, 1), (1, 100), (8, 1)]))
def test_overload_keeps_goodput(workers: int, tenants: int, times: float, seed: int) -> None:
    """Goodput stays at 90 % of capacity or more in overload."""
    capacity = 0.94 * 8 * workers  # a step has an overhead of 2 ms
    found = load(prefill(workers), times * 8 * workers, deadline_ms=2000.0, tenants=tenants, seed=seed)
    assert found["goodput_per_s"] >= 0.9 * capacity, found
    assert found["useful_share"] >= 0.9, found


def test_light_tenant_is_not_refused() -> None:
    """A light tenant is not refused because of a heavy tenant's backlog."""
    heavy = [(0.01 * n, LoadRequest("heavy", "heavy", "", 4096, 2, 2, 0.0, Goal(), 0)) for n in range(200)]
    light = [(5.0 + n, LoadRequest("light", "light", "", 512, 2, 2, 2000.0, Goal(2000.0), 0)) for n in range(10)]
    workload = Workload(
        (*prefill(1), DECODE),
        tuple(heavy + light),
        duration_s=60.0,
        tenants=from_tables({"tenants": {"heavy": {}, "light": {}}}),
    )
    by_stream = figures(play(workload))["traffic"]
    assert by_stream["light"]["goodput_share"] == 1.0, by_stream["light"]


@pytest.mark.parametrize("share", first(1, [0.8, 0.2]))
def test_failing_worker_is_passed_by(share: float) -> None:
    """A worker that fails at once does not get every request."""
    failures = (PlannedFailure(1.0, "prefill-3", "failing"),)
    found = load(prefill(8), share * 7 * 8, failures=failures)
    assert found["finished"] >= 0.99 * found["offered"], found
    healthy = load(prefill(7), share * 7 * 8)
    assert found["ttft_ms"]["p99"] <= 2 * healthy["ttft_ms"]["p99"], (found, healthy)


def test_failures_everywhere_spare_workers() -> None:
    """One hostile tenant whose requests fail everywhere must not shut the others out."""
    found = load(prefill(1), 2.0, failures=(PlannedFailure(1.0, "prefill-0", "failing", for_s=10.0),), goal_ms=0.0)
    assert found["finished"] >= 0.6 * found["offered"], found


@pytest.mark.parametrize("share", first(1, [0.7, 0.3]))
def test_slow_worker_costs_like_absence(share: float) -> None:
    """A slow worker raises the p99 TTFT by at most half over a pool without it."""
    per_s = share * 4 * 4
    slow = load([*prefill(3), *prefill(1, 10.0, 3)], per_s, tokens=2048, seconds=60.0)
    without = load(prefill(3), per_s, tokens=2048, seconds=60.0)
    assert slow["finished"] == slow["offered"]
    assert slow["ttft_ms"]["p99"] <= 1.5 * without["ttft_ms"]["p99"], (slow, without)


def test_slow_workers_get_fewer_prompts() -> None:
    """Slow workers get prompts in proportion to their speed."""
    workers = [*prefill(4), *prefill(4, 4.0, 4)]
    found, same = load(workers, 0.6 * 20, tokens=2048), load(prefill(5), 0.6 * 20, tokens=2048)
    assert found["ttft_ms"]["p90"] <= 2 * same["ttft_ms"]["p90"], (found, same)


def test_decode_batch_grows_after_one_stream() -> None:
    """What a step takes for each sequence is not known before two of them ran."""
    ask = LoadRequest("all", "t", "", 64, 100, 100, 0.0, Goal(2000.0, 30.0), 0)
    arrivals = [(0.0, ask), *((5.0 + 0.1 * n, ask) for n in range(200))]
    decode = WorkerSpec("decode-0", ("decode",), CAPACITY, LoadStepTimes(decode_step_s=0.015, decode_sequence_s=0.0005))
    tables = {"tenants": {"t": {}}, "priority_classes": {"standard": {"weight": 1, "tpot_ms": 30}}}
    workload = Workload((*prefill(1), decode), tuple(arrivals), duration_s=30.0, tenants=from_tables(tables))
    found = figures(play(workload))["all"]
    assert found["goodput_share"] >= 0.95, found


def test_mixed_worker_keeps_stream_target() -> None:
    """A full step of 256 tokens takes 128 ms there."""
    chat = [
        (0.5 * n, LoadRequest("chat", "t", "interactive", 64, 40, 40, 0.0, Goal(2000.0, 80.0), 0)) for n in range(50)
    ]
    work = [(0.25 * n, LoadRequest("work", "t", "batch", 1000, 1, 1, 0.0, Goal(), 0)) for n in range(100)]
    times = LoadStepTimes(
        prefill_tokens_per_s=2000.0, prefill_step_s=0.002, decode_step_s=0.01, decode_sequence_s=0.0005
    )
    mixed = WorkerSpec("mixed-0", ("prefill", "decode"), CAPACITY, times)
    tables = {"tenants": {"t": {"priority_classes": ["interactive", "batch"]}}, "priority_classes": TARGETS}
    workload = Workload((mixed,), tuple(chat + work), duration_s=30.0, tenants=from_tables(tables))
    by_stream = figures(play(workload))["traffic"]
    assert by_stream["chat"]["goodput_share"] >= 0.95, by_stream["chat"]
    assert by_stream["work"]["finished"] >= 40, by_stream["work"]


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
def test_strict_and_lax_streams_separate(seed: int) -> None:
    """Together, a batch that keeps the strict target would be all that either worker may have."""
    source, arrivals = random.Random(seed), list[tuple[float, LoadRequest]]()
    for name, per_s, target_ms in (("interactive", 4.0, 30.0), ("batch", 8.0, 0.0)):
        at_s = 0.0
        while (at_s := at_s + source.expovariate(per_s)) < 30.0:
            arrivals.append((at_s, LoadRequest(name, "t", name, 64, 100, 100, 0.0, Goal(4000.0, target_ms), 0)))
    times = LoadStepTimes(decode_step_s=0.01, decode_sequence_s=0.001)
    decode = [WorkerSpec(f"decode-{n}", ("decode",), CAPACITY, times) for n in range(2)]
    tables = {"tenants": {"t": {"priority_classes": ["interactive", "batch"]}}, "priority_classes": TARGETS}
    workload = Workload(
        (*prefill(1), *decode),
        tuple(sorted(arrivals, key=lambda a: a[0])),
        duration_s=30.0,
        tenants=from_tables(tables),
    )
    by_stream = figures(play(workload))["traffic"]
    assert by_stream["interactive"]["goodput_share"] >= 0.95, by_stream["interactive"]
    assert by_stream["batch"]["tpot_ms"]["p50"] > 30.0, "its worker has a larger batch than the strict target allows"


@pytest.mark.parametrize("seed", first(1, [4, 1, 2, 3, 5]))
def test_interactive_gets_place_in_small_batch(seed: int) -> None:
    """Nine streams keep the target, and each runs for six seconds; both kinds come at 0.75 of what is served. A few requests
    are refused in the worst moments, and all others are in time."""
    source, arrivals = random.Random(seed), list[tuple[float, LoadRequest]]()
    for name, goal in (("interactive", Goal(2000.0, 100.0)), ("batch", Goal())):
        at_s = 0.0
        while (at_s := at_s + source.expovariate(1.15)) < 100.0:
            arrivals.append((at_s, LoadRequest(name, "t", name, 128, 64, 64, 0.0, goal, 0)))
    decode = WorkerSpec("decode-0", ("decode",), CAPACITY, LoadStepTimes(decode_step_s=0.01, decode_sequence_s=0.0091))
    classes = {"interactive": {"weight": 8, "ttft_ms": 2000, "tpot_ms": 100}, "batch": {"weight": 1}}
    tables = {"tenants": {"t": {"priority_classes": ["interactive", "batch"]}}, "priority_classes": classes}
    workload = Workload(
        (*prefill(1), decode),
        tuple(sorted(arrivals, key=lambda a: a[0])),
        duration_s=100.0,
        tenants=from_tables(tables),
    )
    by_stream = figures(play(workload))["traffic"]
    interactive = by_stream["interactive"]
    assert interactive["goodput_share"] >= 0.85, interactive
    assert interactive["goodput_share"] * interactive["offered"] >= 0.98 * interactive["finished"], interactive
    assert by_stream["batch"]["decode_share"] >= 0.2 and by_stream["batch"]["finished"] == by_stream["batch"]["offered"]


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
def test_two_targets_share_no_capacity(seed: int) -> None:
    """In overload after a burst of the strict class, each class serves what one of two workers can serve alone. With strict
    streams on both workers, the lax class would have an eighth of it."""
    source, arrivals = random.Random(seed), list[tuple[float, LoadRequest]]()
    burst, rest = "burst", "strict"
    for name, tenant, target_ms, begin, end, per_s in (
        (burst, "interactive", 30.0, 0.0, 4.0, 30.0),
        (rest, "interactive", 30.0, 8.0, 30.0, 12.0),
        ("lax", "batch", 100.0, 0.0, 30.0, 18.0),
    ):
        at_s = begin
        while (at_s := at_s + source.expovariate(per_s)) < end:
            ask = LoadRequest(name, "t", tenant, 32, 60, 60, 0.0, Goal(3000.0, target_ms), 0)
            arrivals.append((at_s, ask))
    times = LoadStepTimes(decode_step_s=0.02, decode_sequence_s=0.0006)
    decode = [WorkerSpec(f"decode-{n}", ("decode",), CAPACITY, times) for n in range(2)]
    classes = {
        "interactive": {"weight": 1, "ttft_ms": 3000, "tpot_ms": 30},
        "batch": {"weight": 1, "ttft_ms": 3000, "tpot_ms": 100},
    }
    tables = {"tenants": {"t": {"priority_classes": list(classes)}}, "priority_classes": classes}
    workload = Workload(
        (*prefill(2), *decode), tuple(sorted(arrivals, key=lambda a: a[0])), duration_s=30.0,
        tenants=from_tables(tables),
    )  # fmt: skip
    by_stream = figures(play(workload))["traffic"]
    strict, lax = by_stream[rest], by_stream["lax"]
    assert strict["goodput_share"] * 12.0 >= 0.8 * 14 / 0.0285 / 60, strict
    assert lax["goodput_share"] >= 0.9, lax


@pytest.mark.parametrize("share", first(1, [0.3, 0.05, 0.6]))
def test_slow_decode_worker_gets_few_streams(share: float) -> None:
    """A decode worker that takes eight times as long for a token gets hardly a stream where others have room."""
    source, at_s, arrivals = random.Random(1), 0.0, list[tuple[float, LoadRequest]]()
    while (at_s := at_s + source.expovariate(share * 4 * 16 / 1.0)) < 20.0:
        stream = "before" if at_s < 6.0 else "after"
        arrivals.append((at_s, LoadRequest(stream, "t", "", 64, 50, 50, 0.0, Goal(2000.0, 40.0), 0)))
    capacity = Capacity(1 << 16, 16, 16, 1 << 16)
    decode = [WorkerSpec(f"decode-{n}", ("decode",), capacity, LoadStepTimes(decode_step_s=0.02)) for n in range(4)]
    workload = Workload(
        (*prefill(2), *decode), tuple(arrivals), duration_s=20.0, tenants=from_tables({"tenants": {"t": {}}}),
        failures=(PlannedFailure(4.0, "decode-0", "slow", factor=8.0),),
    )  # fmt: skip
    found = figures(play(workload))["traffic"]["after"]
    assert found["goodput_share"] >= 0.97, found


def test_mixed_worker_spares_streams() -> None:
    """Streams without a target on a mixed worker wait for prompts for half of a step at most. A full step of 256 tokens takes
    32 ms there."""
    chat = [(0.2 * n, LoadRequest("chat", "t", "", 64, 60, 60, 0.0, Goal(0.0, 16.0), 0)) for n in range(70)]
    work = [(0.4 * n, LoadRequest("work", "t", "", 2000, 1, 1, 0.0, Goal(), 0)) for n in range(35)]
    times = LoadStepTimes(prefill_tokens_per_s=8192.0, prefill_step_s=0.001, decode_step_s=0.01)
    mixed = WorkerSpec("mixed-0", ("prefill", "decode"), CAPACITY, times)
    workload = Workload(
        (mixed,), tuple(sorted(chat + work, key=lambda a: a[0])), duration_s=20.0,
        tenants=from_tables({"tenants": {"t": {}}}),
    )  # fmt: skip
    by_stream = figures(play(workload))["traffic"]
    assert by_stream["chat"]["goodput_share"] >= 0.95, by_stream["chat"]
    assert by_stream["work"]["finished"] == 35, by_stream["work"]
