"""Metrics of one gateway, and the times of each stream from which they are computed. All times are monotonic seconds."""

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Any

from gateway.streams.types import FailKind, Failure
from runtime.metrics.registry import LATENCY_S, STEP_S, MetricsRegistry
from runtime.metrics.tenant_labels import TenantLabels
from runtime.tenancy.tenants import ClassTargets

PREFIX = "crossdock_gateway_"
_GAPS_OVER_MAX = 0.01  # The fraction of a stream's gaps that may exceed its tenant's limit


class GatewayMetrics:
    def __init__(self, model: str = "") -> None:
        self.registry = registry = MetricsRegistry("gateway")
        self.slo_of: Callable[[str], ClassTargets | None] = lambda tenant: None  # set by the gateway
        self.requests = registry.counter(
            PREFIX + "requests", "Generation requests by endpoint and outcome: ok, disconnected, or an error's code.",
            "endpoint", "outcome",
        )  # fmt: skip
        self.jwt_refused = registry.counter(
            PREFIX + "jwt_refused", "JSON Web Tokens that were refused, by reason.", "reason"
        )
        self.retry_after = registry.histogram(
            PREFIX + "retry_after_seconds",
            "Waits that clients were told in Retry-After, by status.",
            LATENCY_S,
            "status",
        )
        self.streams = registry.counter(
            PREFIX + "streams", "Streams (one for each prompt) that are over, by outcome: ok, left, or why they failed.",
            "outcome",
        )  # fmt: skip
        self.slo = registry.counter(
            PREFIX + "slo_streams",
            "Streams of tenants with an SLO by result: met, missed for its ttft or itl, rejected, or failed. Those whose client"
            " left are not judged.",
            "tenant",
            "result",
        )
        self.tenants = TenantLabels(self.slo)
        self._of_models = ModelMetrics(registry)
        self._models: dict[str, ModelMetrics] = {}
        self._model = model
        self.of()
        self.noticed = registry.counter(
            PREFIX + "stream_events", "Streams resumed, and tokens that were dropped, by kind.", "kind"
        )
        self.active: Callable[[], int] = int  # Set by the owner of the streams
        registry.gauge(PREFIX + "active_streams", "Prompts being answered.", lambda: self.active())
        registry.gauge(PREFIX + "tasks", "asyncio tasks that have not ended.", lambda: len(asyncio.all_tasks()))

    def of(self, model: str = "") -> "ModelMetrics":
        """Returns the metrics of one model, or of the gateway's first model if no name is given."""
        name = model or self._model
        if name not in self._models:
            self._models[name] = self._of_models.of(name)
        return self._models[name]


class ModelMetrics:
    def __init__(self, registry: MetricsRegistry) -> None:
        self.ttft: Any = registry.histogram(
            PREFIX + "time_to_first_token_seconds", "From submission to a prompt's first token.", LATENCY_S, "model"
        )
        self.itl: Any = registry.histogram(
            PREFIX + "inter_token_latency_seconds", "Between two deliveries of one choice.", STEP_S, "model"
        )
        self.tpot: Any = registry.histogram(
            PREFIX + "time_per_output_token_seconds",
            "Mean time per token after the first, for each stream that has finished.",
            STEP_S,
            "model",
        )
        self.duration: Any = registry.histogram(
            PREFIX + "stream_duration_seconds",
            "From submission to the end, for each stream that has finished.",
            LATENCY_S,
            "model",
        )
        self.prompt_tokens: Any = registry.counter(PREFIX + "prompt_tokens", "Prompt tokens submitted.", "model")
        self.cached_tokens: Any = registry.counter(
            PREFIX + "cached_prompt_tokens",
            "Prompt tokens that were not computed but found in a prefix cache.",
            "model",
        )
        self.output_tokens: Any = registry.counter(PREFIX + "output_tokens", "Tokens delivered.", "model")

    def of(self, model: str) -> "ModelMetrics":
        """The same metrics of one model."""
        found = copy(self)
        for name, family in vars(self).items():
            setattr(found, name, family.labels(model))
        return found


class StreamTimes:
    """One stream, from its opening to its end."""

    def __init__(self, metrics: GatewayMetrics, tenant: str, prompt_tokens: int, now: float, model: str = "") -> None:
        # An empty tenant means that the stream is not measured against an SLO.
        slo = metrics.slo_of(tenant) if tenant else None
        self._slo = slo if slo is not None and slo.given else None
        self._metrics, self._tenant, self._opened_at = metrics, tenant, now
        self._model = metrics.of(model)
        self._first_at: float | None = None
        self._last_at: dict[int, float] = {}  # When each choice last got tokens
        self._tokens = self._gaps = self._gaps_over = 0
        self._model.prompt_tokens.inc(prompt_tokens)

    def delivered(self, choice: int, tokens: int, cached_tokens: int, now: float) -> None:
        metrics = self._model
        metrics.output_tokens.inc(tokens)
        self._tokens += tokens
        if self._first_at is None:
            self._first_at = now
            metrics.ttft.observe(now - self._opened_at)
            metrics.cached_tokens.inc(cached_tokens)
        earlier = self._last_at.get(choice)
        if earlier is not None:
            gap_s = now - earlier
            metrics.itl.observe(gap_s)
            self._gaps += 1
            if self._slo is not None and self._slo.itl_ms is not None and 1000 * gap_s > self._slo.itl_ms:
                self._gaps_over += 1
        self._last_at[choice] = now

    def ended(self, failure: Failure | None, now: float) -> None:
        metrics = self._metrics
        metrics.streams.labels("ok" if failure is None else failure.kind.value).inc()
        if failure is None:
            self._model.duration.observe(now - self._opened_at)
            later = self._tokens - len(self._last_at)
            if self._first_at is not None and later > 0:
                busy_s = sum(at - self._first_at for at in self._last_at.values())
                self._model.tpot.observe(busy_s / later)
        if self._slo is not None:
            metrics.tenants.rank(now)
            metrics.tenants.served(self._tenant, self._tokens + 1)
            metrics.slo.labels(metrics.tenants.label(self._tenant), self._result(self._slo, failure)).inc()

    def left(self) -> None:
        """The client did not wait for the end."""
        self._metrics.streams.labels("left").inc()

    def _result(self, slo: ClassTargets, failure: Failure | None) -> str:
        if failure is not None:
            return "rejected" if failure.kind is FailKind.REJECTED else "failed"
        if slo.ttft_ms is not None and (
            self._first_at is None or 1000 * (self._first_at - self._opened_at) > slo.ttft_ms
        ):
            return "ttft"
        return "itl" if self._gaps_over > _GAPS_OVER_MAX * self._gaps else "met"


class BatchMetrics:
    """Metrics of batches, of the gateway that runs them."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.batches = registry.counter(
            PREFIX + "batches", "Batches that have ended: completed, failed, expired or cancelled.", "status"
        )
        self.lines = registry.counter(
            PREFIX + "batch_lines",
            "Requests of batches: completed or failed, and put_back, each time that one is to run again.",
            "outcome",
        )
        self.running: Callable[[], int] = int  # Set by the runner
        registry.gauge(PREFIX + "batch_lines_running", "Requests of batches being answered.", lambda: self.running())
