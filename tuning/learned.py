"""Corrects a profile by how long steps take in production. Pure.

    learner = Learner(profile)
    profile = learner.look(report, model)     every few seconds, with a coordinator's `StatusReport`
    learned = correct(profile, samples)       once, with the samples of an event log

The time for each read (pair of tokens in prefill, KV token in decode) is fitted again if some steps of like size read much
more than others: as the median of the slopes of pairs, after Theil and Sen. Else it is scaled. The rest of a step's time is
scaled by the median of measured / expected of all samples of like size. Between sizes the factor is interpolated; beyond them
the nearest one holds. Medians are used so that a quarter of the samples may have any value.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median, pstdev
from typing import Final, NamedTuple

import numpy as np

from proto.messages import Role
from proto.status import StatusReport
from tuning.fit import SIGMA_MAX, rising
from tuning.profile import Curve, DecodeCost, PrefillCost, Profile, Residuals

SAMPLES_MIN: Final = 32  # a role with fewer keeps its part of the profile
SIZE_SAMPLES_MIN: Final = 16  # a size (a power of two) with fewer has no factor of its own
SIZE_SAMPLES_MAX: Final = 512
PAIRS_MIN: Final = 24  # with fewer pairs of samples, the time for each read is only scaled
SPREAD_MIN: Final = 1 / 3  # by which one sample of a pair must read less than the other
FACTOR_MIN, FACTOR_MAX = 0.25, 4.0
KNOTS_RATIO: Final = 1.25  # between a size with a point of its own on the curve and all other points
ROUNDS: Final = 4
PERIODS: Final = 5
AGE_MS_MAX: Final = 3.6e6
ROLES: Final = (Role.PREFILL, Role.DECODE)


class StepTime(NamedTuple):
    """A step of a production worker, or the mean of some."""

    size: float  # prompt tokens of the step, or sequences of the batch: at least 1
    reads: float
    ms: float
    steps: int = 1
    at_s: float = 0.0
    slow: float = 1.0  # times as long as alone, because others use the host


class Correction(NamedTuple):
    """How one role's times are corrected."""

    curve: Curve
    per_read: float
    residuals: Residuals
    factor: float  # median of measured / expected
    sizes: tuple[tuple[float, float], ...]  # (size, factor of its samples), smallest first
    steps: int
    sigma: float  # of periods as a whole: standard deviation of the logarithm

    def words(self, role: Role) -> str:
        (small, first), (large, last) = self.sizes[0], self.sizes[-1]
        count = "tokens" if role is Role.PREFILL else "sequences"
        by_size = ""
        if abs(first - last) > 0.1:
            by_size = f"{first:.2f} at {small:.0f}, {last:.2f} at {large:.0f} {count}; "
        return f"{role.value} steps take {self.factor:.2f} times what the profile says ({by_size}{self.steps:,} steps)"


