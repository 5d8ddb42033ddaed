"""Predicts what the clients of a run will measure, with error bands. Pure.

A band has three causes:

- A run as a whole is faster or slower than the calibration: the run is simulated again with times scaled by draws from the
  profile's run-to-run spread. The spread was estimated from few rounds, so the draws are from Student's distribution.
- Each request is faster or slower than the fit says: its times are scaled by draws from the residuals.
- A trace is one sample of its traffic: windows of it are drawn with replacement (a block bootstrap, whose blocks do not
  overlap).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lab.advise import Workers
from lab.goals import GoalLimits
from lab.play.options import RunOptions
from lab.play.outcome import Bools, Floats, PlayedOutcome
from lab.play.player import Player
from lab.play.request import Sent
from lab.profile import Profile, Residuals

Ints = npt.NDArray[np.int64]
RUNS: Final = 25
DRAWS: Final = 500
WINDOWS_MIN: Final = 8
BAND: Final = (0.05, 0.95)
SHARES: Final = (0.5, 0.9, 0.99)
METRICS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
GAP_POINTS: Final = 200
HALF_MIN: Final = 0.01  # of its figure, on each side of a band
WILSON_Z: Final = 1.645


class Band(NamedTuple):
    value: float
    low: float
    high: float

    def covers(self, measured: float) -> bool:
        return self.low <= measured <= self.high


class Prediction(NamedTuple):
    workers: Workers
    attainment: Band  # share of requests that keep the SLO
    latency: dict[str, dict[str, Band]]  # by metric, then "p50", "p90", "p99"


def predict(
    profile: Profile,
    workers: Workers,
    sent: Sequence[Sent],
    slo: GoalLimits,
    options: RunOptions | None = None,
    *,
    from_s: float = 0.0,
    runs: int = RUNS,
    seed: int = 0,
) -> Prediction:
    """Predicts the figures of this traffic. Requests that arrive before `from_s` are a warm-up, of which only the gaps between
    tokens count."""
    rng = np.random.default_rng([seed, 1])
    point = Player(profile, workers, sent, options).run()
    scales = zip(*(run_factors(profile, runs - 1, rng) for _ in ("prefill", "decode")), strict=True)
    outcomes = [point, *(Player(profile.scaled(*both), workers, sent, options).run() for both in scales)]
    counted = point.at_s >= from_s
    draws: dict[str, list[list[float]]] = {name: [] for name in ("attainment", *METRICS)}
    for number in range(DRAWS):
        outcome = scattered(outcomes[number % len(outcomes)], profile, rng)
        chosen = resampled(outcome.at_s, counted, rng)
        draws["attainment"].append([float(outcome.good(slo)[chosen].mean())])
        for metric in METRICS:
            draws[metric].append(quantiles(getattr(outcome, metric)[chosen]))
    gaps = [gap_quantiles(outcome, profile) for outcome in outcomes]
    return Prediction(
        workers,
        _share_band([one[0] for one in draws["attainment"]], int(counted.sum()))
        if counted.any()
        else Band(1.0, 0.0, 1.0),
        {
            metric: {
                f"p{100 * share:.0f}": _interval([one[place] for one in found]) for place, share in enumerate(SHARES)
            }
            for metric, found in (*((name, draws[name]) for name in METRICS), ("itl_ms", gaps))
        },
    )


def run_factors(profile: Profile, count: int, rng: np.random.Generator) -> list[float]:
    """Returns, for each of `count` runs, how many times as long everything takes: values at even distances of the
    distribution, in random order."""
    if not count:
        return []
    size = 400 * count
    drawn = rng.standard_t(profile.run_dof, size) if profile.run_dof else rng.normal(size=size)
    middle = np.quantile(drawn, (np.arange(count) + 0.5) / count)
    return [float(factor) for factor in np.exp(rng.permutation(profile.run_sigma * middle))]


def scattered(outcome: PlayedOutcome, profile: Profile, rng: np.random.Generator) -> PlayedOutcome:
    """Returns the outcome with each request's times scattered around the fit as measurements were."""

    def factors(residuals: Residuals) -> Floats:
        return np.exp(rng.normal(0.0, residuals.sigma, len(outcome.at_s)))

    host_ms = np.minimum(profile.host.request_ms, outcome.ttft_ms)
    steps_ms = outcome.ttft_ms - host_ms
    join_ms = outcome.hand_over_ms / np.maximum(outcome.output_tokens - 1, 1)
    return replace(
        outcome,
        ttft_ms=host_ms * factors(profile.host.residuals) + steps_ms * factors(profile.prefill.residuals),
        tpot_ms=(outcome.tpot_ms - join_ms) * factors(profile.decode.residuals)
        + join_ms * factors(profile.transfer.residuals),
    )


def gap_quantiles(outcome: PlayedOutcome, profile: Profile) -> list[float]:
    """Returns the gaps between tokens, scattered around the mean step as measured gaps were."""
    if not profile.gap_spread:
        return outcome.percentiles("itl_ms", SHARES)
    steps = outcome.percentiles("itl_ms", tuple((np.arange(GAP_POINTS) + 0.5) / GAP_POINTS))
    return quantiles(np.outer(steps, profile.gap_spread).ravel())


def quantiles(values: Floats) -> list[float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return [float("nan")] * len(SHARES)
    return [float(value) for value in np.quantile(values, SHARES)]


def windows(at_s: Floats, counted: Bools) -> list[Ints]:
    """Returns the indexes of the counted requests, in windows of about equal time that each have several requests."""
    index = np.flatnonzero(counted)
    count = int(np.clip(len(index) // 20, WINDOWS_MIN, 60))
    if len(index) < 2 * WINDOWS_MIN:
        return [np.array([one]) for one in index]
    edges = np.linspace(at_s[index[0]], at_s[index[-1]], count + 1)[1:-1]
    return [part for part in np.split(index, np.searchsorted(at_s[index], edges)) if len(part)]


def resampled(at_s: Floats, counted: Bools, rng: np.random.Generator) -> Ints:
    parts = windows(at_s, counted)
    if not parts:
        return np.flatnonzero(counted)
    return np.concatenate([parts[one] for one in rng.integers(len(parts), size=len(parts))])


def _share_band(draws: Sequence[float], requests: int) -> Band:
    """Returns the band of a share of `requests` requests: as `_interval`, but no narrower than chance makes it (Wilson's
    interval)."""
    interval, z2 = _interval(draws), WILSON_Z**2
    middle = (interval.value + z2 / (2 * requests)) / (1 + z2 / requests)
    half = (
        WILSON_Z / (1 + z2 / requests) * sqrt(interval.value * (1 - interval.value) / requests + z2 / (4 * requests**2))
    )
    low, high = max(min(interval.low, middle - half), 0.0), min(max(interval.high, middle + half), 1.0)
    return Band(interval.value, min(low, interval.value), max(high, interval.value))


def _interval(draws: Sequence[float]) -> Band:
    """Returns the interval and its median, the most likely measurement."""
    found = np.array(draws)
    found = found[~np.isnan(found)]
    if not len(found):
        return Band(float("nan"), float("nan"), float("nan"))
    low, middle, high = (float(one) for one in np.quantile(found, (BAND[0], 0.5, BAND[1])))
    return Band(middle, min(low, middle * (1 - HALF_MIN)), max(high, middle * (1 + HALF_MIN)))
