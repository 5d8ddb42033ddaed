"""From measurements to a profile."""

import numpy as np
import pytest

from lab import fit
from lab.fit import HandOver, Outside, Samples, StepSample
from lab.profile import Curve, ProfileError, decoded, encoded
from tests.lab.profiles import GPU


def test_fit_finds_true_costs() -> None:
    """A fit finds the costs that made the samples although some of them were slow."""
    rng, per_read = np.random.default_rng(1), 3e-4
    line = Curve((8.0, 64.0, 256.0), (5.0, 12.0, 40.0))
    samples = [
        StepSample(
            size, reads, (line(size) + per_read * reads) * (1 + 0.02 * rng.normal()) * (5 if n % 17 == 0 else 1), n % 3
        )
        for n, (size, reads) in enumerate((s, r) for s in (8, 64, 256) for r in (100.0, 5e4, 2e5) for _ in range(8))
    ]
    cost = fit.prefill_cost(samples)
    assert cost.context_ms == pytest.approx(per_read, rel=0.1)
    assert cost.curve.ms == pytest.approx(line.ms, rel=0.1)
    assert abs(cost.residuals.p50) < 0.02
    assert cost.residuals.worst > 3


def test_slow_size_raises_no_other() -> None:
    """One slow step size does not raise the curve at all larger sizes."""
    measured = {1: 10.0, 2: 30.0, 4: 12.0, 8: 18.0, 16: 24.0}
    found = fit.curve([StepSample(size, 0.0, ms) for size, ms in measured.items()], 0.0)
    assert found.ms == pytest.approx((10.0, 20.0, 20.0, 20.0, 24.0))


def test_disturbed_size_keeps_the_slope() -> None:
    """The largest batch reads most, and is the first that the machine cannot keep up with."""
    line, per_read = GPU.decode.curve, 1e-4
    samples = [StepSample(n, n * kv, line(n) + per_read * n * kv) for n in (1, 2, 4, 8) for kv in (50.0, 500.0)]
    cost = fit.decode_cost([*samples, StepSample(16, 800.0, 20.0), StepSample(16, 8000.0, 90.0)])
    assert cost.kv_token_ms == pytest.approx(per_read)
    assert cost.step_ms(4, 800) == pytest.approx(GPU.decode.curve(4) + 800 * per_read)


def test_similar_reads_leave_the_slope() -> None:
    """Their streams end a step earlier or later from round to round; what they took differs by chance."""
    alone = [StepSample(1, 56.0, 19.0), StepSample(1, 536.0, 21.4)]
    others = [StepSample(n, 60.0 * n + at, 20.0 + at) for n in (2, 4) for at in (0.0, 1.0, 2.0)]
    assert fit.decode_cost(alone + others).kv_token_ms == pytest.approx(2.4 / 480)


def test_other_role_counts_by_its_share() -> None:
    """The slowdown beside the other role is found from the share of the time that both work."""
    cost = GPU.decode
    alone = cost.step_ms(4, 1000)
    assert fit.beside([(StepSample(4, 1000, 1.5 * alone), 0.5)], cost) == pytest.approx(2.0)
    assert fit.beside([(StepSample(4, 1000, 0.9 * alone), 0.5)], cost) == 1.0
    assert fit.beside([], cost) == 1.0


def test_transfer_and_host_costs_are_lines() -> None:
    """Transfer and host costs are fitted as lines over tokens."""
    hand_overs = [HandOver(tokens, 1000.0, 2 + 0.01 * tokens) for tokens in (16, 64, 256) for _ in range(3)]
    transfer = fit.transfer_cost(hand_overs, "shm")
    assert transfer.ms(100) == pytest.approx(3.0)
    samples = Samples(outside=[Outside(n, 8 + 0.002 * n) for n in (10, 100, 1000)], second_token_ms=[(200, 7.0)])
    host = fit.host_cost(samples, transfer)
    assert (host.request_ms, host.request_token_ms, host.join_ms) == pytest.approx((8.0, 0.002, 3.0))


def test_empty_samples_are_an_error() -> None:
    """A fit without samples raises an error."""
    with pytest.raises(fit.FitError):
        fit.prefill_cost([])


def test_profile_round_trips_or_is_refused() -> None:
    """A profile is read as it was written, and invalid ones are refused."""
    assert decoded(encoded(GPU), "p") == GPU
    bad = (
        GPU.replaced(format=99),
        GPU.replaced(decode=fit.DecodeCost(Curve((2.0, 1.0), (1.0, 1.0)))),  # type: ignore[attr-defined]
        GPU.replaced(step_tokens=0),
    )
    for data in (b"{}", b"no", *map(encoded, bad)):
        with pytest.raises(ProfileError, match=r"^p: "):
            decoded(data, "p")
