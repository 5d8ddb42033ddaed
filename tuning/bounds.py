"""An upper bound on the requests that could keep the SLO, with any scheduler. Pure.

Prefill: the first tokens of good requests are computed between the first arrival and the last one's limit. The bound is what
fits if all workers are busy all that time and take the cheapest prompts first. Decode is bounded likewise, at the highest rate
of tokens of any batch. A mixed worker has both to do in the same time.
"""

from collections.abc import Sequence

import numpy as np

from tuning.advise import Workers
from tuning.goals import Goals
from tuning.profile import Profile
from tuning.simulator.job import Sent
from tuning.simulator.options import RunOptions


def attainable(profile: Profile, workers: Workers, sent: Sequence[Sent], goals: Goals, options: RunOptions) -> float:
    """Returns a share of the requests; 1 for sessions, whose turns come only when answers have come."""
    if any(one.follows >= 0 for one in sent):
        return 1.0
    ttft_ms = max(slo.ttft_ms for slo in (goals.default, *goals.by_class.values()))
    tpot_ms = max(slo.tpot_ms for slo in (goals.default, *goals.by_class.values()))
    span_ms = 1000 * (sent[-1].at_s - sent[0].at_s)
    step_tokens = options.step_tokens or profile.step_tokens
    rate = _least_ms_per_token(profile, step_tokens)
    if any(one.blocks for one in sent):
        prompt_ms = np.zeros(len(sent))  # all of it may be cached
    else:
        prompt_ms = rate * (1 - options.hit_rate) * np.array([float(one.prompt_tokens) for one in sent])
    steps = np.array([float(max(one.forwarded_tokens - 1, 0)) for one in sent])
    decode_ms = steps * _least_ms_per_step(profile, options.seqs_max)
    prefill_span_ms = span_ms + ttft_ms
    decode_span_ms = prefill_span_ms + tpot_ms * float(steps.max(initial=0.0))
    apart = workers.prefill + workers.mixed, workers.decode + workers.mixed
    bounds = [_fit(prompt_ms, apart[0] * prefill_span_ms), _fit(decode_ms, apart[1] * decode_span_ms)]
    if not workers.prefill and not workers.decode:
        bounds.append(_fit(prompt_ms + decode_ms, workers.mixed * decode_span_ms))
    return min(bounds)


def _fit(work_ms: np.ndarray[tuple[int], np.dtype[np.float64]], room_ms: float) -> float:
    done = np.cumsum(np.sort(work_ms))
    return float(np.searchsorted(done, room_ms, side="right")) / len(work_ms)


def _least_ms_per_token(profile: Profile, step_tokens: int) -> float:
    """Returns the least time per token over all step sizes, context left out. The workers of a host may share fewer cores,
    which only makes it slower."""
    sizes = [*(int(at) for at in profile.prefill.curve.at if at <= step_tokens), step_tokens]
    return min(profile.prefill.curve(size) / size for size in sizes if size > 0)


def _least_ms_per_step(profile: Profile, seqs_max: int) -> float:
    """Returns the least time of a step for each of its sequences. Between two points of the curve it is never below the
    smaller of their values."""
    most = seqs_max or profile.decode_capacity.seqs_max
    sizes = {1, most, *(int(at) for at in profile.decode.curve.at if 1 <= at <= most)}
    return min(profile.decode.curve(size) / size for size in sizes)
