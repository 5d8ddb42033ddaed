"""Prometheus metrics of one process: instruments that cost little where a token passes, and callbacks that are asked when
somebody reads them.

`prometheus_client` writes them down. Its own counters and histograms are not used: each takes a lock, which on one event loop
nobody needs, and an observation costs five times as much as here.

Label values are names that the operator gave, or members of enums: never text of a client, a key, or an id of a request. Should
one family get more series than `SERIES_MAX` all the same, what comes then is counted under `OTHER`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from runtime.process.version import version_of

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "histogram"]
Values = Callable[[], Iterable[tuple[Labels, float]]]
"""Label values and a number, for each series there is now."""

OTHER: Final = "(other)"
"""No tenant's name, which has no parentheses."""
SERIES_MAX: Final = 500
TENANTS_MAX: Final = 50
"""Tenants with series of their own."""
_TENANTS_KNOWN_MAX: Final = 10_000
_RANKED_EVERY_S: Final = 60.0

LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Buckets for waits that end with a request."""
STEP_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets for a token's or a step's time."""
COUNTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


@dataclass(frozen=True)
class Family:
    """What the reference says of a metric. Counters are named without their `_total`."""

    name: str
    kind: Kind
    help: str
    labels: Labels

    @property
    def exported(self) -> str:
        """As in a query, but for the suffixes of a histogram's series."""
        return self.name + ("_total" if self.kind == "counter" else "")


class Count:
    """A counter."""

    __slots__ = ("values",)

    def __init__(self, labels: Labels) -> None:
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, *labels: str, by: float = 1.0) -> None:
        values = self.values
        if labels not in values and len(values) >= SERIES_MAX:
            labels = (OTHER,) * len(labels)
        values[labels] = values.get(labels, 0.0) + by

    def forget(self, first: str) -> None:
        """Drop the series with this first label."""
        for labels in [labels for labels in self.values if labels[0] == first]:
            del self.values[labels]


class CounterChild:
    """One series of a histogram. `bounds` are the upper ones of its buckets, infinity left out."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        names = (*(f"{bound:g}" for bound in self.bounds), "+Inf")
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class Spread:
    """A histogram; who observes often keeps the series that `of` returns."""

    def __init__(self, labels: Labels, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.series: dict[Labels, CounterChild] = {} if labels else {(): CounterChild(bounds)}

    def of(self, *labels: str) -> CounterChild:
        if labels not in self.series and len(self.series) >= SERIES_MAX:
            labels = (OTHER,) * len(labels)
        return self.series.get(labels) or self.series.setdefault(labels, CounterChild(self._bounds))


class Page(Collector):
    """All metrics of one process, in a registry of their own, with those of the process as the operating system counts them.

    `role`: of this process; every name begins with `crossdock_`."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.families: list[Family] = []
        self.before: list[Callable[[], None]] = []
        """Called before each reading."""
        self._readers: list[Callable[[], Metric]] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, help_: str, *labels: str) -> Count:
        count = Count(labels)
        self.read("counter", name, help_, labels, lambda: list(count.values.items()))
        return count

    def histogram(self, name: str, help_: str, bounds: tuple[float, ...], *labels: str) -> Spread:
        family, spread = self._family("histogram", name, help_, labels), Spread(labels, bounds)

        def read() -> Metric:
            metric = HistogramMetricFamily(family.name, family.help, labels=labels)
            for values, tally in spread.series.items():
                metric.add_metric(values, tally.buckets(), tally.sum)
            return metric

        self._readers.append(read)
        return spread

    def read(self, kind: Kind, name: str, help_: str, labels: Labels, values: Values) -> None:
        """A counter or gauge that somebody else keeps."""
        family = self._family(kind, name, help_, labels)
        make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily

        def read() -> Metric:
            metric = make(family.name, family.help, labels=labels)
            for series, (label_values, value) in enumerate(values()):
                if series > SERIES_MAX:
                    break
                metric.add_metric(label_values, value)
            return metric

        self._readers.append(read)

    def gauge(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """Without labels, and somebody else keeps it."""
        self.read("gauge", name, help_, (), lambda: [((), float(value()))])

    def total(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """A counter without labels that somebody else keeps."""
        self.read("counter", name, help_, (), lambda: [((), float(value()))])

    def by(self, kind: Kind, name: str, help_: str, label: str, values: Callable[[], Mapping[str, float]]) -> None:
        """One series for each entry of a mapping that somebody else keeps."""
        self.read(kind, name, help_, (label,), lambda: [((key,), value) for key, value in values().items()])

    def introduce(self, *, name: str, model: str = "") -> None:
        """Who this is, to be joined with everything else by `instance`."""
        version = version_of()
        self.read(
            "gauge",
            "crossdock_process_info",
            "1; which process this is.",
            ("role", "name", "model", "version"),
            lambda: [((self.role, name, model, version), 1.0)],
        )

    def collect(self) -> Iterator[Metric]:
        for prepare in self.before:
            prepare()
        for read in self._readers:
            yield read()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _family(self, kind: Kind, name: str, help_: str, labels: Labels) -> Family:
        family = Family(name, kind, help_, labels)
        self.families.append(family)
        return family


class TenantLabels:
    """Which tenants have series of their own: those with the most service lately. All others share `OTHER`.

    Once a minute those that have fallen behind give their places up, and their series end there; what `OTHER` has counted
    stays, since a counter may not jump by what was counted elsewhere."""

    def __init__(self, *counts: Count, most: int = TENANTS_MAX) -> None:
        """`counts`: families whose first label is the tenant."""
        self._counts = counts
        self._most = most
        self._own: set[str] = set()
        self._service: dict[str, float] = {}
        self._ranked_at = 0.0

    def label(self, tenant: str) -> str:
        if tenant in self._own:
            return tenant
        if len(self._own) < self._most:
            self._own.add(tenant)
            return tenant
        return OTHER

    def served(self, tenant: str, amount: float) -> None:
        service = self._service
        if tenant in service or len(service) < _TENANTS_KNOWN_MAX:
            service[tenant] = service.get(tenant, 0.0) + amount

    def rank(self, now: float) -> None:
        """To be called now and then."""
        if now < self._ranked_at + _RANKED_EVERY_S:
            return
        self._ranked_at = now
        if len(self._service) > self._most:
            first = set(nlargest(self._most, self._service, key=lambda name: self._service[name]))
            for tenant in self._own - first:
                for count in self._counts:
                    count.forget(tenant)
            self._own = first
        self._service = {name: amount / 2 for name, amount in self._service.items() if amount >= 1.0}
