"""Virtual workers by themselves: closed forms, caches, mixed workers; and the search over them."""

import msgspec
import numpy as np
import pytest

from lab.advise import Slo, Workers
from lab.goals import Goals
from lab.play.batch import VirtualBatch
from lab.play.options import RunOptions
from lab.play.player import Player
from lab.play.request import PlayedRequest, Sent
from lab.profile import Curve, DecodeCost, HostCost
from lab.search import Effort, Space, search
from lab.traffic import excerpt, fitted, window_s
from tests.lab.profiles import GPU, PATIENT

SLO, SMALL = Slo(500.0, 25.0), Effort(100, 300, 300)


def traffic(per_s: float, count: int, prompt: float = 6.5, output: float = 4.5, seed: int = 3) -> list[Sent]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    prompts = np.clip(rng.lognormal(prompt, 0.8, count), 4, 6000).astype(int).tolist()
    outputs = np.clip(rng.lognormal(output, 0.6, count), 1, 900).astype(int).tolist()
    return [Sent(*one) for one in zip(times, prompts, outputs, strict=True)]


def test_closed_form_matches_single_steps() -> None:
    """A batch in closed form ends its requests when single steps would."""
    cost, rng = DecodeCost(Curve((1.0, 4.0, 16.0), (10.0, 11.0, 20.0)), 3e-3), np.random.default_rng(7)
    for _ in range(20):
        jobs = [PlayedRequest(n, Sent(0.0, int(rng.integers(5, 900)), int(rng.integers(2, 60)))) for n in range(8)]
        comes = np.sort(rng.uniform(0, 0.4, 8)).tolist()
        batch, ends = VirtualBatch(0, cost), {}
        for job, at_s in zip(jobs, comes, strict=True):
            while batch.next_end_s() <= at_s:
                now = batch.next_end_s()
                ends.update((one.number, now) for one in batch.ended())
            job.first_s = job.last_s = at_s
            batch.join(job, at_s)
        while batch.sequences:
            now = batch.next_end_s()
            ends.update((one.number, now) for one in batch.ended())
        assert ends == pytest.approx(_stepwise(cost, jobs, comes), rel=1e-9)


def _stepwise(cost: DecodeCost, jobs: list[PlayedRequest], comes: list[float]) -> dict[int, float]:
    now, running, waiting, ends = 0.0, {}, list(zip(comes, jobs, strict=True)), {}
    while waiting or running:
        now = now if running else max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            job = waiting.pop(0)[1]
            running[job.number] = [job.prompt + 1, job.output - 1]
        now += cost.step_ms(len(running), sum(kv for kv, _ in running.values())) / 1000
        for number, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[number] = now
                del running[number]
    return ends


@pytest.mark.parametrize("kv_token_ms", [0.0, 1e-12, 1e-9, 1e-3])
def test_step_boundary_is_found_again(kv_token_ms: float) -> None:
    """The step of a boundary is found again from its time, also at the end of a day."""
    cost, rng = DecodeCost(Curve((1.0, 64.0), (0.5, 2.0)), kv_token_ms), np.random.default_rng(4)
    for _ in range(300):
        batch = VirtualBatch(0, cost)
        batch.begin_s = float(rng.uniform(0, 86_400))
        batch.sequences, batch.kv_tokens = int(rng.integers(1, 64)), int(rng.integers(100, 10**5))
        steps = int(rng.integers(1, 4000))
        assert batch.steps_until(batch.boundary_s(steps)) == steps


def test_pending_join_delays_no_ending() -> None:
    """Between the arrival of KV and the join."""
    profile = GPU.replaced(decode=DecodeCost(Curve((1.0, 8.0), (10.0, 12.0))), host=HostCost(join_ms=50.0))
    alone = [Sent(0.0, 100, 10)]
    for at_s in np.linspace(0.01, 0.2, 40).tolist():
        outcome = Player(profile, Workers(1, 1), [*alone, Sent(at_s, 100, 50)]).run()
        least = Player(profile, Workers(1, 1), alone).run().tpot_ms[0]
        assert outcome.tpot_ms[0] >= least - 1e-9
        assert 50 <= outcome.hand_over_ms[1] <= 66


