"""Which workers serve a traffic best: bounds, successive halving, full runs; then what would turn the answer. Pure.

1. A fluid bound of each candidate: more requests cannot be good than its workers can compute in the time there is. Those with
   the highest bounds are looked at first, and a candidate whose bound is below what another of as many workers has shown on an
   excerpt (the low end of its band) is discarded.
2. Excerpts of the trace (windows from all over it) rank what is left; half goes on to an excerpt twice as long.
3. The best few of the budget run the whole trace. Probabilities come from drawing its windows with replacement, the same
   windows for all candidates, and from the profile's run-to-run spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuning.advise import Workers
from tuning.bounds import attainable
from tuning.goals import Goals
from tuning.profile import Profile
from tuning.simulator.cluster import Simulator
from tuning.simulator.job import Sent
from tuning.simulator.options import Options
from tuning.simulator.outcome import Floats, Outcome
from tuning.traffic import excerpt, windows

FULL_MAX: Final = 6
"""Candidates that run the whole trace …"""
FULL_RUNS: Final = 3
"""… and of the best, how often with scaled step times."""
RUNG_SHARES: Final = (1 / 16, 1 / 6)
REQUESTS_MIN: Final = 400
DRAWS: Final = 400
WINDOWS: Final = 36


@dataclass(frozen=True)
class Candidate:
    workers: Workers
    step_tokens: int
    seqs_max: int = 0
    """0: the profile's."""

    def __str__(self) -> str:
        return str(self.workers)


@dataclass
class Result:
    candidate: Candidate
    bound: float
    """The most of its requests that could keep the SLO."""
    requests: int = 0
    """Of the trace, that were simulated; 0: discarded by its bound."""
    attainment: float = 0.0
    low: float = 0.0
    high: float = 0.0
    """90 % of the draws lie between these."""
    strain: float = float("inf")
    """The wanted percentile of how near requests come to their limits; 1 is the limit."""
    binds: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    batch_mean: float = 0.0
    probability: float = 0.0
    """That it is the best of the budget."""
    full: bool = False

    def rank(self) -> tuple[float, float]:
        return -round(self.attainment, 3), self.strain


@dataclass
class Found:
    goals: Goals
    budget: int
    results: dict[Candidate, Result]
    best: Result
    ranked: list[Result]
    """Full runs of the budget, the likeliest first."""
    requests: int
    requests_per_s: float
    outcome: Outcome
    """Of the best, over the whole trace."""
    class_attainment: dict[str, float]


@dataclass(frozen=True)
class Space:
    budget: int
    mixed: bool = True
    step_tokens: tuple[int, ...] = (256,)
    seqs_max: tuple[int, ...] = (0,)
    mixed_max: int = 0
    """Mixed workers that there are cores for: each has its own in the model. 0: any number."""

    def layouts(self, total: int) -> list[Workers]:
        found = [Workers(prefill, total - prefill) for prefill in range(1, total)]
        mixed = self.mixed and not 0 < self.mixed_max < total
        return [*found, Workers(0, 0, total)] if mixed else found

    def candidates(self) -> list[Candidate]:
        found = []
        for total in range(1, self.budget + 1):
            tokens = self.step_tokens if total == self.budget else self.step_tokens[:1]
            seqs = self.seqs_max if total == self.budget else self.seqs_max[:1]
            found += [Candidate(one, t, s) for one in self.layouts(total) for t in tokens for s in seqs]
        return found


Tell = Callable[[str, int, int], None]
"""What is done, of how many steps, for a progress bar."""


def search(
    profile: Profile,
    sent: Sequence[Sent],
    goals: Goals,
    space: Space,
    options: Options | None = None,
    *,
    tell: Tell = lambda what, done, of: None,
    seed: int = 0,
) -> Found:
    """`sent` is not empty."""
    options = options or Options()
    results = {
        one: Result(one, attainable(profile, one.workers, sent, goals, _options(options, one)))
        for one in space.candidates()
    }
    left = sorted(results, key=lambda one: -results[one].bound)
    for share in RUNG_SHARES:
        part = excerpt(sent, max(round(share * len(sent)), REQUESTS_MIN))
        shown: dict[int, float] = {}
        """By number of workers."""
        kept = []
        for done, candidate in enumerate(left):
            tell(f"{len(part):,} requests", done, len(left))
            result, total = results[candidate], candidate.workers.total
            if result.bound < shown.get(total, 0.0):
                continue
            kept.append(candidate)
            _take(result, _run(profile, part, candidate, options), goals, len(part), seed)
            shown[total] = max(shown.get(total, 0.0), result.low)
        left = _best_half(kept, results, space.budget)
    left = [one for one in left if one.workers.total == space.budget][:FULL_MAX]
    outcomes: dict[Candidate, list[Outcome]] = {}
    for done, candidate in enumerate(left):
        tell("the whole trace", done, len(left))
        outcomes[candidate] = [_run(profile, sent, candidate, options)]
        _take(results[candidate], outcomes[candidate][0], goals, len(sent), seed)
        results[candidate].full = True
    _probabilities(outcomes, results, profile, sent, goals, options, seed)
    ranked = sorted((results[one] for one in outcomes), key=lambda one: (-one.probability, *one.rank()))
    best = ranked[0]
    outcome = outcomes[best.candidate][0]
    good = outcome.good(goals)
    names = np.array(outcome.classes)
    classes = {str(name): float(good[names == name].mean()) for name in np.unique(names)}
    span_s = max(sent[-1].at_s - sent[0].at_s, 1e-9)
    return Found(goals, space.budget, results, best, ranked, len(sent), len(sent) / span_s, outcome, classes)


