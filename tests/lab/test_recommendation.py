"""Which candidate is recommended, what is said to limit one, and that both are so."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.advise import Slo, Workers
from lab.goals import Goals
from lab.limits import RESOURCES, eased, limit_of
from lab.play.options import RunOptions
from lab.play.player import Player
from lab.play.plays import Play
from lab.play.request import Sent
from lab.profile import HostCost, Profile
from lab.search import EQUAL_MAX, Candidate, Effort, Found, Scored, Space, _probabilities, recommended, search
from lab.traffic import at_load, excerpt
from tests.lab.profiles import GPU, scaled

CPU = scaled(GPU, 6.0, 3.0).replaced(prefill_cores=1, decode_cores=1)  # two cores for all workers


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
        workers = Workers(1 + number % 3, draw(st.integers(1, 5)))
        one = Scored(Candidate(workers, 256), 0.9, workers.total)
        one.strain = draw(st.floats(0.1, 3.0))
        share = draw(st.sampled_from([0.2, 0.5, 0.89, 0.9, 0.905, 0.91, 1.0]))
        for load in (1.0, 0.5, 0.25):
            noise = rng.normal(0, draw(st.sampled_from([0.0, 0.01])), 100)
            one.shares[load] = np.concatenate(([share], np.clip(share + common + noise, 0.0, 1.0)))
            share = min(share + draw(st.sampled_from([0.0, 0.1, 0.5])), 1.0)
        found.append(one)
    return found


@given(results())
def test_recommendation_is_not_dominated(found: list[Scored]) -> None:
    """No candidate beats the recommended one in the order of the search by more than the error, and no cheaper one equals
    it."""
    chosen = recommended(found)
    kept = any(one.attainment >= 0.9 for one in found)
    assert (chosen.attainment >= 0.9) == kept, "another one keeps the SLO"
    for one in found:
        if kept and one.attainment >= 0.9:
            assert one.attainment - chosen.attainment <= max(EQUAL_MAX * one.attainment, 0.002)
        elif not kept:
            assert float(one.loads_kept[0] - chosen.loads_kept[0]) <= max(EQUAL_MAX * float(one.loads_kept[0]), 0.002)
        same = all((one.shares[load] == chosen.shares[load]).all() for load in one.shares)
        assert not (same and (one.price, one.strain) < (chosen.price, chosen.strain)), "it is dominated"


def test_simplest_of_equals_is_recommended() -> None:
    """Of equal layouts of as many cards, the one with the fewest cards for each worker is recommended."""
    split = Scored(Candidate(Workers(2, 2), 256, cards=(2, 2)), 0.9, 8, shares={1.0: np.full(9, 0.97)}, strain=0.5)
    single = Scored(Candidate(Workers(4, 4), 256), 0.9, 8, shares={1.0: np.full(9, 0.96)}, strain=0.8)
    assert recommended([split, single]) is split, "the difference is more than the error"
    single.shares[1.0] = np.full(9, 0.969)
    assert recommended([split, single]) is single


def test_kept_load_lies_between_loads() -> None:
    """The load that is just kept lies between one that was kept and one that was not, and the search halves that distance."""
    one = Scored(Candidate(Workers(1, 1), 256), 0.9)
    truth, guess = 0.37, 1.0
    load: float | None = 1.0
    for _ in range(20):
        if load is None:
            break
        one.shares[load] = np.full(3, 0.9 + (truth - load) / 5)
        load = one.next_load(guess, 1.0, 1.05)
    assert load is None and one.load_kept == pytest.approx(truth, rel=0.01)
    assert len(one.shares) < 12
    never = Scored(one.candidate, 0.9, shares={1.0: np.zeros(3), 1 / 64: np.zeros(3)})
    assert never.load_kept == 0 and never.next_load(1.0, 1.0, 1.05) is None


CASES = [
    (GPU, traffic(4.0, 700, 150, 400), 3),
    (GPU, traffic(9.0, 1500, 60, 400), 3),
    (GPU, traffic(6.0, 200, 500, 400), 2),
    (CPU, traffic(0.5, 200, 60, 300), 4),
]


SMALL = Effort(100, 200, 400, 0)


def searched(profile: Profile, sent: list[Sent], workers: int) -> Found:
    cores = profile.prefill_cores + profile.decode_cores
    return search(profile, sent, Goals(Slo(1500, 80)), Space(workers, mixed_max=cores), effort=SMALL)


@given(results())
def test_probability_follows_the_recommendation(found: list[Scored]) -> None:
    """Where all draws are like the whole, the recommended candidate has all of the probability."""
    for one in found:
        one.shares = {load: np.full_like(share, share[0]) for load, share in one.shares.items()}
    best = recommended(found)
    _probabilities(found)
    assert best.probability == 1.0


@pytest.mark.parametrize(("profile", "sent", "workers"), CASES, ids=range(len(CASES)))
def test_search_results_are_consistent(profile: Profile, sent: list[Sent], workers: int) -> None:
    """A search's recommendation, probabilities and limits agree with what the player gives."""
    found = searched(profile, sent, workers)
    best = found.best
    assert found.ranked[0] is best and all(one.whole for one in found.ranked)
    assert recommended(found.ranked) is best
    assert sum(one.probability for one in found.ranked) == pytest.approx(1.0)
    part = excerpt(sent, SMALL.whole, 30.0)
    assert {one.requests for one in found.ranked} == {len(part)}
    for one in found.ranked:
        assert bool(one.limit.name) == (one.attainment < found.goals.percentile)
        if one.limit.name in RESOURCES:
            relieved, changed = RESOURCES[one.limit.name](profile, RunOptions(step_tokens=256))
            kept = Player(relieved, one.candidate.workers, part, changed).run().attainment(found.goals)
            assert kept - one.attainment == pytest.approx(one.limit.gain) and one.limit.gain > 0
    assert sorted(found.at_loads) == [0.5, 0.75, 1.0, 1.5, 2.0]
    for load, attainment in found.at_loads.items():
        if abs(load - found.headroom) > 0.4:
            assert (attainment >= found.goals.percentile) == (load < found.headroom)


