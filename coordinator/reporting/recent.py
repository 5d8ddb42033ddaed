"""How long the last requests took, for `crossdock status`. Pure."""

from collections import deque
from collections.abc import Sequence

from coordinator.accounting.usage import Closed
from scheduler.lifecycle import RequestState

REQUESTS_MAX = 256


class RecentTimes:
    def __init__(self) -> None:
        self._last: deque[tuple[float, float, float, int]] = deque(maxlen=REQUESTS_MAX)
        """Milliseconds in the queue, in prefill, and from there to the end, and answer tokens, of requests that finished."""

    def closed(self, entry: Closed) -> None:
        if entry.outcome == RequestState.FINISHED:
            self._last.append(
                (entry.queue_ms, entry.prefill_ms, entry.transfer_ms + entry.decode_ms, entry.output_tokens)
            )

    def figures(self) -> dict[str, float]:
        """Medians and 99th percentiles as the coordinator sees them, in ms; empty before the first request has ended. The first
        token is drawn when the prompt is computed."""
        if not self._last:
            return {}
        queue = [one[0] for one in self._last]
        ttft = [one[0] + one[1] for one in self._last]
        tpot = [one[2] / (one[3] - 1) for one in self._last if one[3] > 1]
        found = {"requests": float(len(self._last))}
        for name, values in (("queue", queue), ("ttft", ttft), ("tpot", tpot)):
            if values:
                found |= {f"{name}_p50_ms": _quantile(values, 0.5), f"{name}_p99_ms": _quantile(values, 0.99)}
        return found


def _quantile(values: Sequence[float], part: float) -> float:
    """The quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]
