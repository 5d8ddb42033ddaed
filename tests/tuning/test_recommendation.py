"""Which candidate is recommended, what is said to limit one, and that both are so."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.profiles import GPU
from tuning import search as search_module
from tuning.advise import Slo, Workers
from tuning.goals import Goals
from tuning.limits import RESOURCES, eased, limit_of
from tuning.profile import HostCost, Profile
from tuning.search import Candidate, Found, Scored, Space, error, recommended, search
from tuning.sensitivity import one_more_or_less, what_if
from tuning.simulator.cluster import Simulator
from tuning.simulator.job import Sent
from tuning.simulator.options import RunOptions
from tuning.traffic import excerpt

CPU = GPU.scaled(6.0, 3.0).replaced(prefill_cores=1, decode_cores=1)  # two cores for all workers


def traffic(per_s: float, prompt: float, output: float, count: int = 600, seed: int = 1) -> list[Sent]:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / per_s, count))
    prompts, outputs = rng.lognormal(np.log(prompt), 0.7, count), rng.lognormal(np.log(output), 0.5, count)
    return [Sent(float(at), int(p) + 1, int(o) + 1) for at, p, o in zip(at_s, prompts, outputs, strict=True)]


@st.composite
def results(draw: st.DrawFn) -> list[Scored]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    common = rng.normal(0, draw(st.sampled_from([0.0, 0.02])), 100)
    found = []
    for number in range(draw(st.integers(1, 8))):
        kept = draw(st.sampled_from([0.2, 0.5, 0.89, 0.9, 0.905, 0.91, 1.0]))
        one = Scored(Candidate(Workers(1 + number % 3, draw(st.integers(1, 5))), 256), 1.0)
        one.attainment, one.strain = kept, draw(st.floats(0.1, 3.0))
        one.drawn = kept + common + rng.normal(0, draw(st.sampled_from([0.0, 0.01])), 100)
        one.load_kept = draw(st.sampled_from([0.0, 0.25, 0.5]))
        found.append(one)
    return found


@given(results())
def test_recommendation_is_not_dominated(found: list[Scored]) -> None:
    """No candidate beats the recommended one by more than the error, and no smaller one that keeps the SLO equals it."""
    chosen = recommended(found, 0.9)
    best = max(found, key=lambda one: one.attainment)
    assert best.attainment - chosen.attainment <= error(best, chosen)
    assert (chosen.attainment >= 0.9) == (best.attainment >= 0.9), "another one keeps the SLO"
    for one in found:
        enough = best.attainment - one.attainment <= error(best, one)
        if best.attainment < 0.9:
            assert not (enough and one.load_kept > chosen.load_kept), "it keeps the SLO up to a lower load"
            continue
        enough &= one.attainment >= 0.9
        fewer = one.candidate.workers.total < chosen.candidate.workers.total
        equal = one.candidate.workers.total == chosen.candidate.workers.total
        assert not (enough and (fewer or (equal and one.strain < chosen.strain))), "it is dominated"


CASES = [
    (GPU, traffic(4.0, 700, 150), 4),
    (GPU, traffic(9.0, 1500, 60), 5),
    (GPU, traffic(6.0, 200, 500), 3),
    (CPU, traffic(0.5, 200, 60, 500), 6),
]


def searched(profile: Profile, sent: list[Sent], workers: int) -> Found:
    cores = profile.prefill_cores + profile.decode_cores
    return search(profile, sent, Goals(Slo(1500, 80)), Space(workers, mixed_max=cores))


@pytest.mark.parametrize(("profile", "sent", "workers"), CASES, ids=range(len(CASES)))
def test_search_results_are_consistent(profile: Profile, sent: list[Sent], workers: int) -> None:
    """A search's recommendation, probabilities and limits agree with what the simulator gives."""
    found = searched(profile, sent, workers)
    best = found.best
    assert found.ranked[0] is best and all(one.full for one in found.ranked)
    for one in found.ranked[1:]:
        assert one.attainment - best.attainment <= error(one, best) + 1e-9
    for one in found.results.values():
        if one.requests and not one.full:
            assert one.low - best.attainment < 0.1, (
                f"{one.candidate} was better on an excerpt and did not run the trace"
            )
    assert sum(one.probability for one in found.ranked) == pytest.approx(1.0)
    options = RunOptions(step_tokens=256)
    for one in found.ranked:
        part = sent if one is best else excerpt(sent, 1200)
        assert bool(one.binds) == (one.attainment < found.goals.percentile)
        if one.binds in RESOURCES:
            relieved, changed = RESOURCES[one.binds](profile, options)
            kept = [
                Simulator(p, one.candidate.workers, part, o).run().attainment(found.goals)
                for p, o in ((profile, options), (relieved, changed))
            ]
            assert kept[1] - kept[0] == pytest.approx(one.limit_gain) and one.limit_gain > 0


