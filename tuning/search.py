"""The search for the best workers: bounds, successive halving, full runs; then the changes that would turn the answer. Pure.

1. A fluid bound of each candidate: the requests that its workers can compute in the time there is. Candidates with the highest
   bounds are tried first. A candidate is discarded if its bound is below what another one with as many workers has reached on
   an excerpt (the low end of its band).
2. Excerpts of the trace (windows from all over it) rank the others; half of them go on to an excerpt twice as long.
3. The best few run the whole trace, and so do candidates with fewer workers that may serve as much. The recommended one is the
   cheapest of those that keep the SLO and are not worse than the best by more than the error; without costs, the one with the
   fewest workers. If none keeps the SLO, it is the one of those that keeps it up to the highest load.
   Probabilities and errors come from drawing windows of the trace with replacement, the same windows for all candidates, and
   from the profile's run-to-run spread.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Final

import numpy as np

from tuning.advise import Workers
from tuning.bounds import attainable
from tuning.goals import Goals
from tuning.limits import limit_of
from tuning.profile import Profile
from tuning.simulator.cluster import Simulator
from tuning.simulator.job import Sent
from tuning.simulator.options import RunOptions
from tuning.simulator.outcome import Floats, SimulatedOutcome
from tuning.traffic import Change, excerpt, windows

FULL_MAX: Final = 6  # candidates that run the whole trace
FULL_RUNS: Final = 3  # of each of the best candidates, with scaled step times
CURVE_MAX: Final = 16  # numbers of workers for which the best candidate runs the whole trace
CONTENDS: Final = 0.6  # of the best's share on an excerpt; candidates with less do not run the whole trace
OF_EACH_MAX: Final = 2  # of each smaller number of workers, for longer excerpts, with and without mixed workers
LIMIT_REQUESTS: Final = 1200  # in the excerpt that shows what limits a candidate that is not recommended
ERROR_MIN: Final = 0.002
RUNG_SHARES: Final = (1 / 16, 1 / 6)
REQUESTS_MIN: Final = 400
LOAD_STEPS: Final = 5  # bisections of the load up to which a candidate keeps the SLO
DRAWS: Final = 400
WINDOWS: Final = 36


@dataclass(frozen=True)
class Candidate:
    workers: Workers
    step_tokens: int
    seqs_max: int = 0  # 0: the profile's
    stall_share: float = 0.0  # as in `RunOptions`
    cards: tuple[int, int] = (1, 1)  # of each prefill worker, and of each other one

    @property
    def all_cards(self) -> int:
        """As many as workers, where each has one."""
        return self.cards[0] * self.workers.prefill + self.cards[1] * (self.workers.decode + self.workers.mixed)

    def __str__(self) -> str:
        if self.cards == (1, 1):
            return str(self.workers)
        kinds = zip(self.workers, "PDM", (*self.cards, self.cards[1]), strict=True)
        return "+".join(f"{count}{role}@TP{cards}" for count, role, cards in kinds if count)


@dataclass
class Scored:
    candidate: Candidate
    bound: float  # largest share of requests that could keep the SLO
    requests: int = 0  # simulated; 0: it was discarded by its bound
    attainment: float = 0.0
    low: float = 0.0
    high: float = 0.0  # 90 % of the draws lie between these
    strain: float = float("inf")  # wanted percentile of requests' nearness to their limits; 1 is the limit
    binds: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    prefill_busy: float = 0.0
    decode_busy: float = 0.0
    batch_mean: float = 0.0
    limit_gain: float = 0.0  # share of requests that keep the SLO in addition, with twice what limits it
    link_busy: float = 0.0
    load_kept: float = 0.0  # multiple of the load with the SLO kept, where no candidate keeps it
    probability: float = 0.0
    cost_per_hour: float = 0.0  # 0: not known
    requests_per_s: float = 0.0  # sent by clients: turns come faster if answers do; 0: as the traffic says
    full: bool = False
    drawn: Floats = field(default_factory=lambda: np.zeros(0), repr=False)
    """Attainment over windows of the trace drawn with replacement; the same windows for all that ran as many requests."""

    @property
    def price(self) -> float:
        return self.cost_per_hour or self.candidate.all_cards

    def rank(self) -> tuple[float, float]:
        return -round(self.attainment, 3), self.strain


@dataclass
class Found:
    goals: Goals
    budget: int
    results: dict[Candidate, Scored]
    best: Scored
    ranked: list[Scored]  # full runs: the recommended one, then the best first
    requests: int
    requests_per_s: float
    outcome: SimulatedOutcome
    class_attainment: dict[str, float]


@dataclass(frozen=True)
class Space:
    budget: int
    mixed: bool = True
    step_tokens: tuple[int, ...] = (256,)
    seqs_max: tuple[int, ...] = (0,)
    stall_shares: tuple[float, ...] = (0.0,)
    mixed_max: int = 0  # that there are cores for: each has its own in the model; 0: any number

    def profile_of(self, profile: Profile, one: Candidate) -> Profile:
        return profile

    def has_cores_for(self, workers: Workers) -> bool:
        return not 0 < self.mixed_max < workers.mixed

    def layouts(self, total: int) -> list[Workers]:
        found = [Workers(prefill, total - prefill) for prefill in range(1, total)]
        mixed = Workers(0, 0, total)
        return [*found, mixed] if self.mixed and self.has_cores_for(mixed) else found

    def candidates(self) -> list[Candidate]:
        found = []
        for total in range(1, self.budget + 1):
            layouts = self.layouts(total)
            found += [Candidate(*one) for one in product(layouts, self.step_tokens, self.seqs_max, self.stall_shares)]
        return found


Tell = Callable[[str, int, int], None]  # (name of the work, steps done, all steps), for a progress bar


def search(
    profile: Profile,
    sent: Sequence[Sent],
    goals: Goals,
    space: Space,
    options: RunOptions | None = None,
    *,
    tell: Tell = lambda what, done, of: None,
    seed: int = 0,
) -> Found:
    """`sent` is not empty."""
    options = options or RunOptions()
    profiles = {one: space.profile_of(profile, one) for one in space.candidates()}
    results = {
        one: Scored(
            one,
            attainable(own, one.workers, sent, goals, options_for(options, one)),
            cost_per_hour=own.cost_per_hour(*one.workers),
        )
        for one, own in profiles.items()
    }
    left = sorted(results, key=lambda one: -results[one].bound)
    for share in RUNG_SHARES:
        part = excerpt(sent, max(round(share * len(sent)), REQUESTS_MIN))
        kept = _run_promising(left, results, profiles, part, goals, options, tell, seed)
        left = _best_half(kept, results, space.budget)
    outcomes: dict[Candidate, list[SimulatedOutcome]] = {}

    def run_whole(one: Candidate) -> Scored:
        if one not in outcomes:
            tell("the whole trace", len(outcomes), FULL_MAX)
            outcomes[one] = [_run(profiles[one], sent, one, options)]
            _take(results[one], outcomes[one][0], goals, len(sent), seed)
            results[one].full = True
        return results[one]

    shares = {one: results[one].attainment for one in left}
    _run_the_best(sorted(left, key=lambda one: results[one].rank()), run_whole, shares.__getitem__, goals)
    full = [results[one] for one in outcomes]
    if max(one.attainment for one in full) < goals.percentile:
        for one in near_best(full):
            tell("the load that is kept", 0, 1)
            one.load_kept = _load_kept(profiles[one.candidate], sent, one.candidate, goals, options)
    _probabilities(outcomes, results, profiles, sent, goals, options, seed)
    best = recommended(full, goals.percentile)
    others = sorted((results[one] for one in outcomes if one != best.candidate), key=Scored.rank)
    ranked = [best, *others]
    _find_limits(ranked, profiles, sent, goals, options, tell)
    outcome = outcomes[best.candidate][0]
    good = outcome.good(goals)
    names = np.array(outcome.classes)
    classes = {str(name): float(good[names == name].mean()) for name in np.unique(names)}
    per_s = best.requests_per_s or len(sent) / max(sent[-1].at_s - sent[0].at_s, 1e-9)
    return Found(goals, space.budget, results, best, ranked, len(sent), per_s, outcome, classes)


def _run_promising(
    left: Sequence[Candidate],
    results: dict[Candidate, Scored],
    profiles: Mapping[Candidate, Profile],
    part: Sequence[Sent],
    goals: Goals,
    options: RunOptions,
    tell: Tell,
    seed: int,
) -> list[Candidate]:
    """Runs a part of the trace with the candidates that may still be the best of their number of workers; returns these."""
    kept: list[Candidate] = []
    shown: dict[int, float] = {}  # best low end by number of workers
    for done, candidate in enumerate(left):
        tell(f"{len(part):,} requests", done, len(left))
        result, total = results[candidate], candidate.all_cards
        if result.bound >= shown.get(total, 0.0):
            kept.append(candidate)
            _take(result, _run(profiles[candidate], part, candidate, options), goals, len(part), seed)
            shown[total] = max(shown.get(total, 0.0), result.low)
    return kept


def _run(profile: Profile, sent: Sequence[Sent], one: Candidate, options: RunOptions) -> SimulatedOutcome:
    return Simulator(profile, one.workers, sent, options_for(options, one)).run()


def options_for(options: RunOptions, one: Candidate) -> RunOptions:
    return replace(options, step_tokens=one.step_tokens, seqs_max=one.seqs_max, stall_share=one.stall_share)


def _load_kept(profile: Profile, sent: Sequence[Sent], one: Candidate, goals: Goals, options: RunOptions) -> float:
    """Returns the multiple of the load up to which a candidate keeps the SLO that it does not keep at this load."""
    low, high = 0.0, 1.0
    for _ in range(LOAD_STEPS):
        middle = (low + high) / 2
        keeps = _run(profile, Change(load=middle).applied(sent), one, options).attainment(goals) >= goals.percentile
        low, high = (middle, high) if keeps else (low, middle)
    return low


def _take(result: Scored, outcome: SimulatedOutcome, goals: Goals, requests: int, seed: int) -> None:
    good, strain = outcome.good(goals), outcome.strain(goals)
    result.requests, result.attainment = requests, float(good.mean())
    result.strain = float(np.quantile(strain, goals.percentile, method="lower"))
    result.drawn = _draws(outcome, good.astype(float), seed)
    result.requests_per_s = len(good) / outcome.span_s if outcome.clients else 0.0
    result.low, result.high = (float(value) for value in np.quantile(result.drawn, (0.05, 0.95)))
    result.figures = {
        metric: dict(zip(("p50", "p90", "p99"), outcome.percentiles(metric, (0.5, 0.9, 0.99)), strict=True))
        for metric in ("ttft_ms", "tpot_ms", "itl_ms")
    }
    result.prefill_busy, result.decode_busy = outcome.prefill_busy, outcome.decode_busy
    result.batch_mean, result.link_busy = outcome.batch_mean, outcome.link_busy


def _draws(outcome: SimulatedOutcome, values: Floats, seed: int, draws: int = DRAWS) -> Floats:
    """Returns means of `values` over drawn windows; for sessions, over drawn clients. The same seed draws the same."""
    clients = np.array(outcome.clients)
    parts = [np.flatnonzero(clients == one) for one in np.unique(clients)] or windows(outcome.at_s, WINDOWS)
    sums = np.array([values[part].sum() for part in parts])
    sizes = np.array([len(part) for part in parts])
    chosen = np.random.default_rng([seed, 2]).integers(len(parts), size=(draws, len(parts)))
    return np.asarray(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1))


def _best_half(left: Sequence[Candidate], results: dict[Candidate, Scored], budget: int) -> list[Candidate]:
    """Returns the better half of the candidates with `budget` workers, and the best few of each smaller number, with and
    without mixed workers."""
    order = sorted(left, key=lambda one: results[one].rank())
    own = [one for one in order if one.all_cards == budget]
    kept = own[: max(-(-len(own) // 2), FULL_MAX)]
    seen: Counter[tuple[int, bool]] = Counter()
    for one in order:
        kind = one.all_cards, bool(one.workers.mixed)
        seen[kind] += 1
        if seen[kind] <= OF_EACH_MAX and one not in kept:
            kept.append(one)
    return kept


def _run_the_best(
    order: Sequence[Candidate], run: Callable[[Candidate], Scored], serves: Callable[[Candidate], float], goals: Goals
) -> None:
    """Runs the whole trace for the first candidates of this order; for the best of some numbers of workers, which shows how
    goodput grows; and for the smallest candidates that are as good as the best, or keep the SLO too. `serves`: attainment on
    an excerpt, which is higher than on the whole trace under overload."""
    found = [run(one) for one in order[:FULL_MAX]]
    order = [one for one in order if serves(one) >= CONTENDS * serves(order[0])]
    totals = sorted({one.all_cards for one in order})
    for total in totals[:: -(-len(totals) // CURVE_MAX)]:
        for mixed in (False, True):
            of_kind = (one for one in order if (one.all_cards, bool(one.workers.mixed)) == (total, mixed))
            found += [run(one) for one in islice(of_kind, 1)]
    best = max(found, key=lambda one: one.attainment)
    _fewest(order, best, run, lambda one: best.attainment - one.attainment <= error(best, one))
    if best.attainment >= goals.percentile:
        _fewest(order, best, run, lambda one: one.attainment >= goals.percentile)


def _find_limits(
    ranked: Sequence[Scored],
    profiles: Mapping[Candidate, Profile],
    sent: Sequence[Sent],
    goals: Goals,
    options: RunOptions,
    tell: Tell,
) -> None:
    part: Sequence[Sent] = sent
    for done, one in enumerate(ranked):
        tell("what limits", done, len(ranked))
        if one.attainment < goals.percentile:
            workers, chosen = one.candidate.workers, options_for(options, one.candidate)
            one.binds, one.limit_gain = limit_of(profiles[one.candidate], workers, part, goals, chosen)
        part = excerpt(sent, LIMIT_REQUESTS)


def _fewest(
    order: Sequence[Candidate], best: Scored, run: Callable[[Candidate], Scored], is_enough: Callable[[Scored], bool]
) -> None:
    """Searches by bisection for the least number of workers whose best candidate is enough; runs those that it tries."""
    low, high = min(one.all_cards for one in order), best.candidate.all_cards
    while low < high:
        middle = (low + high) // 2
        one = next((one for one in order if one.all_cards == middle), None)
        if one is not None and is_enough(run(one)):
            high = middle
        else:
            low = middle + 1


def near_best(full: Sequence[Scored]) -> list[Scored]:
    """Returns the candidates that are not worse than the best by more than the error."""
    best = max(full, key=lambda one: one.attainment)
    return [one for one in full if best.attainment - one.attainment <= error(best, one)]


def recommended(full: Sequence[Scored], percentile: float) -> Scored:
    """Returns the cheapest of the candidates near the best that keep the SLO, by cost or number of workers; of equal ones, the
    one that stays furthest below its limits. If none keeps the SLO, fewer workers are no gain: returns the one near the best
    that keeps it up to the highest load, and of equal ones the cheapest."""
    near = near_best(full)
    keeping = [one for one in near if one.attainment >= percentile]
    if keeping:
        return min(keeping, key=lambda one: (one.price, one.strain, -one.attainment))
    return max(near, key=lambda one: (one.load_kept, -one.price, one.attainment))


def error(one: Scored, other: Scored) -> float:
    """Returns the error of the difference between two candidates' attainment: 90 % of the draws lie within it."""
    return max(_half_width(one.drawn - other.drawn), ERROR_MIN)


