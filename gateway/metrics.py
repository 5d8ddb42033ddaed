"""Prometheus metrics of one gateway, in a registry of their own."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proto.status import StatusReport

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)


disable_created_metrics()  # type: ignore[no-untyped-call]


class GatewayMetrics(Collector):
    """Names start with `crossdock_gateway_`; times are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = "crossdock_gateway_", self.registry
        self.requests = Counter(
            prefix + "requests",
            "Generation requests by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.ttft = Histogram(
            prefix + "time_to_first_token_seconds",
            "From submission to a prompt's first token.",
            buckets=_TTFT_S,
            registry=registry,
        )
        self.itl = Histogram(
            prefix + "inter_token_latency_seconds",
            "Between two deliveries of one choice.",
            buckets=_ITL_S,
            registry=registry,
        )
        self.active_streams = Gauge(prefix + "active_streams", "Prompts being answered.", registry=registry)
        self.prompt_tokens = Counter(prefix + "prompt_tokens", "Prompt tokens submitted.", registry=registry)
        self.output_tokens = Counter(prefix + "output_tokens", "Tokens delivered.", registry=registry)
        self.noticed = Counter(
            prefix + "stream_events", "Resumes, and tokens that were dropped, by kind.", ["kind"], registry=registry
        )
        self.coordinator_up = Gauge(
            prefix + "coordinator_up", "1 while the coordinator's link is up.", registry=registry
        )
        self.count_protocol_errors: Callable[[], int] = int
        """Set by the owner of the links, which count for themselves."""
        self.cluster: StatusReport | None = None
        """What the coordinator said last of the whole cluster, if it is there."""
        self.count_turned_away: Callable[[], Mapping[str, int]] = dict
        """Likewise."""
        self.tasks = Gauge(prefix + "tasks", "asyncio tasks that have not ended.", registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What others count, asked for when the metrics are read."""
        yield CounterMetricFamily(
            "crossdock_gateway_protocol_errors",
            "Frames at the links that were no valid messages.",
            value=self.count_protocol_errors(),
        )
        if self.cluster is not None:
            events = CounterMetricFamily(
                "crossdock_cluster_events",
                "Faults, recoveries and work of the whole cluster, as the coordinator counts them since it started.",
                labels=["kind"],
            )
            for kind, count in sorted(self.cluster.counters.items()):
                events.add_metric([kind], count)
            yield events
            yield GaugeMetricFamily(
                "crossdock_cluster_pairs_left_out",
                "Pairs of workers between which transfers failed, and which get no requests for a while.",
                value=len(self.cluster.left_out),
            )
        turned_away = CounterMetricFamily(
            "crossdock_gateway_turned_away",
            "Processes that were not let in at the token port: without a key, with an unknown one, or posing as another role.",
            labels=["reason"],
        )
        for reason, count in self.count_turned_away().items():
            turned_away.add_metric([reason], count)
        yield turned_away

    def render(self) -> bytes:
        return generate_latest(self.registry)
