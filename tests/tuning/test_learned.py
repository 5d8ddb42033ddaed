"""Profiles are corrected by what production steps take."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from proto.messages import Role
from proto.status import StatusReport, StepTimes, WorkerStatus
from tests.tuning.profiles import GPU
from tuning.learned import SAMPLES_MIN, BusyTimes, Learner, StepTime, correct
from tuning.profile import Curve, DecodeCost, Profile, decoded, encoded

Step = Callable[[float, float], float]
SIZES = {Role.PREFILL: (1, 1024), Role.DECODE: (1, 64)}
CONTEXT = {Role.PREFILL: 2_000, Role.DECODE: 4_000}


def production(
    profile: Profile,
    role: Role,
    count: int,
    seed: int = 1,
    *,
    noise: float = 0.03,
    sizes: tuple[int, int] | None = None,
) -> list[StepTime]:
    """Steps that take what this profile says."""
    source, found = random.Random(seed), list[StepTime]()
    cost: Step = (profile.prefill if role is Role.PREFILL else profile.decode).step_ms  # type: ignore[assignment]
    low, high = sizes or SIZES[role]
    for number in range(count):
        size = round(low * (high / low) ** source.random())
        reads = size * source.uniform(1, CONTEXT[role])
        ms = cost(size, reads) * source.lognormvariate(0.0, noise)
        found.append(StepTime(float(size), reads, ms, 4 if role is Role.DECODE else 1, float(number)))
    return found


def times(profile: Profile, role: Role) -> list[float]:
    cost: Step = (profile.prefill if role is Role.PREFILL else profile.decode).step_ms  # type: ignore[assignment]
    return [cost(size, size * context) for size in (1, 4, 16, 60) for context in (100, CONTEXT[role])]


def report_of(
    samples: list[StepTime], role: Role = Role.DECODE, age_ms: float = 1.0, host_workers: int = 1
) -> StatusReport:
    rows = StepTimes(
        "m", role, (age_ms,) * len(samples), tuple(one.steps for one in samples), tuple(one.size for one in samples),
        tuple(one.reads for one in samples), tuple(one.ms for one in samples),
    )  # fmt: skip
    workers = tuple(WorkerStatus(f"w{n}", role, "m", "h", n, 9, 0, 0, 0, 0) for n in range(host_workers))
    return StatusReport(workers, (), 0, {}, {}, {}, step_times=(rows, replace_model(rows)))


def replace_model(rows: StepTimes) -> StepTimes:
    return StepTimes("other", rows.role, *((1.0,) * 99, (1,) * 99, (1.0,) * 99, (1.0,) * 99, (1e6,) * 99))


@pytest.mark.parametrize("outliers", [0.0, 0.2])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_step_factor_is_found(role: Role, factor: float, outliers: float) -> None:
    """In 29 of 30 samples of 80 to 660 steps; the slow steps of one sample may all be of one size."""
    true, missed = GPU.scaled(factor, factor), 0
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    for seed in range(30):
        source = random.Random(seed)
        samples = [
            one._replace(ms=one.ms * source.choice((3, 10, 100))) if source.random() < outliers else one
            for one in production(true, role, 80 + 20 * seed, seed)
        ]
        found = correct(GPU, {role: samples})
        assert times(found.profile, other) == times(GPU, other), "nothing is known of the other role"
        missed += times(found.profile, role) != pytest.approx(times(true, role), rel=0.35 if outliers else 0.2)
    assert missed <= 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_many_samples_give_exact_factor(role: Role) -> None:
    """Many samples give the step times within 3 %, and the words name the factor."""
    true = GPU.scaled(1.5, 1.5)
    found = correct(GPU, {role: production(true, role, 3_000)})
    assert times(found.profile, role) == pytest.approx(times(true, role), rel=0.03)
    steps = 12_000 if role is Role.DECODE else 3_000
    assert found.words == f"{role.value} steps take 1.50 times what the profile says ({steps:,} steps)"
    cost = found.profile.prefill if role is Role.PREFILL else found.profile.decode
    assert cost.residuals.count > 1_000 and -0.06 < cost.residuals.p10 < -0.02 < 0.02 < cost.residuals.p90 < 0.06
    assert decoded(encoded(found.profile), "p") == found.profile


def test_few_samples_change_nothing() -> None:
    """Fewer samples than the minimum leave the profile as it is."""
    few = production(GPU.scaled(1.5, 1.5), Role.DECODE, SAMPLES_MIN - 1)
    assert correct(GPU, {Role.DECODE: few}).profile == GPU
    assert correct(GPU, {Role.DECODE: few}).words == ""
    assert correct(GPU, {Role.DECODE: [*few, few[0]]}).profile != GPU


def test_impossible_samples_are_left_out() -> None:
    """Impossible samples are left out, and correction factors are bounded."""
    never = [StepTime(0.0, 1.0, 5.0), StepTime(4.0, 1.0, 0.0)] * SAMPLES_MIN
    assert correct(GPU, {Role.DECODE: never}).profile == GPU
    found = correct(GPU, {Role.DECODE: [StepTime(1.0, 0.0, 1e12)] * SAMPLES_MIN}).profile
    assert found.decode.curve(1) == pytest.approx(4 * GPU.decode.curve(1))
    assert decoded(encoded(found), "p") == found


def test_large_batches_are_corrected_apart() -> None:
    """Also beyond the sizes that were calibrated; and what lies between and beyond follows."""
    base = GPU.replaced(decode=DecodeCost(Curve((1.0, 8.0), (12.0, 13.0)), 2e-5))
    true = GPU.replaced(decode=DecodeCost(Curve((1.0, 8.0, 64.0), (12.0, 13.0, 42.0)), 2e-5))
    found = correct(base, {Role.DECODE: production(true, Role.DECODE, 1_000)})
    for size in (1, 4, 8, 24, 40, 60):
        assert found.profile.decode.curve(size) == pytest.approx(true.decode.curve(size), rel=0.15), size
    factor = found.profile.decode.curve(60) / base.decode.curve(60)
    assert found.profile.decode.curve(600) == pytest.approx(factor * base.decode.curve(600), rel=0.25)
    assert "(1.00 at 1, 1.69 at 44 sequences; 4,000 steps)" in found.words


def test_missing_context_term_is_learned() -> None:
    """A cost per KV token that calibration did not measure is learned from steps."""
    base = GPU.replaced(decode=replace_kv(GPU.decode, 0.0))
    true = GPU.replaced(decode=replace_kv(GPU.decode, 1e-4))
    found = correct(base, {Role.DECODE: production(true, Role.DECODE, 1_000)}).profile
    assert found.decode.kv_token_ms == pytest.approx(1e-4, rel=0.1)
    assert times(found, Role.DECODE) == pytest.approx(times(true, Role.DECODE), rel=0.1)


def replace_kv(cost: DecodeCost, kv_token_ms: float) -> DecodeCost:
    return DecodeCost(cost.curve, kv_token_ms, cost.residuals)


def test_similar_contexts_scale_the_term() -> None:
    """Steps of similar context only scale the cost per KV token."""
    samples = [StepTime(32.0, 64_000.0, 1.5 * GPU.decode.step_ms(32, 64_000.0))] * 100
    found = correct(GPU, {Role.DECODE: samples}).profile
    assert found.decode.kv_token_ms == pytest.approx(1.5 * GPU.decode.kv_token_ms)


def test_repeated_correction_changes_nothing() -> None:
    """A second correction with the same samples changes nothing and adds no points."""
    samples = {role: production(GPU.scaled(1.4, 0.8), role, 2_000) for role in (Role.PREFILL, Role.DECODE)}
    once = correct(GPU, samples).profile
    twice = correct(once, samples)
    for role in samples:
        assert times(twice.profile, role) == pytest.approx(times(once, role), rel=0.01)
        assert twice.corrections[role].factor == pytest.approx(1.0, abs=0.01)
    assert len(correct(twice.profile, samples).profile.decode.curve.at) == len(once.decode.curve.at), "no new points"


def test_drifting_times_widen_bands() -> None:
    """Step times that drift make the bands of predictions wider."""
    steady = production(GPU, Role.DECODE, 500)
    assert correct(GPU, {Role.DECODE: steady}).profile.run_sigma == GPU.run_sigma
    drifting = [one._replace(ms=one.ms * (1 + one.at_s / 500)) for one in steady]
    assert correct(GPU, {Role.DECODE: drifting}).profile.run_sigma > 0.15


def test_shared_time_is_expected_slower() -> None:
    """Steps beside the other role are expected to take longer, so the factor stays 1."""
    samples = [one._replace(ms=1.3 * one.ms, slow=1.3) for one in production(GPU, Role.DECODE, 500)]
    assert correct(GPU, {Role.DECODE: samples}).corrections[Role.DECODE].factor == pytest.approx(1.0, abs=0.01)


def test_busy_share_is_computed() -> None:
    """The share of a span in which others were busy counts overlapping times once."""
    busy = BusyTimes([(4.0, 6.0), (0.0, 1.0), (0.5, 2.0), (1.0, 1.5)])
    spans = [
        ((0.0, 2.0), 1.0),
        ((1.0, 3.0), 0.5),
        ((2.0, 4.0), 0.0),
        ((-1.0, 7.0), 0.5),
        ((5.0, 9.0), 0.25),
        ((3.0, 3.0), 0.0),
    ]
    for span, share in spans:
        assert busy.share(*span) == pytest.approx(share), span
    assert BusyTimes([]).share(0.0, 1.0) == 0.0


def test_learner_keeps_past_reports() -> None:
    """A learner reads step times from reports and keeps them when the coordinator is restarted."""
    learner, true = Learner(GPU), GPU.scaled(1.0, 1.5)
    samples = production(true, Role.DECODE, 400)
    assert learner.look(StatusReport((), (), 0, {}, {}, {}), "m") == GPU, "an older coordinator tells no times"
    found = learner.look(report_of(samples), "m")
    assert times(found, Role.DECODE) == pytest.approx(times(true, Role.DECODE), rel=0.1)
    assert learner.look(report_of(samples[:5]), "m") == found, "the coordinator was started again"
    assert learner.learned.words.startswith("decode steps take 1.50 times")
    assert Learner(GPU).look(report_of(samples, age_ms=4e6), "m") == GPU, "too old"


def test_shared_cores_slow_no_profile() -> None:
    """Workers that share cores do not make the learned profile slower."""
    base, look = GPU.replaced(decode_cores=2), partial(report_of, production(GPU.scaled(1.0, 1.5), Role.DECODE, 400))
    assert Learner(base).look(look(host_workers=3), "m") == base
    assert Learner(base).look(look(host_workers=2), "m") != base