def _half_width(differences: Floats) -> float:
    return float(np.quantile(np.abs(differences - differences.mean()), 0.9))


def _probabilities(
    outcomes: dict[Candidate, list[SimulatedOutcome]],
    results: dict[Candidate, Scored],
    profiles: Mapping[Candidate, Profile],
    sent: Sequence[Sent],
    goals: Goals,
    options: RunOptions,
    seed: int,
) -> None:
    """Computes how often each candidate would be recommended, over drawn windows and scaled step times."""
    best = recommended([results[one] for one in outcomes], goals.percentile).candidate
    close = [best, *sorted(outcomes.keys() - {best}, key=lambda one: results[one].rank())[:1]]
    rng = np.random.default_rng([seed, 3])
    for _ in range(FULL_RUNS - 1):
        factors = np.exp(rng.normal(0.0, profiles[best].run_sigma, 2)).tolist()
        part = excerpt(sent, max(len(sent) // 4, REQUESTS_MIN))
        for one in close:
            outcomes[one].append(_run(profiles[one].scaled(*factors), part, one, options))
    for run in range(FULL_RUNS):
        having = {one: found[run] for one, found in outcomes.items() if run < len(found)}
        draws = np.array([_draws(o, o.good(goals).astype(float), seed + run) for o in having.values()])
        near = np.array([_draws(o, np.minimum(o.strain(goals), 10.0), seed + run) for o in having.values()])
        least = np.array([[max(_half_width(a - b), ERROR_MIN) for b in draws] for a in draws])
        prices = np.array([results[one].price for one in having])
        kept = np.array([[results[one].load_kept] for one in having])
        top = np.argmax(draws, axis=0)
        ties = draws.max(axis=0) - draws <= least[top].T
        values = 1e3 * kept + draws if kept.any() else -1e3 * prices[:, None] / prices.min() - near
        worth = np.where(ties, values, -np.inf)
        chosen = np.argmax(worth, axis=0)
        for place, one in enumerate(having):
            results[one].probability += float((chosen == place).mean()) / FULL_RUNS
