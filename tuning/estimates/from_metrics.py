"""A profile from the metrics of a running server, read every few seconds under its own traffic.

In each interval the mean time between tokens is taken for

    step + sequence * streams + kv_token * KV tokens + token * prompt tokens for each step

Least squares over all intervals give the four numbers. The time of a first token beyond waiting and computing is the host's.
All this says less than timings of single requests do.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from tuning.estimates.from_timings import MeasuredServer, TimingsError, profile_of
from tuning.profile import Profile

INTERVALS_MIN: Final = 12
TOKENS_MIN: Final = 32  # answer tokens of an interval that counts
RUN_SIGMA: Final = 0.15


class MetricsReading(NamedTuple):
    """Totals since the server began; only `running` and `kv_share` are present values."""

    prompt_tokens: float
    answer_tokens: float
    gap_s: float
    gaps: float
    ttft_s: float
    queue_s: float
    prefill_s: float
    requests: float  # that had a first token
    running: float
    kv_share: float


def fitted(readings: Sequence[MetricsReading], server: MeasuredServer, about: dict[str, Any]) -> Profile:
    """Raises `TimingsError`."""
    rows, gap_ms = [], []
    for before, after in pairwise(readings):
        answers, gaps = after.answer_tokens - before.answer_tokens, after.gaps - before.gaps
        if answers < TOKENS_MIN or gaps < 1:
            continue
        running = max((before.running + after.running) / 2, 1.0)
        prompts = after.prompt_tokens - before.prompt_tokens
        kv_tokens = server.capacity.kv_tokens * (before.kv_share + after.kv_share) / 2
        rows.append((1.0, running, kv_tokens, prompts * running / answers))
        gap_ms.append(1000 * (after.gap_s - before.gap_s) / gaps)
    if len(rows) < INTERVALS_MIN:
        raise TimingsError(
            f"only {len(rows)} intervals had tokens; {INTERVALS_MIN} are needed: watch longer, or while there is traffic"
        )
    step_ms, sequence_ms, kv_token_ms, token_ms = non_negative(np.array(rows), np.array(gap_ms))
    first, last = readings[0], readings[-1]
    prompts, requests = last.prompt_tokens - first.prompt_tokens, max(last.requests - first.requests, 1.0)
    prefill_s = last.prefill_s - first.prefill_s
    token_ms = token_ms or 1000 * prefill_s / max(prompts, 1.0)
    host_s = (last.ttft_s - first.ttft_s - (last.queue_s - first.queue_s) - prefill_s) / requests
    numbers = max(1000 * host_s, 0.1), max(token_ms, 1e-4), max(token_ms, 1e-4) / 8192, max(step_ms, 1e-3)
    return profile_of((*numbers, sequence_ms, kv_token_ms), server, about).replaced(run_sigma=RUN_SIGMA)


def non_negative(rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> list[float]:
    """Least squares without negative coefficients: it leaves out the most negative one until none is negative."""
    used = list(range(rows.shape[1]))
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-12)
    while used:
        found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], values, rcond=None)
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    result = np.zeros(rows.shape[1])
    if used:
        result[used] = found / scale[used]
    return [float(value) for value in result]