@dataclass(frozen=True)
class Learned:
    profile: Profile
    corrections: Mapping[Role, Correction] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Empty: nothing was corrected."""
        return ", ".join(one.words(role) for role, one in self.corrections.items())


def correct(profile: Profile, samples: Mapping[Role, Sequence[StepTime]]) -> Learned:
    """A role with too few samples stays as it is."""
    found = {role: _corrected(profile, role, samples.get(role, ())) for role in ROLES}
    return _applied(profile, {role: one for role, one in found.items() if one is not None})


class Learner:
    """Corrects the profile again and again. Keeps a role's last correction while there are too few samples of it, as after a
    restart of the coordinator."""

    def __init__(self, profile: Profile) -> None:
        self.learned = Learned(profile)
        self._base = profile

    def look(self, report: StatusReport, model: str) -> Profile:
        kept, crowded = dict(self.learned.corrections), crowded_roles(self._base, report, model)
        for one in report.step_times:
            if one.model == model and one.role in ROLES and one.role not in crowded:
                columns = zip(one.ages_ms, one.steps, one.sizes, one.reads, one.ms, strict=False)
                found = _corrected(self._base, one.role, [
                    StepTime(size, reads, ms, steps, -age_ms / 1000)
                    for age_ms, steps, size, reads, ms in columns if age_ms <= AGE_MS_MAX
                ])  # fmt: skip
                if found is not None:
                    kept[one.role] = found
        self.learned = _applied(self._base, {role: kept[role] for role in ROLES if role in kept})
        return self.learned.profile


def crowded_roles(profile: Profile, report: StatusReport, model: str) -> list[Role]:
    """Returns the roles of which some host has more workers than cores for them. Their steps take longer for that reason,
    which is no error of the profile."""
    workers = Counter((one.host, one.role) for one in report.workers if one.model == model)
    return [role for role in ROLES if is_crowded(profile, role, (n for (_, of), n in workers.items() if of is role))]


def is_crowded(profile: Profile, role: Role, workers: Iterable[int]) -> bool:
    """`workers`: of the role, on each host."""
    cores = profile.prefill_cores if role is Role.PREFILL else profile.decode_cores
    return 0 < cores < max(workers, default=0)


def _applied(profile: Profile, corrections: Mapping[Role, Correction]) -> Learned:
    changes: dict[str, PrefillCost | DecodeCost | float] = {}
    for role, one in corrections.items():
        kind = PrefillCost if role is Role.PREFILL else DecodeCost
        changes[role.value] = kind(one.curve, one.per_read, one.residuals)
    sigma = min(max((one.sigma for one in corrections.values()), default=0.0), SIGMA_MAX)
    if sigma > profile.run_sigma:
        changes |= {"run_sigma": sigma, "run_dof": PERIODS - 1}
    return Learned(profile.replaced(**changes), corrections)


# --- one role ---------------------------------------------------------------------------------------------------------


def _corrected(profile: Profile, role: Role, samples: Sequence[StepTime]) -> Correction | None:
    """The correction of one role; None: there are too few samples."""
    cost, per_read = (
        (profile.prefill, profile.prefill.context_ms)
        if role is Role.PREFILL
        else (profile.decode, profile.decode.kv_token_ms)
    )
    possible = [one for one in samples if one.size >= 1 and one.ms > 0]
    groups = _by_size(possible)
    usable = [one for group in groups for one in group]
    if len(usable) < SAMPLES_MIN:
        return None

    def ratio(one: StepTime) -> float:
        return one.ms / (one.slow * cost.step_ms(one.size, one.reads))  # type: ignore[arg-type]

    per_read = _per_read(cost.curve, per_read, median(map(ratio, usable)), groups)
    curve = _scaled(cost.curve, _factors(cost.curve, per_read, groups))
    residuals = [one.ms / (one.slow * (curve(one.size) + per_read * one.reads)) - 1 for one in usable]
    large = [group for group in groups if len(group) >= SIZE_SAMPLES_MIN] or [usable]
    return Correction(
        curve, per_read, Residuals.of(residuals), median(map(ratio, usable)),
        tuple((median(one.size for one in group), median(map(ratio, group))) for group in large),
        sum(one.steps for one in possible), _sigma(usable, residuals),
    )  # fmt: skip


def _by_size(samples: Iterable[StepTime]) -> list[list[StepTime]]:
    """Returns groups of like size, smallest first; a large group keeps only some of its samples."""
    groups: dict[int, list[StepTime]] = defaultdict(list)
    for one in samples:
        groups[int(one.size).bit_length()].append(one)
    return [groups[size][:: -(-len(groups[size]) // SIZE_SAMPLES_MAX)] for size in sorted(groups)]


def _clamped(factor: float) -> float:
    return min(max(factor, FACTOR_MIN), FACTOR_MAX)


def _size_factor(curve: Curve, per_read: float, group: Iterable[StepTime]) -> float:
    return _clamped(median((one.ms / one.slow - per_read * one.reads) / curve(one.size) for one in group))


def _factors(curve: Curve, per_read: float, groups: Sequence[Sequence[StepTime]]) -> list[tuple[float, float]]:
    """(size, factor on the curve there), smallest first."""
    large = [group for group in groups if len(group) >= SIZE_SAMPLES_MIN]
    large = large or [[one for group in groups for one in group]]
    return [(median(one.size for one in group), _size_factor(curve, per_read, group)) for group in large]


def _per_read(curve: Curve, per_read: float, factor: float, groups: Sequence[Sequence[StepTime]]) -> float:
    """ms for each read. Several rounds separate a higher or lower curve from a longer or shorter time for each read."""
    pairs = [
        (at, less, more)
        for at, group in enumerate(groups)
        for less, more in _halves(group)
        if more.reads - less.reads >= SPREAD_MIN * more.reads > 0
    ]
    found = _clamped(factor) * per_read
    if len(pairs) < PAIRS_MIN:
        return found
    most = median(more.ms / more.slow / more.reads for _, _, more in pairs)
    for _ in range(ROUNDS):
        factors = [_size_factor(curve, found, group) for group in groups]
        slopes = [
            (_rest(more, curve, factors[at]) - _rest(less, curve, factors[at])) / (more.reads - less.reads)
            for at, less, more in pairs
        ]
        found = min(max(_median(slopes, [(more.reads - less.reads) / more.ms for _, less, more in pairs]), 0.0), most)
    return found


def _halves(group: Iterable[StepTime]) -> Iterable[tuple[StepTime, StepTime]]:
    """Pairs each sample of the half that reads less with one of the other half."""
    order = sorted(group, key=lambda one: one.reads)
    half = len(order) // 2
    return zip(order[:half], order[len(order) - half :], strict=True)


def _rest(one: StepTime, curve: Curve, factor: float) -> float:
    return one.ms / one.slow - factor * curve(one.size)


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    order = sorted(zip(values, weights, strict=True))
    until = np.cumsum([weight for _, weight in order])
    return order[int(np.searchsorted(until, until[-1] / 2))][0]


def _scaled(curve: Curve, factors: Sequence[tuple[float, float]]) -> Curve:
    sizes, values = [log(size) for size, _ in factors], [factor for _, factor in factors]
    knots = list(curve.at)
    for size, _ in factors:
        if all(max(size / knot, knot / size) >= KNOTS_RATIO for knot in knots if knot > 0):
            knots.append(size)
    knots.sort()
    if knots[-1] < 2 * factors[-1][0]:
        # Beyond its last point the curve keeps its last slope, so that slope must not come from a change of the factor.
        knots.append(2 * knots[-1])
    scaled = [curve(knot) * float(np.interp(log(max(knot, 1.0)), sizes, values)) for knot in knots]
    return Curve(tuple(knots), tuple(rising(scaled)))


def _sigma(samples: Sequence[StepTime], residuals: Sequence[float]) -> float:
    order = sorted(zip((one.at_s for one in samples), residuals, strict=True))
    parts = [order[len(order) * at // PERIODS : len(order) * (at + 1) // PERIODS] for at in range(PERIODS)]
    return pstdev(log(1 + median(residual for _, residual in part)) for part in parts)


# --- both roles on one host -------------------------------------------------------------------------------------------


class BusyTimes:
    """When workers of one role were busy."""

    def __init__(self, spans_s: Iterable[tuple[float, float]]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before = [0.0]  # busy time before each span; the last entry is the sum
        for begin, end in sorted(spans_s):
            if self._ends and begin <= self._ends[-1]:
                self._before[-1] += max(end - self._ends[-1], 0.0)
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)
                self._before.append(self._before[-1] + end - begin)

    def share(self, begin_s: float, end_s: float) -> float:
        """Returns the busy share of the time between these two moments, 0 to 1."""
        return (self._until(end_s) - self._until(begin_s)) / (end_s - begin_s) if end_s > begin_s else 0.0

    def _until(self, at_s: float) -> float:
        at = bisect_right(self._begins, at_s)
        return self._before[at] - max(self._ends[at - 1] - at_s, 0.0) if at else 0.0