def test_cached_prompts_are_not_computed() -> None:
    """Cached prompt tokens take no prefill time, and first tokens come sooner."""
    sent = traffic(20.0, 300)
    cold, warm = (Player(GPU, Workers(2, 2), sent, RunOptions(hit_rate=rate)).run() for rate in (0.0, 0.6))
    assert warm.prefill_busy < 0.6 * cold.prefill_busy
    assert np.quantile(warm.ttft_ms, 0.9) < np.quantile(cold.ttft_ms, 0.9)
    again = [one._replace(prompt_tokens=1030, blocks=(n % 3, n % 3 + 100)) for n, one in enumerate(sent)]
    hits = Player(GPU, Workers(2, 2), again).run()
    assert hits.cached_tokens[100:].mean() > 900


def test_mixed_workers_slow_streams() -> None:
    """Mixed workers have slower later tokens than separate workers, and where their streams bound the slices of prompts,
    later first tokens instead."""
    sent, options = traffic(4.0, 100, prompt=7.2), RunOptions(slices=False)
    apart, whole = (Player(GPU, workers, sent, options).run() for workers in (Workers(2, 2), Workers(0, 0, 4)))
    sliced = Player(GPU, Workers(0, 0, 4), sent).run()
    assert np.nanquantile(whole.tpot_ms, 0.9) > 1.1 * np.nanquantile(apart.tpot_ms, 0.9)
    assert np.nanquantile(sliced.tpot_ms, 0.9) < np.nanquantile(whole.tpot_ms, 0.9)
    assert np.nanquantile(sliced.ttft_ms, 0.9) > np.nanquantile(whole.ttft_ms, 0.9)


def test_mixed_steps_take_turns() -> None:
    """A prompt of four chunks beside a stream waits for the decode step under way, and for one between its chunks each."""
    sent = [Sent(0.0, 16, 400), Sent(1.0, 1024, 2)]
    options = RunOptions(slices=False)
    apart, mixed = (Player(GPU, workers, sent, options).run() for workers in (Workers(1, 1), Workers(0, 0, 1)))
    step_ms = GPU.decode.curve(1)
    longer = float(mixed.ttft_ms[1] - apart.ttft_ms[1])
    assert 3 * step_ms < longer < 4 * step_ms + 0.2, longer
    # The stream stands still for the four chunks, and no longer.
    chunks_ms = float(apart.ttft_ms[1]) - GPU.host.request_ms
    assert 399 * float(mixed.tpot_ms[0] - apart.tpot_ms[0]) == pytest.approx(chunks_ms, rel=0.1)


def test_search_finds_the_crossover() -> None:
    """Short prompts and long answers on two workers: two mixed ones decode with both. Long prompts and a strict limit on
    gaps: separate ones."""
    goals = Goals(Slo(2000.0, 22.0))
    short = search(GPU, traffic(9.0, 300, prompt=3.5, output=6.0), goals, Space(2), effort=SMALL)
    assert short.best.candidate.workers.mixed == 2, short.best
    long = search(GPU, traffic(3.0, 300, prompt=7.5, output=4.0), Goals(Slo(1500.0, 16.0)), Space(2), effort=SMALL)
    assert long.best.candidate.workers == Workers(1, 1), long.best


def test_too_long_requests_are_cut() -> None:
    """Requests longer than the context are cut and counted."""
    sent = [Sent(0.0, 900, 100), Sent(1.0, 900, 200), Sent(2.0, 5000, 5000)]
    found, cut = fitted(sent, 1000)
    assert cut == 2
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(900, 100), (800, 200), (500, 500)]


def test_excess_mixed_workers_are_left_out() -> None:
    """In the model each has a core of its own, so that they would seem to serve more than they can."""
    for most, expected in ((0, [1, 2, 3, 4]), (2, [1, 2]), (4, [1, 2, 3, 4])):
        candidates = Space(4, mixed_max=most).candidates()
        assert [one.workers.mixed for one in candidates if one.workers.mixed] == expected
        assert len([one for one in candidates if not one.workers.mixed]) == 1 + 2 + 3


