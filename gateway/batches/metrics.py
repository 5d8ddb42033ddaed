"""Metrics of batches, of the gateway that runs them."""

from collections.abc import Callable

from runtime.metrics.registry import MetricsRegistry

_PREFIX = "crossdock_gateway_"


class BatchMetrics:
    def __init__(self, registry: MetricsRegistry) -> None:
        self.batches = registry.counter(
            _PREFIX + "batches", "Batches that have ended: completed, failed, expired or cancelled.", "status"
        )
        self.lines = registry.counter(
            _PREFIX + "batch_lines",
            "Requests of batches: completed or failed, and put_back, each time that one is to run again.",
            "outcome",
        )
        self.running: Callable[[], int] = int  # Set by the runner
        registry.gauge(_PREFIX + "batch_lines_running", "Requests of batches being answered.", lambda: self.running())