def test_shared_cores_limit_worker_count() -> None:
    """No more workers than help are recommended where they share cores."""
    found = searched(*CASES[3])
    assert found.best.candidate.workers.total <= 2, "there are two cores"


MEMORY = GPU.replaced(decode_capacity=msgspec.structs.replace(GPU.decode_capacity, kv_blocks=220))
LINK = GPU.replaced(transfer=msgspec.structs.replace(GPU.transfer, bytes_per_ms=2e5, latency_ms=30.0))
CROWDED = GPU.replaced(prefill_cores=1, decode_cores=1)


@pytest.mark.parametrize(
    ("name", "profile", "workers", "options", "sent", "slo"),
    [
        ("prefill compute", GPU, Workers(1, 1), RunOptions(), traffic(5.0, 2500, 20, 600), Slo(1500, 200)),
        ("decode compute", GPU, Workers(1, 1), RunOptions(), traffic(3.0, 100, 300, 600), Slo(3000, 14)),
        ("sequences", GPU, Workers(1, 1), RunOptions(seqs_max=4), traffic(1.5, 100, 400, 600), Slo(1500, 80)),
        ("decode memory", MEMORY, Workers(1, 1), RunOptions(), traffic(1.2, 600, 300, 600), Slo(1500, 80)),
        ("transfer", LINK, Workers(2, 1), RunOptions(), traffic(1.0, 500, 3, 600), Slo(5000, 100)),
        ("shared cores", CROWDED, Workers(4, 4), RunOptions(), traffic(3.0, 300, 100, 600), Slo(1500, 18)),
    ],
)
def test_limiting_resource_is_named(
    name: str, profile: Profile, workers: Workers, options: RunOptions, sent: list[Sent], slo: Slo
) -> None:
    """The resource that limits a ratio is named."""
    assert limit_of(profile, workers, sent, Goals(slo), options).name == name


def test_target_limits_without_resource() -> None:
    """The SLO target is named as the limit where no resource would help."""
    sent = [one._replace(at_s=100.0 * number) for number, one in enumerate(traffic(1.0, 300, 30, 100))]
    slow_host = GPU.replaced(host=HostCost(500.0))
    limit = limit_of(slow_host, Workers(1, 1), sent, Goals(Slo(400, 100)), RunOptions())
    assert limit.name == "TTFT target" and limit.gain > 0.9
    assert eased(Goals(Slo(10, 20), {"batch": Slo(1, 2)}), 2.0, 3.0) == Goals(Slo(20, 60), {"batch": Slo(2, 6)})


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_one_worker_change_keeps_phases(prefill: int, decode: int, mixed: int) -> None:
    """Ratios with one worker more or less keep workers for each phase."""
    workers = Workers(prefill, decode, mixed)
    for other in one_more_or_less(workers):
        assert abs(other.total - workers.total) == 1 and (other.mixed or (other.prefill and other.decode))


def test_mixed_workers_need_a_core() -> None:
    """No more mixed workers are considered than there are cores."""
    space = Space(4, mixed_max=2)
    assert [str(one) for one in space.layouts(2)] == ["1P1D", "2M"] and Workers(0, 0, 3) not in space.layouts(3)
    assert space.has_cores_for(Workers(0, 0, 2)) and not space.has_cores_for(Workers(0, 0, 3))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_overload_recommends_the_strongest_ratio(seed: int) -> None:
    """Under overload no ratio of its own table beats the recommended one beyond the error, in goodput or, of those that are
    as good, in the load that it keeps."""
    rng = np.random.default_rng(seed)
    prompt, output, workers = float(rng.uniform(100, 2000)), float(rng.uniform(30, 400)), int(rng.integers(2, 4))
    sent = traffic(float(rng.uniform(40, 120)), prompt, output, 200, seed)
    found = searched(GPU, sent, workers)
    best, options = found.best, RunOptions()
    if max(one.attainment for one in found.ranked) >= found.goals.percentile:
        assert best.attainment >= found.goals.percentile, "another ratio keeps the SLO"
        return  # it is no overload
    kept = {}
    for one in found.ranked:
        assert one.attainment - best.attainment <= error(one, best), f"{one.candidate} has more goodput"
        if one.attainment >= best.attainment:
            kept[one.candidate] = search_module._load_kept(GPU, sent, one.candidate, found.goals, options)
    assert kept[best.candidate] >= max(kept.values())


def test_headroom_is_the_kept_load() -> None:
    """The headroom is the load up to which the SLO is kept."""
    profile, sent, workers = CASES[0]
    found = searched(profile, sent, workers)
    rows, headroom = what_if(profile, sent, found.goals, Space(workers), found, RunOptions(), lambda *_: None)
    kept = {one.load: one.attainment for one in rows if one.workers == str(found.best.candidate.workers)}
    assert sorted(kept) == [0.5, 0.8, 1.0, 1.2, 1.5, 2.0]
    for load, attainment in kept.items():
        if abs(load - headroom) > 0.15:
            assert (attainment >= found.goals.percentile) == (load < headroom)
