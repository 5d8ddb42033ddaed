"""The metrics of a process that has two roles at once, on one page."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from runtime.metrics.registry import MetricsRegistry
from runtime.metrics.server import MetricsServer

_OF_THE_PROCESS = "process_"  # of the operating system; the same for all roles


class CombinedRegistry(CollectorRegistry):
    """Everything of several registries, which differ in their role: each series has that as the label `role`."""

    def __init__(self, registries: Sequence[MetricsRegistry]) -> None:
        super().__init__()
        self._registries = tuple(registries)

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                if metric.name.startswith(_OF_THE_PROCESS):
                    found.setdefault(metric.name, metric)
                    continue
                metric.samples = [
                    sample._replace(labels={**sample.labels, "role": registry.role}) for sample in metric.samples
                ]
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        yield from found.values()


class CombinedPage:
    """A `MetricsPage` that shows the metrics of `roles` roles. The process is ready when all of them are."""

    def __init__(self, server: MetricsServer, roles: int) -> None:
        self._server, self._missing = server, roles
        self._registries: list[MetricsRegistry] = []
        self._not_ready: list[Callable[[], str | None]] = []

    @property
    def address(self) -> str:
        return self._server.address

    def show(self, registry: MetricsRegistry, not_ready: Callable[[], str | None]) -> None:
        self._registries.append(registry)
        self._not_ready.append(not_ready)
        self._missing -= 1
        if not self._missing:
            self._server.show(CombinedRegistry(self._registries), self._why_not_ready)

    def _why_not_ready(self) -> str | None:
        return next(filter(None, (ask() for ask in self._not_ready)), None)
