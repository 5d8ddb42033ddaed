"""The clients' view of a simulated run, and how busy its workers were."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from lab.goals import Goals
from lab.play.request import NOT_YET, PlayedRequest, clients_of
from lab.play.workers import PlayedBatch, PlayedPrefill

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
PAUSE_S: Final = 100.0  # without arrivals that is no part of the traffic: between windows of an excerpt


@dataclass(frozen=True, eq=False)
class PlayedOutcome:
    """Arrays have an entry for each request, in the order of arrival."""

    at_s: Floats
    ttft_ms: Floats  # NaN: no answer
    tpot_ms: Floats  # NaN: one token or none
    queue_ms: Floats
    hand_over_ms: Floats  # from the first token to the first decode step
    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    classes: tuple[str, ...]
    clients: tuple[int, ...]  # of each turn, if there are sessions; else empty
    span_s: float  # from the first arrival to the last end, without the parts of pauses in which nothing ran
    prefill_busy: float  # share of the span in which prefill workers computed
    decode_busy: float
    batch_mean: float  # sequences in a decode step
    link_busy: float

    @property
    def e2e_ms(self) -> Floats:
        """Time from the request to its last token; NaN for requests that got no answer."""
        return np.asarray(self.ttft_ms + np.nan_to_num(self.tpot_ms, nan=0.0) * np.maximum(self.output_tokens - 1, 0))

    def misses(self, goals: Goals) -> tuple[Bools, Bools]:
        """Returns which requests miss the limit of their first token (or got none), and which miss the limit of later
        tokens."""
        ttft_ms, tpot_ms = goals.limits(self.classes)
        late = np.isnan(self.ttft_ms) | (self.ttft_ms > ttft_ms)
        slow = np.nan_to_num(self.tpot_ms, nan=0.0) > tpot_ms
        return late, slow

    def strain(self, goals: Goals) -> Floats:
        """Returns how near each request comes to its limits: 1 is the limit, infinite without an answer."""
        ttft_ms, tpot_ms = goals.limits(self.classes)
        worst = np.maximum(self.ttft_ms / ttft_ms, np.nan_to_num(self.tpot_ms, nan=0.0) / tpot_ms)
        return np.asarray(np.where(np.isnan(self.ttft_ms), np.inf, worst))

    def good(self, goals: Goals) -> Bools:
        late, slow = self.misses(goals)
        return ~(late | slow)

    def attainment(self, goals: Goals) -> float:
        return float(self.good(goals).mean()) if len(self.at_s) else 1.0

    def since(self, begin_s: float) -> "PlayedOutcome":
        """Returns the outcome of the requests that came at this time or later."""
        counted = self.at_s >= begin_s
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        arrays = {name: value[counted] for name, value in arrays.items() if isinstance(value, np.ndarray)}
        return replace(self, **arrays, classes=tuple(compress(self.classes, counted)))

    def percentiles(self, metric: str, shares: Sequence[float]) -> list[float]:
        """Percentiles of "ttft_ms", "tpot_ms", "e2e_ms" or "queue_ms"; NaN where nothing was measured."""
        values = getattr(self, metric)
        values = values[~np.isnan(values)]
        if not len(values):
            return [float("nan")] * len(shares)
        return [float(value) for value in np.quantile(values, list(shares), method="higher")]


def outcome_of(
    jobs: Sequence[PlayedRequest],
    prefill: Iterable[PlayedPrefill],
    batches: Iterable[PlayedBatch],
    host_ms: float,
    host_token_ms: float,
) -> PlayedOutcome:
    def column(values: Iterable[float]) -> Floats:
        return np.fromiter(values, dtype=np.float64, count=len(jobs))

    at_s, first_s = column(job.at_s for job in jobs), column(job.first_s for job in jobs)
    placed_s, join_s = column(job.placed_s for job in jobs), column(job.join_s for job in jobs)
    submitted_s = column(job.submitted_s for job in jobs)
    end_s = column(job.end_s for job in jobs)
    prompt, output = (column(getattr(job.sent, what) for job in jobs) for what in ("prompt_tokens", "output_tokens"))
    served, ended = first_s != NOT_YET, end_s != NOT_YET
    ttft_ms = np.where(served, 1000 * (first_s - at_s) + host_ms + host_token_ms * prompt, np.nan)
    tpot_ms = np.where(ended & (output > 1), 1000 * (end_s - first_s) / np.maximum(output - 1, 1), np.nan)
    span_s = max(_span_s(at_s, end_s), 1e-9)
    workers, running = list(prefill), list(batches)
    steps = sum(batch.steps for batch in running)
    return PlayedOutcome(
        at_s,
        ttft_ms,
        tpot_ms,
        1000 * np.where(placed_s != NOT_YET, placed_s - submitted_s, 0.0),
        1000 * np.where(join_s != NOT_YET, join_s - first_s, 0.0),
        prompt,
        output,
        column(job.cached for job in jobs),
        tuple(job.sent.priority for job in jobs),
        tuple(clients_of([job.sent for job in jobs])) if any(job.sent.follows >= 0 for job in jobs) else (),
        span_s,
        sum(worker.busy_s for worker in workers) / span_s / max(len(workers), 1),
        sum(batch.busy_s for batch in running) / span_s / max(len(running), 1),
        sum(batch.token_steps for batch in running) / max(steps, 1),
        max((worker.link_busy_s for worker in workers), default=0.0) / span_s,
    )


def _span_s(at_s: Floats, end_s: Floats) -> float:
    """Returns the time from the first arrival to the last end, less pauses from the end of all that came before them."""
    order = np.argsort(at_s)
    came_s, ended_s = at_s[order], np.maximum.accumulate(end_s[order])
    waits_s = np.diff(came_s, append=np.inf)
    works_s = np.clip(ended_s - came_s, 0.0, waits_s)
    return float(np.where(waits_s < PAUSE_S, waits_s, works_s).sum())
