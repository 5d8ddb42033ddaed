"""Fits a profile to measured steps, gaps and transfers, piecewise, with the residuals. Pure.

Slopes over context and KV tokens come from samples of equal counts (within-group least squares), so that a curve through the
medians need not be linear in the count. Medians are used because a measurement on a machine with other work has outliers
upwards."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from math import log, sqrt
from statistics import fmean, median, variance
from typing import NamedTuple

from lab.profile import ControlCost, Curve, DecodeCost, HostCost, PrefillCost, Residuals, TransferCost
from proto.errors import CrossdockError

SIGMA_MIN, SIGMA_MAX = 0.01, 0.25
GROUP_MAX = 150  # samples of one size that make a slope
APART_MIN = 0.25  # of the larger number of reads, between two samples: with less, the slope is noise


class FitError(CrossdockError):
    """Too little was measured for a profile."""


class StepSample(NamedTuple):
    """One prefill step, or the mean of one decode batch's steps."""

    size: int  # prompt tokens of the step, or sequences of the batch
    reads: float  # pairs of tokens that attend to each other, or KV tokens read
    ms: float
    round: int = 0


class HandOver(NamedTuple):
    last_tokens: int  # of the prompt's last step, whose transfer prefill cannot hide
    bytes_per_token: float
    ms: float


class Outside(NamedTuple):
    """The part of a first token's time that was no prefill step."""

    prompt_tokens: int
    ms: float
    round: int = 0


@dataclass
class Samples:
    prefill: list[StepSample] = field(default_factory=list)
    prefill_beside: list[StepSample] = field(default_factory=list)  # streams ran on decode workers of the host
    decode: list[StepSample] = field(default_factory=list)
    decode_beside: list[tuple[StepSample, float]] = field(default_factory=list)
    """Decode steps while prompts were computed on prefill workers of the same host, each with the share of its time in which
    they were."""
    hand_overs: list[HandOver] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    step_gaps_ms: list[float] = field(default_factory=list)
    second_token_ms: list[tuple[int, float]] = field(default_factory=list)
    """Streams that ran alone: tokens of the prompt's last step, and how much longer the first gap was than the later ones."""
    core: list[tuple[int, float]] = field(default_factory=list)
    """Sequences of a batch, and core time of the control processes for each of its steps, in ms."""

    def add(self, others: "Samples") -> None:
        for each in fields(self):
            getattr(self, each.name).extend(getattr(others, each.name))


