"""How far the autopilot's model is from what is measured in the same minute. Pure.

    accuracy = Accuracy(profile, slo)
    accuracy.look(workers, status, now)         every few seconds; workers: None while one changes its role
    accuracy.error(now)                         medians of the last hour

Every `WINDOW_S` it takes the requests that came between `SETTLES_S` and `SETTLES_S + WINDOW_S` ago, if the ratio was the same
ever since. The model is given these requests and the queue that they found, so that its own error is seen, and not that of a
forecast of the traffic. Times are those that the coordinator measures: from a request's arrival there to the end of its
prompt, and to the end of its answer.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median
from typing import Final, NamedTuple

import msgspec

from lab.advise import QueueingModel, Slo, Traffic, Workers, interarrival_cv
from lab.profile import Profile
from proto.status import PredictionError, TrafficStatus

WINDOW_S: Final = 30.0
SETTLES_S: Final = 30.0  # that requests have to show how fast they are
KEPT_S: Final = 3_600.0
REQUESTS_MIN: Final = 8
_MS_MIN: Final = 0.01
_MS_MAX: Final = 1e7
_HALVINGS: Final = 32


class Figures(NamedTuple):
    """Measured or predicted figures; None: not measured."""

    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None
    slo_share: float | None


class _Look(NamedTuple):
    at: float
    workers: Workers
    waiting_tokens: int


class Accuracy:
    def __init__(self, profile: Profile, slo: Slo) -> None:
        self._slo = slo
        # The coordinator does not measure the time that the gateway adds.
        host = msgspec.structs.replace(profile.host, request_ms=0.0, request_token_ms=0.0)
        self._profile = msgspec.structs.replace(profile, host=host)
        self._looks: deque[_Look] = deque()  # of the last minute, all with the same workers
        self._compared_at: float | None = None
        self._errors: deque[tuple[float, tuple[float | None, ...]]] = deque(maxlen=int(KEPT_S / WINDOW_S))

    def look(self, workers: Workers | None, status: TrafficStatus, now: float) -> None:
        if workers is None or (self._looks and self._looks[-1].workers != workers):
            self._looks.clear()
        if workers is None:
            return
        self._looks.append(_Look(now, workers, status.waiting_tokens))
        begin = now - SETTLES_S - WINDOW_S
        while len(self._looks) > 1 and self._looks[1].at <= begin:
            self._looks.popleft()
        first = self._looks[0]
        is_early = self._compared_at is not None and now < self._compared_at + WINDOW_S
        if is_early or not begin - WINDOW_S <= first.at <= begin:
            return
        recent = [at for at, age_ms in enumerate(status.ages_ms) if SETTLES_S <= age_ms / 1000 < SETTLES_S + WINDOW_S]
        if len(recent) < REQUESTS_MIN or len(status.ttft_ms) < len(status.ages_ms):
            return
        self._compared_at = now
        traffic = _traffic(status, recent, first.waiting_tokens)
        errors = _errors(predicted(self._profile, traffic, workers, self._slo), measured(status, recent, self._slo))
        self._errors.append((now, errors))

    def error(self, now: float) -> PredictionError:
        while self._errors and self._errors[0][0] < now - KEPT_S:
            self._errors.popleft()
        columns = [[one[at] for _, one in self._errors] for at in range(len(Figures._fields))]
        medians = [_median([value for value in column if value is not None]) for column in columns]
        return PredictionError(len(self._errors), *medians)


def predicted(profile: Profile, traffic: Traffic, workers: Workers, slo: Slo) -> Figures:
    """Returns the figures that the autopilot's own model expects for this traffic."""
    model = QueueingModel(profile, traffic, slo, WINDOW_S)
    single = sum(count <= 1 for count in traffic.output_tokens) / len(traffic.output_tokens)

    def ttft(ms: float) -> float:
        return _with_limits(model, ms, ms).estimate(workers).ttft_attainment

    def tpot(ms: float) -> float:
        kept = _with_limits(model, ms, ms).estimate(workers).tpot_attainment
        return (kept - single) / (1 - single)  # answers of one token always keep it

    return Figures(
        _quantile(ttft, 0.5), _quantile(ttft, 0.9), None if single == 1 else _quantile(tpot, 0.9),
        model.estimate(workers).attainment,
    )  # fmt: skip


def measured(status: TrafficStatus, recent: Sequence[int], slo: Slo) -> Figures:
    """Returns the figures of the `recent` requests; those that ended without a first token (rejected, cancelled) are left
    out."""
    times = [(status.ttft_ms[at], status.tpot_ms[at]) for at in recent if status.ttft_ms[at] > 0]
    ttft, tpot = sorted(first for first, _ in times), sorted(later for _, later in times if later > 0)
    kept = [first <= slo.ttft_ms and later <= slo.tpot_ms for first, later in times]
    return Figures(_rank(ttft, 0.5), _rank(ttft, 0.9), _rank(tpot, 0.9), sum(kept) / len(kept) if kept else None)


def _traffic(status: TrafficStatus, recent: Sequence[int], waiting_tokens: int) -> Traffic:
    came = sum(status.stands_for[at] for at in recent)
    prompts = [status.prompt_tokens[at] for at in recent]
    cached = sum(min(status.cached_tokens[at], status.prompt_tokens[at]) for at in recent)
    times_s = [-status.ages_ms[at] / 1000 for at in recent]
    return Traffic(
        came / WINDOW_S, prompts, [status.output_tokens[at] for at in recent], cached / max(sum(prompts), 1),
        interarrival_cv(times_s) if came == len(recent) else 1.0, waiting_tokens,
    )  # fmt: skip


def _with_limits(model: QueueingModel, ttft_ms: float, tpot_ms: float) -> QueueingModel:
    other = copy.copy(model)
    other.slo = Slo(ttft_ms, tpot_ms, model.slo.percentile)
    return other


def _quantile(share_within: Callable[[float], float], share: float) -> float:
    """Returns the least time that this share of the requests keeps, by bisection on a logarithmic scale."""
    low, high = _MS_MIN, _MS_MAX
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (low, middle) if share_within(middle) >= share else (middle, high)
    return high


def _rank(values: Sequence[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None


def _errors(expected: Figures, found: Figures) -> tuple[float | None, ...]:
    """Returns the relative errors, and the absolute difference for the last figure."""
    relative = [
        abs(guess / real - 1) if guess is not None and real else None
        for guess, real in zip(expected[:3], found[:3], strict=True)
    ]
    if expected.slo_share is None or found.slo_share is None:
        return (*relative, None)
    return (*relative, abs(expected.slo_share - found.slo_share))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