def test_priority_class_has_own_limits() -> None:
    """A priority class is judged by its own limits, and interactive requests go first."""
    sent = [one._replace(priority="batch" if n % 2 else "interactive") for n, one in enumerate(traffic(10.0, 400))]
    outcome = Player(GPU, Workers(1, 2), sent).run()
    goals = Goals(SLO, {"batch": Slo(1e6, 1e6)})
    assert outcome.good(goals)[1::2].all()
    assert not outcome.good(goals)[::2].all()
    first = [np.mean(outcome.ttft_ms[place::2]) for place in (0, 1)]
    assert first[0] < first[1], "interactive requests go first"


@pytest.mark.parametrize(("per_s", "windows"), [(1.0, 12), (9.0, 6), (100.0, 1)])
def test_excerpt_spans_the_trace(per_s: float, windows: int) -> None:
    """An excerpt has windows of the whole trace that last as long as was asked for, in order, and no more requests than asked
    for. Where these are too few, it is one window of them."""
    sent = traffic(per_s, 6000)
    part = excerpt(sent, 1200, 20.0)
    at_s = np.array([one.at_s for one in part])
    begins = np.flatnonzero(np.diff(at_s, prepend=-200.0) > 100)
    assert len(begins) == windows and 1100 <= len(part) <= 1200
    lasts_s = at_s[np.append(begins[1:], len(part)) - 1] - at_s[begins]
    assert (lasts_s > 15).all() or windows == 1
    assert (np.diff(at_s) >= 0).all()
    assert excerpt(sent, 10_000, 20.0) == sent


@pytest.mark.parametrize("load", [0.8, 1.2])
def test_excerpt_shows_overload(load: float) -> None:
    """Queues grow in an excerpt as in the whole trace, although only some seconds of its many requests are played."""
    sent = [Sent(n / 250 / load, 51, 1) for n in range(4000)]  # a step of 256 tokens takes 20 ms
    for part in (sent, excerpt(sent, 2000, window_s(sent, SLO))):
        kept = Player(GPU, Workers(1, 1), part).run().attainment(Goals(SLO))
        assert (kept > 0.95) == (load < 1) and not 0.5 < kept < 0.95


@pytest.mark.parametrize("workers", [Workers(1, 1), Workers(0, 0, 1)], ids=str)
def test_busy_shares_stay_below_one(workers: Workers) -> None:
    """A pause of an excerpt counts as long as the requests before it are served, so that no worker is busy for longer than the
    span."""
    sent = [Sent(1000.0 * window + 0.02 * n, 900, 60) for window in range(3) for n in range(40)]
    outcome = Player(GPU, workers, sent, PATIENT).run()
    assert all(0.3 < busy < 1.0 + 1e-9 for busy in (outcome.prefill_busy, outcome.decode_busy))
    assert outcome.span_s < 1000


def test_prefix_waiters_are_no_demand_class() -> None:
    """Requests that wait for a worker with their prefix do not count as a class of demand. The class has no target, by which
    most would be refused: one has room in decode at a time."""
    rng = np.random.default_rng(1)
    small = GPU.replaced(decode_capacity=msgspec.structs.replace(GPU.decode_capacity, kv_blocks=700))
    sent, at_s = list[Sent](), 0.0
    for number in range(120):
        at_s += float(rng.exponential(0.15))
        prefix = int(rng.integers(1, 8))
        blocks = (*(100 * prefix + block for block in range(12)), 10_000 + number)
        sent.append(Sent(at_s, 13 * 512, int(rng.integers(50, 300)), blocks))
    outcome = Player(small, Workers(3, 1), sent, PATIENT).run()
    assert (outcome.queue_ms > 1000).mean() > 0.2 and np.isnan(outcome.ttft_ms).mean() < 0.6
