"""Loads on the virtual cluster: requests of every kind end and are counted once, whatever happens to workers."""

import random
from dataclasses import replace
from typing import Any, Literal

import pytest

from lab.cluster import run
from lab.cluster.figures import figures, percentiles
from lab.cluster.run import Played, TooManyRequests, play
from lab.cluster.workload import (
    FailureKind,
    Goal,
    LoadRequest,
    LoadStepTimes,
    Loop,
    PlannedFailure,
    WorkerSpec,
    Workload,
)
from proto.parts import Capacity
from runtime.tenancy.tenants import from_tables
from scheduler.lifecycle import RequestState
from tests.helpers import first

CAPACITY = Capacity(4096, 16, 64, 1 << 20)
TIMES = LoadStepTimes(prefill_step_s=0.002, decode_step_s=0.02)


def workers(*names: str) -> tuple[WorkerSpec, ...]:
    return tuple(WorkerSpec(name, _roles(name), CAPACITY, TIMES) for name in names)


def _roles(name: str) -> tuple[Literal["prefill", "decode"], ...]:
    match name.partition("-")[0]:
        case "prefill":
            return ("prefill",)
        case "decode":
            return ("decode",)
        case _:
            return ("prefill", "decode")


PAIR = workers("prefill-0", "decode-0")
TWO_PAIRS = workers("prefill-0", "prefill-1", "decode-0", "decode-1")


def ask(prompt_tokens: int = 512, output_tokens: int = 16, **more: Any) -> LoadRequest:
    kept = {"stream": "s", "tenant": "t", "priority_class": "standard", "max_tokens": output_tokens, "deadline_ms": 0.0}
    return LoadRequest(
        **{**kept, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "goal": Goal(), "retries": 0, **more}
    )


def every(gap_s: float, what: LoadRequest, until_s: float) -> tuple[tuple[float, LoadRequest], ...]:
    return tuple((gap_s * n, what) for n in range(round(until_s / gap_s)))


def found(workload: Workload) -> dict[str, Any]:
    one: dict[str, Any] = figures(play(workload))["all"]
    return one


KINDS: tuple[FailureKind, ...] = ("slow", "failing", "lost", "drained")


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_outlive_worker_failures(kind: FailureKind, worker: str) -> None:
    """Every request finishes though one of several workers fails for a time."""
    arrivals = every(0.25, ask(), 20.0)
    healthy = found(Workload(TWO_PAIRS, arrivals, duration_s=20.0))
    hurt = found(
        Workload(TWO_PAIRS, arrivals, failures=(PlannedFailure(5.0, worker, kind, for_s=5.0),), duration_s=20.0)
    )
    assert hurt["finished"] == hurt["offered"] == 80
    assert hurt != healthy, "nothing has happened"


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_worker_fails_and_recovers(kind: FailureKind) -> None:
    """A failed mixed worker loses both roles and comes back with both."""
    arrivals = every(0.5, ask(), 20.0)
    two = workers("mixed-0", "mixed-1")
    hurt = found(Workload(two, arrivals, failures=(PlannedFailure(5.0, "mixed-0", kind, for_s=5.0),), duration_s=20.0))
    assert hurt["finished"] == hurt["offered"]
    alone = Workload(
        workers("mixed-0"), arrivals, failures=(PlannedFailure(5.0, "mixed-0", kind, for_s=2.0),), duration_s=20.0
    )
    assert found(alone)["finished"] >= 0.5 * 40


def test_flipped_worker_serves_its_new_role() -> None:
    """A worker that changes its role for a time has the speed of its new role, and changes back; all requests finish."""
    slow = replace(PAIR[0], times=replace(TIMES, factor=4.0))
    cluster = (slow, *workers("decode-0", "decode-1"))
    arrivals = every(0.5, ask(2048, 64, priority_class="batch"), 60.0)  # without a target that refuses any
    flip = PlannedFailure(5.0, "decode-0", "flipped", role="prefill", for_s=40.0)
    everything = figures(play(Workload(cluster, arrivals, failures=(flip,), duration_s=60.0)))
    assert everything["role_changes"] == 2 and everything["all"]["finished"] == 120
    assert everything["workers"]["decode-0"]["part_of_streams_by_window"][1] == 0
    alone = figures(play(Workload(cluster, arrivals, duration_s=60.0)))
    assert everything["all"]["ttft_ms"]["p50"] < 0.5 * alone["all"]["ttft_ms"]["p50"] and not alone["role_changes"]


def test_lost_worker_leaves_requests_unserved() -> None:
    """Requests stay unserved if the only prefill worker never comes back."""
    workload = Workload(
        PAIR,
        every(1.0, ask(), 20.0),
        failures=(PlannedFailure(9.9, "prefill-0", "lost"),),
        duration_s=20.0,
        settle_s=5.0,
    )
    played = play(workload)
    assert [one.state for one in played.outcomes[:9]] == [RequestState.FINISHED] * 9
    assert all(one.state is None for one in played.outcomes[11:])
    assert figures(played)["all"]["ended_otherwise"] == {"unfinished": 10}


