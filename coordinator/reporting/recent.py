"""Times of the last requests that have ended, for `crossdock status` and the dashboard. Pure."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from coordinator.accounting.billing import Closed
from scheduler.lifecycle import RequestState

RECENT_REQUESTS = 256
RATES_S = 60.0


class RecentRequest(NamedTuple):
    at: float
    tenant: str
    priority_class: str
    closed: Closed


class RecentTimes:
    def __init__(self) -> None:
        self._last: deque[RecentRequest] = deque(maxlen=RECENT_REQUESTS)

    def add(self, entry: Closed, kind: tuple[str, str, str] = ("", "", ""), now: float = 0.0) -> None:
        """`kind`: tenant, model and priority class."""
        self._last.append(RecentRequest(now, kind[0], kind[2], entry))

    def latest(self, most: int) -> list[RecentRequest]:
        """The last requests that have ended, whatever their outcome, latest first."""
        return list(islice(reversed(self._last), most))

    def figures(self, since: float = -inf) -> dict[str, float]:
        """Medians and 99th percentiles in ms of the last requests that finished; the first token is drawn with the prompt."""
        finished = [one.closed for one in self._last if one.closed.outcome == RequestState.FINISHED and one.at >= since]
        if not finished:
            return {}
        queue = [one.queue_ms for one in finished]
        ttft = [one.queue_ms + one.prefill_ms for one in finished]
        tpot = [
            (one.transfer_ms + one.decode_ms) / (one.output_tokens - 1) for one in finished if one.output_tokens > 1
        ]
        found = {"requests": float(len(finished))}
        for name, values in (("queue", queue), ("ttft", ttft), ("tpot", tpot)):
            if values:
                found |= {f"{name}_p50_ms": _quantile(values, 0.5), f"{name}_p99_ms": _quantile(values, 0.99)}
        return found

    def rates(self, now: float, started: float) -> dict[str, float]:
        """Requests that ended and their tokens, per second of the last minute, or of as long as there are figures."""
        since = max(now - RATES_S, started)
        if len(self._last) == RECENT_REQUESTS:
            since = max(since, self._last[0].at)
        ended, seconds = [one.closed for one in self._last if one.at >= since], max(now - since, 1.0)
        return {
            "requests_per_s": len(ended) / seconds,
            "prompt_tokens_per_s": sum(one.prompt_tokens for one in ended) / seconds,
            "output_tokens_per_s": sum(one.output_tokens for one in ended) / seconds,
        }

    def ttft_of_tenants(self) -> dict[str, tuple[float, float]]:
        """Median and 99th percentile, in ms, of the last requests that finished."""
        found: dict[str, list[float]] = {}
        for one in self._last:
            if one.closed.outcome == RequestState.FINISHED:
                found.setdefault(one.tenant, []).append(one.closed.queue_ms + one.closed.prefill_ms)
        return {tenant: (_quantile(values, 0.5), _quantile(values, 0.99)) for tenant, values in found.items()}


def _quantile(values: Sequence[float], part: float) -> float:
    """The quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]
