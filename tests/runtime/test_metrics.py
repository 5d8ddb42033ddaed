"""What is registered, as Prometheus reads it; and which tenants have series of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import DuplicateTimeseries

from runtime.metrics.registry import SERIES_MAX, STEP_S, MetricsRegistry
from runtime.metrics.tenant_labels import OTHER, TenantLabels

ROOT = Path(__file__).parents[2]


def read(registry: MetricsRegistry, prefix: str = "x") -> dict[str, float]:
    return {
        sample.name + "".join(f"/{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def test_metrics_omit_creation_times() -> None:
    """Counted and computed metrics are exported, without times of creation."""
    registry, state = MetricsRegistry("gateway"), {"a": 1.0}
    registry.counter("x_counted", "x").inc(3)
    registry.histogram("x_seconds", "x", (1.0, 2.0)).observe(1.0)
    registry.gauge("x_up", "x", lambda: True)
    registry.total("x_told", "x", lambda: 2)
    registry.by("counter", "x_state", "x", "key", lambda: state)
    registry.before.append(lambda: state.update(b=2.0))
    assert read(registry) == {
        "x_counted_total": 3.0,
        "x_seconds_bucket/1.0": 1.0,
        "x_seconds_bucket/2.0": 1.0,
        "x_seconds_bucket/+Inf": 1.0,
        "x_seconds_count": 1.0,
        "x_seconds_sum": 1.0,
        "x_up": 1.0,
        "x_told_total": 2.0,
        "x_state_total/a": 1.0,
        "x_state_total/b": 2.0,
    }


def test_process_info_is_exported() -> None:
    """A process exports its name, model and role."""
    registry = MetricsRegistry("gateway")
    registry.introduce(name="g", model="m")
    (sample,) = read(registry, "crossdock_process_info")
    assert sample.startswith("crossdock_process_info/m/g/gateway/")


def test_duplicate_metric_name_is_refused() -> None:
    """A second metric of the same name is refused."""
    registry = MetricsRegistry("gateway")
    registry.histogram("x_seconds", "x", STEP_S)
    with pytest.raises(DuplicateTimeseries):
        registry.gauge("x_seconds", "x", lambda: 1)


def test_labels_are_bounded_and_escaped() -> None:
    """Series of one metric are bounded in number, and odd label values are escaped."""
    registry = MetricsRegistry("gateway")
    registry.by("gauge", "x", "x", "who", lambda: {f"n{number}": 1.0 for number in range(2 * SERIES_MAX)})
    assert len(read(registry)) == SERIES_MAX
    odd = MetricsRegistry("gateway")
    odd.counter("x", "x", "why").labels('a"b\\c\nd').inc()
    assert read(odd) == {'x_total/a"b\\c\nd': 1.0}


def test_multiprocess_environment_is_ignored(tmp_path: Path) -> None:
    """The variable for Prometheus multi-process mode has no effect."""
    made = "from runtime.metrics.registry import MetricsRegistry as M; M('gateway').counter('x', 'x').inc()"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", made], cwd=ROOT, env=environment, timeout=60, check=True)
    assert not list(tmp_path.iterdir())


def test_top_tenants_have_own_series() -> None:
    """Tenants with the most service have series of their own; the others share one."""
    registry = MetricsRegistry("gateway")
    counter = registry.counter("x", "x", "tenant")
    tenants = TenantLabels(counter, most=3)

    def serve(name: str, amount: float) -> None:
        tenants.served(name, amount)
        counter.labels(tenants.label(name)).inc()

    for name in ("a", "b", "c", "big", "c"):
        serve(name, 1000.0 if name == "big" else 10.0)
    tenants.rank(100.0)
    assert read(registry)[f"x_total/{OTHER}"] == 1.0, "it came when all places were taken"
    assert tenants.label("big") == "big" and sum(tenants.label(n) == n for n in "abc") == 2
    before = read(registry)
    for _ in range(50):
        serve("a", 50.0)
        serve("d", 1.0)
    tenants.rank(120.0)
    assert tenants.label("d") == OTHER, "once a minute is enough"
    tenants.rank(161.0)
    after = read(registry)
    assert all(after.get(name, value) >= value for name, value in before.items()), "no series ever falls"
    assert len([name for name in after if OTHER not in name]) <= 3
