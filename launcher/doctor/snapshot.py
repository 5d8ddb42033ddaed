"""The snapshot that the rules of `crossdock doctor` look at: a status, and two readings of each process. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

import msgspec

from proto.status import StatusReport

Samples = Iterable[tuple[str, Mapping[str, str], float]]  # name, labels, value


class Sample(msgspec.Struct, frozen=True, array_like=True):
    labels: dict[str, str]
    now: float
    grew: float  # since the first reading

    def has(self, labels: Mapping[str, Any]) -> bool:
        return all(self.labels.get(key) == str(value) for key, value in labels.items())


class ProcessMetrics(msgspec.Struct, frozen=True):
    """One process, as its own metrics and this machine show it."""

    name: str
    series: dict[str, list[Sample]]
    clock_ahead_s: float = 0.0  # its wall clock minus that of this machine
    throttled_share: float = 0.0  # of the periods of its CPU limit; 0 also for processes of other machines

    def readings(self, metric: str, **labels: object) -> Iterator[Sample]:
        return (one for one in self.series.get(metric, ()) if one.has(labels))

    def now(self, metric: str, **labels: object) -> float:
        return sum(one.now for one in self.readings(metric, **labels))

    def grew(self, metric: str, **labels: object) -> float:
        return sum(one.grew for one in self.readings(metric, **labels))

    def grew_by(self, metric: str, label: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for one in self.readings(metric):
            found[one.labels.get(label, "")] += one.grew
        return dict(found)

    def mean(self, histogram: str) -> float:
        """Returns the mean of what a histogram observed between the readings; 0: nothing."""
        count = self.grew(f"{histogram}_count")
        return self.grew(f"{histogram}_sum") / count if count else 0.0

    def quantile(self, histogram: str, part: float) -> tuple[float, float]:
        """Returns the bounds of the bucket that has this quantile of what was observed between the readings."""
        buckets = sorted((_bound(le), count) for le, count in self.grew_by(f"{histogram}_bucket", "le").items())
        whole, below = buckets[-1][1] if buckets else 0.0, 0.0
        for bound, count in buckets:
            if count >= part * whole and whole:
                return below, bound
            below = bound
        return 0.0, 0.0


class Snapshot(msgspec.Struct, frozen=True):
    seconds: float  # between the two readings
    unix_s: float
    report: StatusReport
    processes: tuple[ProcessMetrics, ...]
    restarts: tuple[str, ...] = ()  # processes of this machine that do not run or were restarted lately, in words
    unseen: tuple[str, ...] = ()  # processes whose metrics this machine cannot reach

    @property
    def coordinator(self) -> ProcessMetrics:
        have = (one for one in self.processes if "crossdock_coordinator_requests_admitted_total" in one.series)
        return next(have, ProcessMetrics("coordinator", {}))

    def of_role(self, role: str) -> list[ProcessMetrics]:
        """Returns the workers of a role, without processes that have both, which share one engine."""
        has = f"crossdock_{role}_step_seconds_count"
        other = "crossdock_decode_step_seconds_count" if role == "prefill" else "crossdock_prefill_step_seconds_count"
        return [one for one in self.processes if has in one.series and other not in one.series]


def _bound(text: str) -> float:
    return inf if text == "+Inf" else float(text)


def readings(before: Samples, after: Samples) -> dict[str, list[Sample]]:
    """Joins two readings of the same process; a counter that began anew has grown from 0."""
    earlier = {(name, tuple(sorted(labels.items()))): value for name, labels, value in before}
    found: dict[str, list[Sample]] = defaultdict(list)
    for name, labels, value in after:
        was = earlier.get((name, tuple(sorted(labels.items()))), 0.0)
        found[name].append(Sample(dict(labels), value, value - was if value >= was else value))
    return dict(found)