def test_lost_worker_ignores_further_failures() -> None:
    """Further failures of a worker that is lost do nothing."""
    many = [PlannedFailure(1.0 + n, "prefill-0", kind, for_s=for_s) for n, (kind, for_s) in enumerate(  # type: ignore[arg-type]
        [("lost", 0.0), ("lost", 0.0), ("failing", 2.0), ("drained", 0.0), ("slow", 1.0), ("lost", 1.0), ("lost", 3.0)]
    )]  # fmt: skip
    one = found(Workload(TWO_PAIRS, every(0.25, ask(), 20.0), failures=tuple(many), duration_s=20.0))
    assert one["finished"] == one["offered"]


def test_slow_worker_follows_its_factor() -> None:
    """A slow worker's prefill takes longer by the given factor."""

    def ttft_ms(factor: float) -> float:
        failures = (PlannedFailure(0.0, "prefill-0", "slow", factor),)
        one = found(Workload(PAIR, ((1.0, ask(8192)),), failures=failures, duration_s=2.0))
        return float(one["ttft_ms"]["p50"])

    assert ttft_ms(10.0) == pytest.approx(10 * ttft_ms(1.0), rel=0.05)


def test_mixed_worker_shares_time_and_blocks() -> None:
    """A mixed worker's two roles share its time and its blocks."""
    long, short = ask(prompt_tokens=12_000, output_tokens=4), ask(output_tokens=200)
    arrivals = ((0.0, short), (1.0, long))
    mixed = play(Workload(workers("mixed-0"), arrivals, duration_s=5.0))
    split = play(Workload(PAIR, arrivals, duration_s=5.0))
    assert (mixed.outcomes[0].tpot_s or 0) > 1.3 * (split.outcomes[0].tpot_s or 0)
    # A quarter of the blocks is for prompts.
    too_long = play(Workload(workers("mixed-0"), ((0.0, ask(prompt_tokens=4096 * 16 // 3)),), duration_s=5.0))
    assert too_long.outcomes[0].state is RequestState.REJECTED


def test_closed_loop_waits_for_answers() -> None:
    """Clients in a closed loop send their next request when they have an answer."""
    loops = tuple(Loop((ask(),), think_s=1.0, from_s=0.0, until_s=30.0) for _ in range(3))
    one = found(Workload(PAIR, (), loops, duration_s=30.0))
    took_s = 1.0 + one["ttft_ms"]["p50"] / 1000 + 15 * 0.02
    assert one["finished"] == one["offered"] == pytest.approx(3 * 30 / took_s, rel=0.1)


def test_refused_client_does_not_spin() -> None:
    """A client that is refused at once waits before it asks again."""
    hopeless = ask(prompt_tokens=CAPACITY.kv_blocks * 16 * 2)
    one = found(Workload(PAIR, (), (Loop((hopeless,), 0.0, 0.0, 20.0),), duration_s=20.0))
    assert one["offered"] == 20 and list(one["rejected"].values()) == [20]


def test_rejected_clients_retry_when_told() -> None:
    """Rejected clients with retries come again when they were told to, and more of them finish."""
    load = every(0.02, ask(deadline_ms=1500.0, retries=50, goal=Goal()), 10.0)
    again = found(Workload(PAIR, load, duration_s=10.0, settle_s=300.0))
    once = found(Workload(PAIR, every(0.02, ask(deadline_ms=1500.0), 10.0), duration_s=10.0, settle_s=300.0))
    assert again["rejections_per_request"] > once["rejections_per_request"] > 0.1
    assert again["finished"] > 1.5 * once["finished"]
    assert sum(again["ended_otherwise"].values()) + again["finished"] == again["offered"]


def test_run_waits_for_retrying_clients() -> None:
    """Even where nothing else is left to do."""
    tenants = from_tables({"tenants": {"t": {"limits": {"requests_per_min": 1}}}})
    played = play(Workload(PAIR, every(0.1, ask(retries=5), 0.2), duration_s=0.3, settle_s=600.0, tenants=tenants))
    early, late = played.outcomes
    assert early.rejections == 0 and late.rejections == 1 and late.state is RequestState.FINISHED
    assert late.ttft_s is not None and late.ttft_s > 30.0


def test_too_many_requests_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than the bound end the run with an error."""
    monkeypatch.setattr(run, "REQUESTS_MAX", 50)
    loops = tuple(Loop((ask(1, 1),), think_s=0.0, from_s=0.0, until_s=100.0) for _ in range(3))
    with pytest.raises(TooManyRequests, match=r"clients have sent 50 requests by second 0\.\d"):
        play(Workload(PAIR, (), loops, duration_s=100.0))


def test_figures_are_per_tenant_and_class() -> None:
    """Figures are given for each tenant and priority class, and for each stream of traffic."""
    good, late = Goal(1000.0), Goal(1e-3)
    arrivals = [(0.5 * n, ask(tenant="a", stream="x", goal=good)) for n in range(20)]
    arrivals += [(0.5 * n, ask(1024, 64, tenant="b", stream="y", goal=late)) for n in range(20)]
    arrivals += [(0.5 * n, ask(tenant="b", stream="y", priority_class="batch", goal=good)) for n in range(20)]
    everything = figures(play(Workload(PAIR, tuple(sorted(arrivals, key=lambda one: one[0])), duration_s=10.0)))
    a, batch, b = everything["tenants"]
    assert [(one["tenant"], one["priority_class"]) for one in (a, batch, b)] == [
        ("a", "standard"),
        ("b", "batch"),
        ("b", "standard"),
    ]
    assert everything["traffic"].keys() == {"x", "y"} and everything["traffic"]["x"]["offered"] == 20
    assert [one["prefill_share"] for one in (a, batch, b)] == [0.25, 0.25, 0.5]
    assert b["decode_share"] > 2 * a["decode_share"] > 0
    assert sum(one["decode_share"] for one in (a, batch, b)) == pytest.approx(1.0)
    assert (a["useful_share"], b["useful_share"], everything["all"]["useful_share"]) == (1.0, 0.0, 0.5)
    assert (a["goodput_per_s"], a["goodput_share"], b["goodput_share"]) == (2.0, 1.0, 0.0)
    assert percentiles([]) is None and percentiles([3.0, 1.0, 2.0]) == {
        "p50": 2.0, "p90": 3.0, "p95": 3.0, "p99": 3.0,
    }  # fmt: skip


def outcomes(played: Played) -> list[tuple[Any, ...]]:
    return [
        (one.came_s, one.state, one.ttft_s, one.tpot_s, one.rejections, one.interruptions) for one in played.outcomes
    ]


def test_every_nth_step_fails() -> None:
    """Prompts of several steps lose some of them, and all finish in the end."""
    failures = (PlannedFailure(0.0, "prefill-0", "failing", every=5),)
    one = found(Workload(TWO_PAIRS, every(0.2, ask(2048), 10), failures=failures))
    assert one["finished"] == one["offered"] and 0 < one["interruptions"] < one["offered"]


@pytest.mark.parametrize("deadly_at", [0, 8])
def test_deadly_request_ends_its_workers(deadly_at: int) -> None:
    """A deadly request ends at most two workers, or three if its answer had begun. They come back, and only it fails."""
    deadly = ((5.0, ask(stream="deadly", deadly_at=deadly_at)),)
    arrivals = sorted((*every(0.5, ask(), 20), *deadly), key=lambda entry: entry[0])
    everything = figures(play(Workload(TWO_PAIRS, tuple(arrivals), duration_s=30.0)))
    assert 1 <= everything["workers_ended"] <= (3 if deadly_at else 2)
    assert everything["traffic"]["s"]["finished"] == 40 and everything["traffic"]["deadly"]["finished"] == 0


def drawn(seed: int) -> Workload:
    """A small workload of everything, at random."""
    source = random.Random(seed)
    names = [
        f"{role}-{n}"
        for role, most in (("prefill", 2), ("decode", 2), ("mixed", 1))
        for n in range(source.randint(0, most))
    ]
    names += ["prefill-9", "decode-9"]
    failures = tuple(_failure(source, source.choice(names)) for _ in range(source.randint(0, 5)))

    def one() -> LoadRequest:
        prompt_tokens = source.choice([1, 300, 5000])
        return ask(
            prompt_tokens, source.choice([1, 20, 300]), tenant=source.choice("ab"), max_tokens=source.choice([1, 64, 4096]),
            deadline_ms=source.choice([0.0, 800.0]), goal=Goal(500.0, 30.0), retries=source.choice([0, 3]),
            priority_class=source.choice(["interactive", "batch"]),
        )  # fmt: skip

    arrivals = sorted(
        ((source.uniform(0, 10), one()) for _ in range(source.randint(1, 80))), key=lambda entry: entry[0]
    )
    loops = tuple(Loop((one(), one()), source.choice([0.0, 0.5]), 0.0, 8.0) for _ in range(source.randint(0, 3)))
    return Workload(workers(*names), tuple(arrivals), loops, failures, duration_s=10.0, settle_s=60.0, seed=seed)


def _failure(source: random.Random, worker: str) -> PlannedFailure:
    kinds: tuple[FailureKind, ...] = KINDS if worker.startswith("mixed") else (*KINDS, "flipped")
    return PlannedFailure(
        source.uniform(0, 12),
        worker,
        source.choice(kinds),
        source.choice([0.1, 3.0, 100.0]),
        role=source.choice(["prefill", "decode"]),
        for_s=source.choice([0.0, 1.0]),
    )


@pytest.mark.parametrize("seed", first(20, range(400)))
def test_each_request_is_counted_once(seed: int) -> None:
    """Any drawn workload ends with each request counted once, and repeats with its seed."""
    played = play(drawn(seed))
    everything = figures(played)
    groups = (
        everything["tenants"], list(everything["classes"].values()), list(everything["traffic"].values()), [everything["all"]],
    )  # fmt: skip
    for some in groups:
        assert sum(one["offered"] for one in some) == len(played.outcomes)
        assert sum(one["finished"] + sum(one["ended_otherwise"].values()) for one in some) == len(played.outcomes)
    assert sum(one.computed_tokens for one in played.outcomes) == played.computed_tokens
    assert outcomes(play(drawn(seed))) == outcomes(played)
