"""Bands around predictions cover what runs of the same machine measure."""

import numpy as np
import pytest

from lab import fit
from lab.advise import Slo, Workers
from lab.play.player import Player
from lab.play.request import Sent
from lab.predict import predict, run_factors, scattered
from lab.profile import HostCost, PrefillCost, Residuals
from tests.lab.profiles import GPU

SLO = Slo(150.0, 14.0)
SCATTER = Residuals(50, -0.1, 0.0, 0.11, 0.3)
MACHINE = GPU.replaced(prefill=PrefillCost(GPU.prefill.curve, residuals=SCATTER), host=HostCost(8.0, residuals=SCATTER))


def traffic(count: int, seed: int) -> list[Sent]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.12, count)).tolist()
    return [Sent(at, int(rng.integers(50, 1500)), int(rng.integers(5, 80))) for at in times]


@pytest.mark.long
def test_bands_cover_measured_runs() -> None:
    """Machines calibrated in five rounds, each as far from the truth as the run that is predicted."""
    rng, sigma, inside, asked = np.random.default_rng(4), 0.1, 0, 0
    for number in range(16):
        rounds = rng.normal(0.0, sigma, 5)
        parts = [[(n, float(np.exp(one))) for n, one in enumerate(rounds)]]
        spread, dof = fit.run_spread(parts)
        known = MACHINE.scaled(float(np.exp(rounds.mean())), float(np.exp(rounds.mean())))
        sent = traffic(120, number)
        found = predict(known.replaced(run_sigma=spread, run_dof=dof), Workers(1, 1), sent, SLO, runs=13)
        factor = float(np.exp(rng.normal(0.0, sigma)))
        live = scattered(Player(MACHINE.scaled(factor, factor), Workers(1, 1), sent).run(), MACHINE, rng)
        for metric in ("ttft_ms", "tpot_ms"):
            values = getattr(live, metric)
            for rank, share in (("p50", 0.5), ("p90", 0.9)):
                asked += 1
                inside += found.latency[metric][rank].covers(float(np.nanquantile(values, share)))
        assert found.attainment.low <= found.attainment.value <= found.attainment.high
    assert inside / asked >= 0.8, (inside, asked)


def test_fewer_rounds_widen_bands() -> None:
    """Fewer calibration rounds make wider bands."""
    rng = np.random.default_rng(1)

    def width(dof: int) -> float:
        return max(run_factors(GPU.replaced(run_sigma=0.1, run_dof=dof), 24, rng))

    assert width(2) > 1.15 * width(30)
    assert width(0) == pytest.approx(width(10_000), rel=0.05)
    assert run_factors(GPU, 0, rng) == []


def test_spread_is_between_rounds() -> None:
    """The spread is that between rounds, not between single steps."""
    rng = np.random.default_rng(2)
    quiet = [[(n, float(np.exp(rng.normal(0.0, 0.3)))) for n in range(5) for _ in range(2000)]]
    assert fit.run_spread(quiet) == (pytest.approx(0.01, abs=0.012), 4)
    slower = [1.0 + 0.1 * n for n in range(5)]
    # Of a sixth run, beside the mean of five.
    wanted = np.log(slower).std(ddof=1) * np.sqrt(1 + 1 / 5)
    assert fit.run_spread([[(n, one) for n, one in enumerate(slower)]])[0] == pytest.approx(wanted)
    assert fit.run_spread([[(0, 1.0), (0, 1.1)]]) == (0.03, 0), "one round says nothing of others"


def test_gaps_stay_uneven() -> None:
    """Predicted gaps are as uneven as the measured ones."""
    sent = traffic(60, 1)
    even = predict(GPU, Workers(1, 1), sent, SLO, runs=2).latency["itl_ms"]
    ratios = fit.gap_spread([0.9, 0.95, 1.0, 1.05, 1.6] * 100)
    uneven = predict(GPU.replaced(gap_spread=ratios), Workers(1, 1), sent, SLO, runs=2).latency["itl_ms"]
    assert uneven["p90"].value > 1.3 * even["p90"].value
    assert uneven["p50"].value == pytest.approx(even["p50"].value, rel=0.05)
    assert fit.gap_spread([1.0] * 20) == ()


def test_scatter_keeps_the_median() -> None:
    """Scatter keeps the median and the requests without an answer."""
    outcome = Player(MACHINE, Workers(1, 1), traffic(400, 3)).run()
    outcome.ttft_ms[7] = np.nan
    found = scattered(outcome, MACHINE, np.random.default_rng(1))
    assert np.nanmedian(found.ttft_ms) == pytest.approx(np.nanmedian(outcome.ttft_ms), rel=0.05)
    assert np.isnan(found.ttft_ms[7])
    assert not np.allclose(found.ttft_ms[:7], outcome.ttft_ms[:7])
    assert Residuals().sigma == 0.0
