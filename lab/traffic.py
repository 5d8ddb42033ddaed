"""Traffic as the search plays it: parts of it, and other loads. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lab.advise import Slo
from lab.play.request import Sent
from lab.sessions import first_turns, more_clients

PAUSE_S = 120.0  # between the windows of an excerpt, in which queues drain
PARTS_MAX = 12
WINDOW_TTFTS, WINDOW_LIVES = 20, 2  # shorter windows end before a queue has grown, or a batch is full


def at_load(sent: Sequence[Sent], load: float) -> list[Sent]:
    """Returns the traffic at so many times its load, which for sessions is the number of clients."""
    if has_sessions(sent):
        return more_clients(sent, load)
    return [one._replace(at_s=one.at_s / load) for one in sent]


def has_sessions(sent: Sequence[Sent]) -> bool:
    return any(one.follows >= 0 for one in sent)


def fitted(sent: Sequence[Sent], context_tokens: int) -> tuple[list[Sent], int]:
    """Shortens requests that are longer than the model's context, as the load generator does; returns the requests and how
    many were shortened."""
    found, cut = [], 0
    for one in sent:
        if one.prompt_tokens + one.output_tokens > context_tokens:
            cut += 1
            output = min(one.output_tokens, max(1, context_tokens // 2))
            one = one._replace(prompt_tokens=min(one.prompt_tokens, context_tokens - output), output_tokens=output)
        found.append(one)
    return found, cut


def window_s(sent: Sequence[Sent], slo: Slo) -> float:
    """Returns how long a window must be to show whether a queue grows: at 5 % too much load it then grows by `ttft_ms`. It also
    has the time of some requests that just keep their limits, one after the other."""
    life_ms = slo.ttft_ms + slo.tpot_ms * float(np.mean([one.output_tokens for one in sent]))
    return max(WINDOW_TTFTS * slo.ttft_ms, WINDOW_LIVES * life_ms) / 1000


def excerpt(sent: Sequence[Sent], requests: int, least_s: float) -> list[Sent]:
    """Returns about `requests` requests: windows of at least `least_s` from all over the trace, with pauses between them; one
    shorter window, if there are too few requests."""
    if requests >= len(sent):
        return list(sent)
    if has_sessions(sent):
        return first_turns(sent, requests)
    per_s = len(sent) / max(sent[-1].at_s - sent[0].at_s, 1e-9)
    parts = min(max(int(requests / (per_s * least_s)), 1), PARTS_MAX)
    each, every = requests // parts, len(sent) / parts
    found: list[Sent] = []
    begin_s = 0.0
    for part in range(parts):
        first = int((part + 0.5) * every - each / 2)
        window = sent[first : first + each]
        found += [one._replace(at_s=begin_s + one.at_s - window[0].at_s) for one in window]
        begin_s = found[-1].at_s + PAUSE_S
    return found


def windows(at_s: npt.NDArray[np.float64], count: int) -> list[npt.NDArray[np.int64]]:
    """Indexes of requests in so many windows of equal time, fewer where some are empty."""
    if not len(at_s):
        return []
    edges = np.linspace(at_s[0], at_s[-1], count + 1)[1:-1]
    parts = np.split(np.arange(len(at_s)), np.searchsorted(at_s, edges))
    return [part for part in parts if len(part)]


def summary(sent: Sequence[Sent]) -> dict[str, float]:
    prompts = np.array([one.prompt_tokens for one in sent], dtype=float)
    outputs = np.array([one.output_tokens for one in sent], dtype=float)
    span_s = max(sent[-1].at_s - sent[0].at_s, 1e-9)
    return {
        "requests": len(sent),
        "seconds": span_s,
        "requests_per_s": len(sent) / span_s,
        "prompt_mean": float(prompts.mean()),
        "prompt_p50": float(np.median(prompts)),
        "prompt_p99": float(np.quantile(prompts, 0.99)),
        "output_mean": float(outputs.mean()),
        "output_p50": float(np.median(outputs)),
        "output_p99": float(np.quantile(outputs, 0.99)),
    }


def per_minute(sent: Sequence[Sent]) -> list[float]:
    """Requests per second in each minute (of a short trace: in each of 60 parts)."""
    span_s = sent[-1].at_s - sent[0].at_s
    width_s = min(60.0, max(span_s / 60, 1e-9))
    counts = np.bincount([int((one.at_s - sent[0].at_s) / width_s) for one in sent])
    return [float(count) / width_s for count in counts]