def slope(samples: Iterable[StepSample]) -> float:
    """Returns ms for each read, at least 0: the median slope between two samples within each size (Theil and Sen), then the
    median over sizes. So neither single slow steps nor one disturbed size change it."""
    groups: dict[int, list[StepSample]] = defaultdict(list)
    for one in samples:
        groups[one.size].append(one)
    found: list[float] = []
    for group in groups.values():
        some = group[:: -(-len(group) // GROUP_MAX)]
        between = [(b.ms - a.ms) / (b.reads - a.reads) for a, b in combinations(some, 2) if _are_apart(a, b)]
        if between:
            found.append(median(between))
    return max(median(found), 0.0) if found else 0.0


def _are_apart(a: StepSample, b: StepSample) -> bool:
    return abs(b.reads - a.reads) > APART_MIN * max(a.reads, b.reads)


def curve(samples: Sequence[StepSample], per_read: float) -> Curve:
    """Returns the curve through the medians. Where they would fall, it goes through their means instead (isotonic regression
    by pooling adjacent violators)."""
    if not samples:
        raise FitError("no step was measured; see the logs of the workers")
    groups: dict[int, list[float]] = defaultdict(list)
    for one in samples:
        groups[one.size].append(one.ms - per_read * one.reads)
    at = sorted(groups)
    return Curve(tuple(float(count) for count in at), tuple(rising([max(median(groups[count]), 1e-3) for count in at])))


def rising(values: Iterable[float]) -> list[float]:
    """Replaces values that fall by their means."""
    pools = list[list[float]]()
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [fmean(pool) for pool in pools for _ in pool]


def fitted(samples: Sequence[StepSample]) -> tuple[Curve, float, Residuals]:
    # Slow samples in a group would change the slope, so it is fitted twice, the second time without outliers.
    per_read = slope(samples)
    line = curve(samples, per_read)
    near = [one for one in samples if abs(one.ms / (line(one.size) + per_read * one.reads) - 1) < 0.25]
    if len(near) > len(samples) / 2:
        per_read = slope(near)
        line = curve(samples, per_read)
    residuals = [one.ms / (line(one.size) + per_read * one.reads) - 1 for one in samples]
    return line, per_read, Residuals.of(residuals)


def prefill_cost(samples: Sequence[StepSample]) -> PrefillCost:
    return PrefillCost(*fitted(samples))


def decode_cost(samples: Sequence[StepSample]) -> DecodeCost:
    return DecodeCost(*fitted(samples))


def beside(samples: Iterable[tuple[StepSample, float]], cost: PrefillCost | DecodeCost) -> float:
    """Returns how many times as long steps take beside work of the other role, at least 1. Each sample has the share of its
    time in which there was such work."""
    ratios = [1 + (one.ms / cost.step_ms(one.size, one.reads) - 1) / busy for one, busy in samples]
    return max(median(ratios), 1.0) if ratios else 1.0


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope through the medians of equal x, both at least 0."""
    groups: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        groups[x].append(y)
    middle = [(x, median(values)) for x, values in groups.items()]
    if not middle:
        return 0.0, 0.0
    mean_x, mean_y = fmean(x for x, _ in middle), fmean(y for _, y in middle)
    below = sum((x - mean_x) ** 2 for x, _ in middle)
    rise = max(sum((x - mean_x) * (y - mean_y) for x, y in middle) / below, 0.0) if below else 0.0
    begin = mean_y - rise * mean_x
    if begin >= 0:
        return begin, rise
    return 0.0, max(sum(x * y for x, y in middle) / sum(x * x for x, _ in middle), 0.0)


def transfer_cost(samples: Sequence[HandOver], transport: str) -> TransferCost:
    if not samples:
        return TransferCost(transport=transport)
    latency_ms, per_token = line_through([(one.last_tokens, one.ms) for one in samples])
    each = median(one.bytes_per_token for one in samples)
    residuals = [one.ms / max(latency_ms + per_token * one.last_tokens, 1e-3) - 1 for one in samples]
    return TransferCost(
        latency_ms, each / per_token if per_token > 0 else 1e9, each, transport, Residuals.of(residuals)
    )


def host_cost(samples: Samples, transfer: TransferCost) -> HostCost:
    request_ms, token_ms = line_through([(one.prompt_tokens, one.ms) for one in samples.outside])
    residuals = [one.ms / max(request_ms + token_ms * one.prompt_tokens, 1e-3) - 1 for one in samples.outside]
    gap_ms = max(median(samples.step_gaps_ms), 0.0) if samples.step_gaps_ms else 0.0
    joins = [gap - transfer.ms(last_tokens) for last_tokens, gap in samples.second_token_ms]
    join_ms = max(median(joins), 0.0) if joins else 0.0
    return HostCost(request_ms, token_ms, gap_ms, join_ms, Residuals.of(residuals))


def control_cost(samples: Sequence[tuple[int, float]]) -> ControlCost:
    """`samples`: sequences of a batch, and core time for each of its steps, in ms."""
    return ControlCost(*line_through([(float(count), ms) for count, ms in samples]))


def run_spread(parts: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Returns how far times of another run may lie from the fit, as the standard deviation of their logarithm. `parts` has one
    list each for prefill steps, decode steps and requests, of pairs (round, measured / fitted). An error that is the same in
    all rounds does not show here."""
    squares, count = 0.0, 0
    for part in parts:
        rounds: dict[int, list[float]] = defaultdict(list)
        for number, ratio in part:
            rounds[number].append(ratio)
        logs = [log(median(values)) for values in rounds.values() if median(values) > 0]
        if len(logs) > 1:
            # A new run differs from the truth as much as each round did, and the mean of the rounds differs from it too.
            squares += variance(logs) * (1 + 1 / len(logs))
            count += 1
    return min(max(sqrt(squares / count), SIGMA_MIN), SIGMA_MAX) if count else 0.03


def step_ratios(samples: Iterable[StepSample], cost: PrefillCost | DecodeCost) -> list[tuple[int, float]]:
    return [(one.round, one.ms / cost.step_ms(one.size, one.reads)) for one in samples]


def outside_ratios(samples: Iterable[Outside], cost: HostCost) -> list[tuple[int, float]]:
    return [
        (one.round, one.ms / max(cost.request_ms + cost.request_token_ms * one.prompt_tokens, 1e-3)) for one in samples
    ]
