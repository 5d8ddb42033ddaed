"""What the coordinator exports of its state."""

from collections import Counter

from coordinator.core import Core
from coordinator.reporting import status
from coordinator.reporting.metrics import CoordinatorMetrics
from runtime.link.peer import LinkCounters
from runtime.metrics.common import link_counters


def test_new_core_counters_are_exported() -> None:
    """A counter that the core begins to use is exported without further code."""
    core = Core()
    registry = CoordinatorMetrics(core.state, lambda: 0.0).registry
    core.cluster.counters.update(something_new=2, rejected_new_reason=3, prefill_lost=4)
    for name, labels, value in (
        ("events", {"event": "something_new"}, 2),
        ("requests_rejected", {"reason": "new_reason"}, 3),
        ("workers_lost", {"role": "prefill"}, 4),
    ):
        assert registry.get_sample_value(f"crossdock_coordinator_{name}_total", labels) == value
    assert registry.get_sample_value("crossdock_coordinator_events_total", {"event": "prefill_lost"}) is None


def test_counters_continue_after_absence() -> None:
    """The process goes on with a core that knows nothing."""
    core = Core()
    metrics = CoordinatorMetrics(core.state, lambda: 0.0)
    links = {"control": LinkCounters(messages_in=7, silent=Counter({"client": 2}))}
    link_counters(metrics.registry, links)
    core.cluster.counters.update(something=2, prefill_lost=4)
    core.state.outcomes.update(finished=5)
    metrics.refused_behind = 3

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"crossdock_{name}_total", labels)

    def all_counters() -> dict[tuple[str, str], float]:
        return {
            (sample.name, str(sample.labels)): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if family.type == "counter" and sample.name.startswith("crossdock_")
        }

    for absences in (1, 2):
        before, shown = all_counters(), status.status(core.state)
        core = Core()
        metrics.begin_anew(core.state, shown)
        links["control"] = LinkCounters()
        after = all_counters()
        assert {name for name in before if after[name] < before[name]} == set()
        assert value("coordinator_absences") == absences
    core.cluster.counters.update(something=1)
    links["control"].messages_in += 1
    metrics.refused_behind += 1
    assert (
        value("coordinator_events", event="something") == 3
        and value("coordinator_requests_ended", outcome="finished") == 5
    )
    assert value("link_received_messages", port="control") == 8 and value("coordinator_requests_refused_behind") == 4


def test_status_includes_counts_before_absence() -> None:
    now, earlier = ({"a": 1}, {"finished": 2}), ({"a": 4, "b": 1}, {"finished": 3, "failed": 1})
    assert status.summed(now, earlier) == [{"a": 5, "b": 1}, {"finished": 5, "failed": 1}]