def _run(profile: Profile, sent: Sequence[Sent], one: Candidate, options: Options) -> Outcome:
    return Simulator(profile, one.workers, sent, _options(options, one)).run()


def _options(options: Options, one: Candidate) -> Options:
    return replace(options, step_tokens=one.step_tokens, seqs_max=one.seqs_max)


def _take(result: Result, outcome: Outcome, goals: Goals, requests: int, seed: int) -> None:
    good, strain = outcome.good(goals), outcome.strain(goals)
    result.requests, result.attainment = requests, float(good.mean())
    result.strain = float(np.quantile(strain, goals.percentile, method="lower"))
    drawn = _draws(outcome.at_s, good.astype(float), seed)
    result.low, result.high = (float(value) for value in np.quantile(drawn, (0.05, 0.95)))
    result.binds = outcome.binds(goals)
    result.figures = {
        metric: dict(zip(("p50", "p90", "p99"), outcome.percentiles(metric, (0.5, 0.9, 0.99)), strict=True))
        for metric in ("ttft_ms", "tpot_ms", "itl_ms")
    }
    result.prefill_busy, result.decode_busy = outcome.prefill_busy, outcome.decode_busy
    result.batch_mean = outcome.batch_mean


def _draws(at_s: Floats, values: Floats, seed: int, draws: int = DRAWS) -> Floats:
    """Means of `values` over windows drawn with replacement; the same windows for the same seed."""
    parts = windows(at_s, WINDOWS)
    sums = np.array([values[part].sum() for part in parts])
    sizes = np.array([len(part) for part in parts])
    chosen = np.random.default_rng([seed, 2]).integers(len(parts), size=(draws, len(parts)))
    return np.asarray(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1))


def _best_half(left: Sequence[Candidate], results: dict[Candidate, Result], budget: int) -> list[Candidate]:
    """Of the budget the better half, of fewer workers the best with and without mixed ones."""
    order = sorted(left, key=lambda one: results[one].rank())
    own = [one for one in order if one.workers.total == budget]
    kept = own[: max(-(-len(own) // 2), FULL_MAX)]
    seen: set[tuple[int, bool]] = set()
    for one in order:
        kind = one.workers.total, bool(one.workers.mixed)
        if kind not in seen:
            seen.add(kind)
            kept += [one] if one not in kept else []
    return kept


def _probabilities(
    outcomes: dict[Candidate, list[Outcome]],
    results: dict[Candidate, Result],
    profile: Profile,
    sent: Sequence[Sent],
    goals: Goals,
    options: Options,
    seed: int,
) -> None:
    """How often each has the highest attainment, or of equals the least strain, over windows drawn and steps scaled."""
    close = sorted(outcomes, key=lambda one: results[one].rank())[:2]
    rng = np.random.default_rng([seed, 3])
    for _ in range(FULL_RUNS - 1):
        scaled = profile.scaled(*np.exp(rng.normal(0.0, profile.run_sigma, 2)).tolist())
        part = excerpt(sent, max(len(sent) // 4, REQUESTS_MIN))
        for one in close:
            outcomes[one].append(_run(scaled, part, one, options))
    wins = dict.fromkeys(outcomes, 0.0)
    for run in range(FULL_RUNS):
        having = {one: found[run] for one, found in outcomes.items() if run < len(found)}
        draws = np.array([_draws(o.at_s, o.good(goals).astype(float), seed + run) for o in having.values()])
        near = np.array([_draws(o.at_s, np.minimum(o.strain(goals), 10.0), seed + run) for o in having.values()])
        best = np.argmax(np.round(draws, 3) - 1e-5 * near, axis=0)
        for place, one in enumerate(having):
            wins[one] += float((best == place).mean()) / FULL_RUNS
    for one, share in wins.items():
        results[one].probability = share
