"""The Prometheus metrics of one process: instruments of `prometheus_client` that record events, and values that are read from
state when the metrics are scraped.

Label values are names that the operator gave, or members of enums: never text of a client, a key, or an id of a request. Code
that observes often keeps the child that `labels` returns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, Literal, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    values,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from runtime.process.version import version_of
from runtime.storage.background_writer import BackgroundWriter

disable_created_metrics()  # type: ignore[no-untyped-call]
values.ValueClass = values.MutexValue
"""Turns off the library's multi-process mode, which an environment variable could turn on. Each process has its own port."""

Labels = tuple[str, ...]
KindRead = Literal["counter", "gauge"]
Kind = KindRead | Literal["histogram"]
Values = Callable[[], Iterable[tuple[Labels, float]]]  # label values and a number, for each series there is now

SERIES_MAX: Final = 500  # of a family that is read from state

LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
STEP_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
COUNTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


class Family(NamedTuple):
    """The entry of a metric in the reference. Counters are named without their `_total`."""

    name: str
    kind: Kind
    help: str
    labels: Labels

    @property
    def exported(self) -> str:
        """The name as in a query, but for the suffixes of a histogram's series."""
        return self.name + ("_total" if self.kind == "counter" else "")


class _StateCollector(Collector):
    """A counter or gauge that somebody else keeps."""

    def __init__(self, family: Family, read: Values) -> None:
        self._family, self._read = family, read
        self._before: dict[Labels, float] = {}  # the value of a counter when its source began anew

    def describe(self) -> list[Metric]:
        """An empty family: the registry refuses a name that it has already."""
        make = CounterMetricFamily if self._family.kind == "counter" else GaugeMetricFamily
        return [make(self._family.name, self._family.help, labels=self._family.labels)]

    def collect(self) -> list[Metric]:
        (metric,) = self.describe()
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        for labels, value in islice(self._values(), SERIES_MAX):
            metric.add_metric(labels, value)
        return [metric]

    def carry_over(self) -> None:
        if self._family.kind == "counter":
            self._before = dict(self._values())

    def _values(self) -> Iterable[tuple[Labels, float]]:
        if not self._before:
            return self._read()
        values = dict(self._read())
        return [(labels, self._before.get(labels, 0) + values.get(labels, 0)) for labels in {**self._before, **values}]


class _StateHistogram(_StateCollector):
    """A histogram that somebody else keeps. Its values have one label more: a bucket's `le`, smallest first, or "sum"."""

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._family.name, self._family.help, labels=self._family.labels)]

    def collect(self) -> list[Metric]:
        metric = HistogramMetricFamily(self._family.name, self._family.help, labels=self._family.labels)
        series: dict[Labels, list[tuple[str, float]]] = {}
        for (*labels, bound), value in self._values():
            series.setdefault(tuple(labels), []).append((bound, value))
        for own, found in islice(series.items(), SERIES_MAX):
            buckets = [(bound, value) for bound, value in found if bound != "sum"]
            metric.add_metric(own, buckets, dict(found)["sum"])
        return [metric]

    def carry_over(self) -> None:
        self._before = dict(self._values())


class MetricsRegistry(CollectorRegistry):
    """All metrics of one process, with those of the process as the operating system counts them.

    `role`: of this process; every name begins with `crossdock_`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.families: list[Family] = []
        self._read_from: list[_StateCollector] = []
        self.before: list[Callable[[], None]] = []
        ProcessCollector(registry=self)

    def counter(self, name: str, help_: str, *labels: str) -> Counter:
        self.families.append(Family(name, "counter", help_, labels))
        return Counter(name, help_, labels, registry=self)

    def histogram(self, name: str, help_: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        self.families.append(Family(name, "histogram", help_, labels))
        return Histogram(name, help_, labels, buckets=bounds, registry=self)

    def read(self, kind: KindRead, name: str, help_: str, labels: Labels, values: Values) -> None:
        """A counter or gauge that somebody else keeps."""
        self.families.append(Family(name, kind, help_, labels))
        self._read_from.append(_StateCollector(self.families[-1], values))
        self.register(self._read_from[-1])

    def read_histogram(self, name: str, help_: str, labels: Labels, values: Values) -> None:
        """Add a histogram whose values another object keeps. `values`: see `_StateHistogram`."""
        self.families.append(Family(name, "histogram", help_, labels))
        self._read_from.append(_StateHistogram(self.families[-1], values))
        self.register(self._read_from[-1])

    def carry_over(self) -> None:
        """Keep the present values of the counters: their sources are about to restart at 0, and the counters continue from
        these values."""
        for collector in self._read_from:
            collector.carry_over()

    def gauge(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """Add a gauge without labels whose value another object keeps."""
        self.read("gauge", name, help_, (), lambda: [((), value())])

    def total(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """Add a counter without labels whose value another object keeps."""
        self.read("counter", name, help_, (), lambda: [((), value())])

    def by(self, kind: KindRead, name: str, help_: str, label: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Add a metric with one series for each entry of a mapping that another object keeps."""
        self.read(kind, name, help_, (label,), lambda: [((key,), value) for key, value in values().items()])

    def introduce(self, *, name: str, model: str = "") -> None:
        """Add the metric that describes this process. Queries join it with other metrics by `instance`."""
        family = Family(
            "crossdock_process_info", "gauge", "1; which process this is.", ("role", "name", "model", "version")
        )
        self.families.append(family)
        info = Gauge(family.name, family.help, family.labels, registry=self)
        info.labels(self.role, name, model, version_of()).set(1)
        self.total(
            "crossdock_log_dropped_lines",
            "Lines of logs that were dropped, since the file, pipe or terminal for them took none.",
            lambda: BackgroundWriter.dropped_lines,
        )

    def collect(self) -> Iterator[Metric]:
        for prepare in self.before:
            prepare()
        yield from super().collect()
