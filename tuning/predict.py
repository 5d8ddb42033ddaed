"""What a run would look like at the client, with error bands. Pure.

A band has two causes. The machine is never twice the same: the run is simulated again with prefill and decode steps scaled by
draws from the profile's run-to-run spread. And a trace is one sample of its traffic: windows of it are drawn with replacement
(a block bootstrap, whose blocks do not overlap), which changes the figures without another simulation.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tuning.advise import Workers
from tuning.goals import Limits
from tuning.profile import Profile
from tuning.simulator.cluster import Simulator
from tuning.simulator.job import Sent
from tuning.simulator.options import Options
from tuning.simulator.outcome import Bools, Floats

Ints = npt.NDArray[np.int64]
RUNS: Final = 9
DRAWS: Final = 200
WINDOWS_MIN: Final = 8
BAND: Final = (0.05, 0.95)
SHARES: Final = (0.5, 0.9, 0.99)


class Band(NamedTuple):
    value: float
    low: float
    high: float

    def covers(self, measured: float) -> bool:
        return self.low <= measured <= self.high


class Prediction(NamedTuple):
    workers: Workers
    attainment: Band
    """Share of requests that keep the SLO."""
    goodput: Band
    """Requests per second that do."""
    latency: dict[str, dict[str, Band]]
    """By metric, then "p50", "p90", "p99"."""
    binds: str
    prefill_busy: float
    decode_busy: float


def predict(
    profile: Profile,
    workers: Workers,
    sent: Sequence[Sent],
    slo: Limits,
    options: Options | None = None,
    *,
    from_s: float = 0.0,
    runs: int = RUNS,
    seed: int = 0,
) -> Prediction:
    """`from_s`: requests that arrive earlier are a warm-up, and not counted, but for their gaps between tokens."""
    rng = np.random.default_rng([seed, 1])
    point = Simulator(profile, workers, sent, options).run()
    outcomes = [point]
    for _ in range(runs - 1):
        scales = np.exp(rng.normal(0.0, profile.run_sigma, 2)).tolist()
        outcomes.append(Simulator(profile.scaled(*scales), workers, sent, options).run())
    counted = point.at_s >= from_s
    span_s = max(float(np.ptp(point.at_s[counted])) if counted.any() else 0.0, 1e-9)
    per_s = max(int(counted.sum()) - 1, 1) / span_s
    draws: dict[str, list[list[float]]] = {name: [] for name in ("attainment", "ttft_ms", "tpot_ms")}
    for number in range(DRAWS):
        outcome = outcomes[number % len(outcomes)]
        chosen = resampled(outcome.at_s, counted, rng)
        draws["attainment"].append([float(outcome.good(slo)[chosen].mean())])
        for metric in ("ttft_ms", "tpot_ms"):
            draws[metric].append(quantiles(getattr(outcome, metric)[chosen]))
    value = float(point.good(slo)[counted].mean()) if counted.any() else 1.0
    attainment = _band(value, [one[0] for one in draws["attainment"]])
    latency = {
        metric: {
            f"p{100 * share:.0f}": _band(middle, [one[place] for one in draws[metric]])
            for place, (share, middle) in enumerate(
                zip(SHARES, quantiles(getattr(point, metric)[counted]), strict=True)
            )
        }
        for metric in ("ttft_ms", "tpot_ms")
    }
    gaps = [outcome.percentiles("itl_ms", SHARES) for outcome in outcomes]
    latency["itl_ms"] = {
        f"p{100 * share:.0f}": _band(gaps[0][place], [one[place] for one in gaps]) for place, share in enumerate(SHARES)
    }
    goodput = Band(*(per_s * one for one in attainment))
    return Prediction(workers, attainment, goodput, latency, point.binds(slo), point.prefill_busy, point.decode_busy)


def quantiles(values: Floats) -> list[float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return [float("nan")] * len(SHARES)
    return [float(value) for value in np.quantile(values, SHARES)]


def windows(at_s: Floats, counted: Bools) -> list[Ints]:
    """Indexes of the counted requests, in windows of about equal time, each of several requests."""
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


def _band(value: float, draws: Sequence[float]) -> Band:
    found = np.array(draws)
    found = found[~np.isnan(found)]
    if not len(found):
        return Band(value, value, value)
    low, high = np.quantile(found, BAND)
    return Band(value, min(float(low), value), max(float(high), value))
