"""The search for the best workers: rungs of longer and longer excerpts, then the whole trace. Pure.

Candidates have one order: the load up to which they keep the SLO, at most the traffic's own; then the requests that keep it
at that load; then cost, or workers without costs. Two of them are equal where the difference is within the error, which is
that of drawn windows of the trace, the same for both, and never more than `EQUAL_MAX`.

1. All candidates play an excerpt. Where none keeps the SLO, the best few play lower loads until they keep it, and another one
   drops out when it misses the load that these keep.
2. The best few, and the best of the next smaller numbers of workers, play a longer excerpt.
3. The recommended one plays the whole trace, and so does every other one that may still be better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, sqrt
from typing import Final, NamedTuple, TypeVar

import numpy as np

from lab.advise import Workers
from lab.goals import Goals
from lab.limits import NO_LIMIT, Limit, limit_of
from lab.play.options import RunOptions
from lab.play.outcome import Bools, Floats, PlayedOutcome
from lab.play.plays import Each, Play, outcome_of
from lab.play.request import Sent
from lab.profile import Profile
from lab.traffic import at_load, excerpt, window_s, windows

LAYOUTS_MAX: Final = 12
"""Layouts of one number of workers, and numbers of workers, at even distances. The neighbours of the best one follow."""
KEPT_MAX: Final = 6  # candidates that play the second excerpt, beside those of the next smaller numbers of workers
SAFEST: Final = 2  # candidates furthest below their limits, that play it, too: the first excerpt may be too easy
WHOLE_MAX: Final = 6  # candidates that play the whole trace
WHOLE_REQUESTS: Final = 20_000  # of a longer trace, as many are played as "the whole"
LIMIT_REQUESTS: Final = 5_000
EQUAL_MAX: Final = 0.04  # by which two candidates that are taken to be equal may differ, of the better one
ERROR_MIN: Final = 0.002
STEPS: Final = (1.5, 1.15, 1.03)  # on each rung: distance of the load that is kept from one that is not
LOAD_MIN: Final = 1 / 64  # a candidate that does not keep the SLO at this part of the load keeps it at none
LOADS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)
HEADROOM_MAX: Final = 4.0
DRAWS: Final = 400
WINDOWS: Final = 36


@dataclass(frozen=True)
class Candidate:
    workers: Workers
    step_tokens: int
    seqs_max: int = 0  # 0: the profile's
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
    """A candidate on one part of the traffic."""

    candidate: Candidate
    percentile: float
    price: float = 0.0  # its cost, or its workers
    requests: int = 0  # that it played
    shares: dict[float, Floats] = field(default_factory=dict, repr=False)
    """The share of requests that keep the SLO, by load: first of all requests, then of drawn windows."""
    turns_per_s: dict[float, float] = field(default_factory=dict)
    """Turns per second of sessions, by load: they come faster if answers do."""
    outcome: PlayedOutcome | None = field(default=None, repr=False)  # at the traffic's own load
    strain: float = inf  # wanted percentile of requests' nearness to their limits; 1 is the limit
    probability: float = 0.0
    limit: Limit = NO_LIMIT
    whole: bool = False

    @property
    def attainment(self) -> float:
        return float(self.shares[1.0][0])

    @property
    def loads_kept(self) -> Floats:
        """The multiple of the load up to which it keeps the SLO, for all requests and then for each draw."""
        loads = sorted(self.shares)
        share = np.array([self.shares[load] for load in loads])
        keeps = np.cumprod(share >= self.percentile, axis=0).sum(axis=0)
        at = np.arange(share.shape[1])
        low, high = np.maximum(keeps - 1, 0), np.minimum(keeps, len(loads) - 1)
        below, above = np.log(loads)[low], np.log(loads)[high]
        fall = np.maximum(share[low, at] - share[high, at], 1e-9)
        between = np.where(high > low, (share[low, at] - self.percentile) / fall, 0.0) * (above - below)
        missed = share[0] / self.percentile * loads[0]
        return np.asarray(np.where(keeps > 0, np.exp(below + np.clip(between, 0.0, above - below)), missed))

    @property
    def load_kept(self) -> float:
        """0 if it kept the SLO at no load that it played."""
        return float(self.loads_kept[0]) if self.missed_load > min(self.shares) else 0.0

    @property
    def missed_load(self) -> float:
        """The lowest load that it played without keeping the SLO."""
        return min((load for load, share in self.shares.items() if share[0] < self.percentile), default=inf)

    @property
    def costs(self) -> tuple[float, int, float]:
        """The order of equal candidates: the cheapest first, of these the one whose workers have the fewest cards each, then
        the one that stays furthest below its limits."""
        return self.price, sum(self.candidate.cards), self.strain

    def rank(self) -> tuple[float, float, tuple[float, int, float]]:
        kept = min(float(self.loads_kept[0]), 1.0)
        return -round(kept, 3), -round(self.attainment, 3), self.costs

    def next_load(self, guess: float, most: float, step: float) -> float | None:
        """The load to play next in order to find the one that is just kept: the guess, from there in strides that double, and
        then by bisection. None: it is known."""
        kept = max((load for load in self.shares if load < self.missed_load), default=0.0)
        missed = self.missed_load
        if kept < guess < missed:
            return guess
        if not kept:
            return None if missed <= LOAD_MIN else missed / step * min(missed / guess, 1.0)
        if kept >= most or missed / kept <= step:
            return None
        middle = most if missed == inf else sqrt(kept * missed)
        return min(kept * step * kept / guess, middle) if kept >= guess else middle


@dataclass
class Found:
    goals: Goals
    budget: int
    first: list[Scored]  # all candidates, on the first excerpt
    second: list[Scored]  # the better ones, on the second
    ranked: list[Scored]  # on the whole trace: the recommended one, then the best first
    requests_per_s: float
    at_loads: dict[float, float]  # the share of requests that keep the SLO with the recommended one, by load
    rates: dict[float, float]  # of requests per second that come to the recommended one, by load
    part_requests: int  # of the excerpt that `second`, `at_loads` and `rates` come from
    headroom: float  # multiple of the load up to which the recommended one keeps the SLO

    has_costs: bool  # else a candidate's price is its number of workers

    @property
    def best(self) -> Scored:
        return self.ranked[0]

    def requests_per_s_of(self, one: Scored) -> float:
        return one.turns_per_s.get(1.0, self.requests_per_s)


@dataclass(frozen=True)
class Space:
    budget: int
    mixed: bool = True
    step_tokens: tuple[int, ...] = (256,)
    seqs_max: tuple[int, ...] = (0,)
    mixed_max: int = 0  # that there are cores for: each has its own in the model; 0: any number

    def profile_of(self, profile: Profile, one: Candidate) -> Profile:
        return profile

    def layouts(self, total: int) -> list[Workers]:
        found = [Workers(prefill, total - prefill) for prefill in range(1, total)]
        has_cores = not 0 < self.mixed_max < total
        return [*found, Workers(0, 0, total)] if self.mixed and has_cores else found

    def candidates(self) -> list[Candidate]:
        """Returns all candidates, or of many workers some at even distances."""
        layouts = [one for total in spread(range(1, self.budget + 1)) for one in spread(self.layouts(total))]
        return [Candidate(*one) for one in product(layouts, self.step_tokens, self.seqs_max)]

    def around(self, one: Candidate) -> list[Candidate]:
        """Returns the candidates beside this one that `candidates` may have left out."""
        near, far = [], -(-self.budget // LAYOUTS_MAX)
        for total in range(max(one.workers.total - far, 1), min(one.workers.total + far, self.budget) + 1):
            near += [w for w in self.layouts(total) if abs(w.prefill - one.workers.prefill) <= far]
        return [replace(one, workers=workers) for workers in near] if far > 1 else []


T = TypeVar("T")


def spread(found: Sequence[T], most: int = LAYOUTS_MAX) -> list[T]:
    """Returns at most so many of these at even distances, the first and the last one always."""
    every = max((len(found) - 1) / (most - 1), 1.0)
    return [found[round(place * every)] for place in range(min(len(found), most))]


class Effort(NamedTuple):
    """How many requests the rungs have."""

    first: int = 600
    second: int = 3_600
    whole: int = WHOLE_REQUESTS
    together: int = 36_000  # that all candidates together play on the first rung, at least

    def parts(self, candidates: int) -> tuple[int, int, int]:
        first = min(max(self.first, self.together // max(candidates, 1)), self.second)
        return first, self.second, self.whole


FULL: Final = Effort()
QUICK: Final = Effort(150, 700, 700, 7_000)


Tell = Callable[[str, int, int], None]  # (name of the work, steps done, all steps), for a progress bar


@dataclass
class Lab:
    """Plays candidates on parts of the traffic."""

    profile: Profile
    goals: Goals
    space: Space
    options: RunOptions
    each: Each
    tell: Tell
    seed: int

    def scored(self, found: Sequence[Candidate], sent: Sequence[Sent]) -> list[Scored]:
        """Plays the traffic as it is."""
        scored = []
        for one in found:
            price = self.space.profile_of(self.profile, one).cost_per_hour(*one.workers) or one.all_cards
            scored.append(Scored(one, self.goals.percentile, price, len(sent)))
        self.play(sent, [(one, 1.0) for one in scored])
        return scored

    def play_of(self, one: Candidate, sent: Sequence[Sent]) -> Play:
        own = self.space.profile_of(self.profile, one)
        return Play(own, one.workers, sent, options_for(self.options, one))

    def play(self, sent: Sequence[Sent], asked: Sequence[tuple[Scored, float]]) -> None:
        at_loads = {load: at_load(sent, load) if load != 1 else sent for _, load in asked}
        plays = [self.play_of(one.candidate, at_loads[load]) for one, load in asked]
        what = f"{len(sent):,} requests"
        self.tell(what, 0, len(plays))
        for done, ((one, load), outcome) in enumerate(zip(asked, self.each(outcome_of, plays), strict=True)):
            self.tell(what, done + 1, len(plays))
            one.shares[load] = draws(outcome, outcome.good(self.goals).astype(float), self.seed)
            if outcome.clients:
                one.turns_per_s[load] = len(outcome.at_s) / outcome.span_s
            if load == 1:
                one.outcome = outcome
                one.strain = float(np.quantile(outcome.strain(self.goals), self.goals.percentile, method="lower"))

    def find_loads(
        self, sent: Sequence[Sent], found: Sequence[Scored], guesses: dict[Candidate, float], most: float, step: float
    ) -> None:
        """Plays other loads until the one that is just kept is known, for the candidates that may be among the best few."""
        some = sorted(found, key=lambda one: (-one.attainment, -one.price))[: KEPT_MAX + 2]
        while True:
            kept = sorted((one.load_kept for one in found), reverse=True)
            least = kept[min(KEPT_MAX, len(kept)) - 1]
            some = list(found) if least else some
            asked = []
            for one in some:
                load = one.next_load(guesses.get(one.candidate, 1.0), most, step)
                if load is not None and one.missed_load > least:
                    asked.append((one, load if one.load_kept or not least else least))
            if not asked and len(some) < len(found):
                some = list(found)
                continue
            if not asked:
                return
            self.play(sent, asked)


def search(
    profile: Profile,
    sent: Sequence[Sent],
    goals: Goals,
    space: Space,
    options: RunOptions | None = None,
    *,
    effort: Effort = FULL,
    each: Each = map,
    tell: Tell = lambda what, done, of: None,
    seed: int = 0,
) -> Found:
    """`sent` is not empty. `each`: runs many plays, perhaps on several cores."""
    lab = Lab(profile, goals, space, options or RunOptions(), each, tell, seed)
    candidates = space.candidates()
    least_s = window_s(sent, goals.default)
    parts = [excerpt(sent, count, least_s) for count in effort.parts(len(candidates))]
    first = lab.scored(candidates, parts[0])
    _compare(lab, parts[0], first, {}, STEPS[0])
    known = {one.candidate for one in first}
    if near := [one for one in space.around(recommended(first).candidate) if one not in known]:
        first += lab.scored(near, parts[0])
        _compare(lab, parts[0], first, {}, STEPS[0])
    second = [one for one in first if one.candidate in _the_best(first)]
    if len(parts[1]) > len(parts[0]):
        second = lab.scored([one.candidate for one in second], parts[1])
        _compare(lab, parts[1], second, _loads_of(first), STEPS[1])
    full = _on_the_whole(lab, parts[2], second) if len(parts[2]) > len(parts[1]) else second
    best = recommended(full)
    ranked = [best, *sorted((one for one in full if one is not best), key=Scored.rank)][:WHOLE_MAX]
    for one in ranked:
        one.whole = True
    _probabilities(ranked)
    own = next(one for one in second if one.candidate == best.candidate)
    per_s = len(sent) / max(sent[-1].at_s - sent[0].at_s, 1e-9)
    lab.play(parts[1], [(own, load) for load in LOADS if load not in own.shares])
    at_loads = {load: float(own.shares[load][0]) for load in LOADS}
    rates = {load: own.turns_per_s.get(load, load * per_s) for load in LOADS}
    _loads_kept(lab, parts, ranked, second, STEPS[1] if effort is not QUICK else STEPS[0])
    _loads_kept(lab, parts, [best], second, STEPS[1])
    limits = parts[2] if len(parts[2]) <= LIMIT_REQUESTS else parts[1]
    for done, one in enumerate(ranked if effort is not QUICK else [best]):
        tell("what limits", done, len(ranked))
        if one.attainment < goals.percentile:
            outcome = one.outcome if one.requests == len(limits) else None
            one.limit = limit_of(lab.play_of(one.candidate, limits), goals, each, outcome)
    has_costs = profile.cost_per_hour(1, 1, 0) > 0
    return Found(
        goals, space.budget, first, second, ranked, per_s, at_loads, rates, len(parts[1]), best.load_kept, has_costs
    )


def options_for(options: RunOptions, one: Candidate) -> RunOptions:
    return replace(options, step_tokens=one.step_tokens, seqs_max=one.seqs_max)


def _loads_of(found: Sequence[Scored]) -> dict[Candidate, float]:
    return {one.candidate: min(max(float(one.loads_kept[0]), LOAD_MIN), 1.0) for one in found}


def _compare(
    lab: Lab, sent: Sequence[Sent], found: Sequence[Scored], guesses: dict[Candidate, float], step: float
) -> None:
    """Where no candidate keeps the SLO, finds the loads up to which the best ones keep it. `guesses`: those that were kept on a
    shorter excerpt."""
    if max(one.attainment for one in found) < lab.goals.percentile:
        lab.find_loads(sent, found, guesses, 1.0, step)


def _the_best(found: Sequence[Scored]) -> list[Candidate]:
    """Returns the recommended candidate and those that would be without it, the first ones of all, the best of each of the next
    smaller numbers of workers, and the ones that stay furthest below their limits."""
    order = sorted(found, key=Scored.rank)
    left, chosen = list(found), [one.candidate for one in order[: KEPT_MAX // 2]]
    best = recommended(found)
    while left and len(set(chosen)) < KEPT_MAX:
        following = recommended(left)
        left = [one for one in left if one is not following]
        chosen.append(following.candidate)
    by_kind: dict[tuple[int, bool], Candidate] = {}
    for one in order:
        by_kind.setdefault((one.candidate.all_cards, bool(one.candidate.workers.mixed)), one.candidate)
    most = best.candidate.all_cards
    chosen += [one for (cards, _), one in by_kind.items() if 0.6 * most <= cards < most]
    chosen += [one.candidate for one in sorted(found, key=lambda one: one.strain)[:SAFEST]]
    return list(dict.fromkeys([best.candidate, *chosen]))


def _on_the_whole(lab: Lab, sent: Sequence[Sent], second: Sequence[Scored]) -> list[Scored]:
    """Plays the whole trace with the recommended candidate, and with all that may be better by their excerpts."""
    full, guesses = list[Scored](), _loads_of(second)
    best = recommended(second)
    chosen = [best, *sorted((one for one in second if one is not best), key=Scored.rank)[:1]]
    while chosen:
        more = lab.scored([one.candidate for one in chosen], sent)
        full += more
        _compare(lab, sent, full, guesses, STEPS[2])
        best, played = recommended(full), {one.candidate for one in full}
        left = sorted((one for one in second if one.candidate not in played), key=Scored.rank)
        chosen = [one for one in left if recommended([best, one]) is one][: WHOLE_MAX - len(full)][:2]
    return full


def _loads_kept(
    lab: Lab, parts: Sequence[Sequence[Sent]], rows: Sequence[Scored], second: Sequence[Scored], step: float
) -> None:
    """Finds the loads up to which these keep the SLO, which may be more than the traffic's own. Where the whole trace is longer
    than the second excerpt, that tells where to begin."""
    guesses: dict[Candidate, float] = {}
    if len(parts[2]) > len(parts[1]):
        names = {one.candidate for one in rows}
        same = [one for one in second if one.candidate in names]
        lab.find_loads(parts[1], same, guesses, HEADROOM_MAX, step)
        guesses = {one.candidate: one.load_kept or 1.0 for one in same}
    lab.find_loads(parts[2], rows, guesses, HEADROOM_MAX, step)


def recommended(found: Sequence[Scored]) -> Scored:
    """Returns the best one in the order of this module; of equal ones that with the least `costs`. One that does not keep
    the SLO is never equal to one that does."""
    equal = [one for one in found if one.attainment >= one.percentile]
    if not equal:
        equal = _equal_to_best(found, lambda one: one.loads_kept)
    equal = _equal_to_best(equal, lambda one: one.shares[1.0])
    return min(equal, key=lambda one: one.costs)


def _equal_to_best(found: Sequence[Scored], value: Callable[[Scored], Floats]) -> list[Scored]:
    best = max((value(one) for one in found), key=lambda values: float(values[0]))
    return [one for one in found if best[0] - value(one)[0] <= error(best, value(one))]


def error(best: Floats, other: Floats) -> float:
    """Returns the difference up to which two candidates are equal: 90 % of the draws of the difference lie within it."""
    differences = best[1:] - other[1:]
    half = float(np.quantile(np.abs(differences - differences.mean()), 0.9))
    return max(min(half, EQUAL_MAX * float(best[0])), ERROR_MIN)


def draws(outcome: PlayedOutcome, values: Floats, seed: int) -> Floats:
    """Returns the mean of `values`, and their means over drawn windows; for sessions, over drawn clients. The same seed draws
    the same."""
    clients = np.array(outcome.clients)
    if len(clients):  # requests of no session, of which each is a client, are drawn by windows
        _, place, turns = np.unique(clients, return_inverse=True, return_counts=True)
        clients = np.where(turns[place] == 1, -1 - np.arange(len(clients)) * WINDOWS // len(clients), clients)
    parts = [np.flatnonzero(clients == one) for one in np.unique(clients)] or windows(outcome.at_s, WINDOWS)
    sums = np.array([values[part].sum() for part in parts])
    sizes = np.array([len(part) for part in parts])
    chosen = np.random.default_rng([seed, 2]).integers(len(parts), size=(DRAWS, len(parts)))
    drawn = sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    return np.asarray(np.concatenate(([values.mean()], drawn)))


def _probabilities(found: Sequence[Scored]) -> None:
    """Computes how often each candidate would be recommended of these, by the rules of `recommended`, over drawn windows."""
    shares, loads = (
        np.array(values) for values in zip(*((one.shares[1.0], one.loads_kept) for one in found), strict=True)
    )
    keeps = shares >= found[0].percentile
    equal = np.where(keeps.any(axis=0), keeps, _equal_by_draw(loads, np.ones_like(keeps)))
    equal = _equal_by_draw(shares, equal)
    order = sorted(range(len(found)), key=lambda place: found[place].costs)
    chosen = np.array(order)[np.argmax(equal[order], axis=0)]  # the first equal one in this order
    for place, one in enumerate(found):
        one.probability = float((chosen[1:] == place).mean())


def _equal_by_draw(values: Floats, among: Bools) -> Bools:
    """Returns which candidates (rows) are equal in each draw (columns) to the best of those `among`."""
    least = np.array([[error(best, other) for other in values] for best in values])
    of_those = np.where(among, values, -inf)
    return np.asarray(of_those.max(axis=0) - of_those <= least[np.argmax(of_those, axis=0)].T)