def test_shared_cores_limit_worker_count() -> None:
    """No more workers than help are recommended where they share cores."""
    found = searched(*CASES[3])
    assert found.best.candidate.workers.total <= 2, "there are two cores"


MEMORY = GPU.replaced(decode_capacity=msgspec.structs.replace(GPU.decode_capacity, kv_blocks=220))
LINK = GPU.replaced(transfer=msgspec.structs.replace(GPU.transfer, bytes_per_ms=2e5, latency_ms=30.0))
FAR = GPU.replaced(transfer=msgspec.structs.replace(GPU.transfer, latency_ms=300.0))
CROWDED = GPU.replaced(prefill_cores=1, decode_cores=1)


@pytest.mark.parametrize(
    ("name", "profile", "workers", "options", "sent", "slo"),
    [
        ("prefill compute", GPU, Workers(1, 1), RunOptions(), traffic(5.0, 2500, 20, 200), Slo(1500, 200)),
        ("decode compute", GPU, Workers(1, 1), RunOptions(), traffic(3.0, 100, 300, 200), Slo(3000, 14)),
        # A place is held from the choice of workers to the last token: of that, each resource takes only a part.
        ("sequences", FAR, Workers(1, 1), RunOptions(seqs_max=4), traffic(9.0, 500, 30, 150), Slo(1500, 80)),
        ("decode memory", MEMORY, Workers(1, 1), RunOptions(), traffic(1.2, 600, 300, 200), Slo(1500, 80)),
        ("transfer", LINK, Workers(2, 1), RunOptions(), traffic(1.0, 500, 3, 200), Slo(5000, 100)),
        # Prompts and streams are both late: faster steps of one phase alone would not do.
        ("shared cores", CROWDED, Workers(4, 4), RunOptions(), traffic(10.0, 700, 100, 100), Slo(200, 35)),
    ],
)
def test_limiting_resource_is_named(
    name: str, profile: Profile, workers: Workers, options: RunOptions, sent: list[Sent], slo: Slo
) -> None:
    """The resource that limits a ratio is named."""
    assert limit_of(Play(profile, workers, sent, options), Goals(slo)).name == name


def test_target_limits_without_resource() -> None:
    """The SLO target is named as the limit where no resource would help."""
    sent = [one._replace(at_s=100.0 * number) for number, one in enumerate(traffic(1.0, 300, 30, 100))]
    slow_host = GPU.replaced(host=HostCost(500.0))
    limit = limit_of(Play(slow_host, Workers(1, 1), sent, RunOptions()), Goals(Slo(400, 100)))
    assert limit.name == "TTFT target" and limit.gain > 0.9
    assert eased(Goals(Slo(10, 20), {"batch": Slo(1, 2)}), 2.0, 3.0) == Goals(Slo(20, 60), {"batch": Slo(2, 6)})


def test_mixed_workers_need_a_core() -> None:
    """No more mixed workers are considered than there are cores."""
    space = Space(4, mixed_max=2)
    assert [str(one) for one in space.layouts(2)] == ["1P1D", "2M"] and Workers(0, 0, 3) not in space.layouts(3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 30))])
def test_overload_recommends_the_strongest_ratio(seed: int) -> None:
    """Under overload no ratio keeps the SLO up to a load that is more than 5 % above that of the recommended one."""
    rng = np.random.default_rng(seed)
    prompt, output = float(rng.uniform(100, 2000)), float(rng.uniform(30, 400))
    sent = traffic(float(rng.uniform(40, 120)), prompt, output, 200, seed)
    found = searched(GPU, sent, 2)
    best, goals = found.best, found.goals
    assert best.attainment < goals.percentile and found.headroom > 0
    further = at_load(sent, 1.06 * found.headroom)
    for workers in (Workers(1, 1), Workers(0, 0, 1), Workers(0, 0, 2)):
        if workers != best.candidate.workers:
            assert Player(GPU, workers, further).run().attainment(goals) < goals.percentile + 0.005, workers
