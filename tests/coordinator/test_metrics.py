"""What the coordinator exports of its state."""

from coordinator.core import Core
from coordinator.reporting.metrics import CoordinatorMetrics


def test_what_the_core_begins_to_count_is_exported_without_another_line() -> None:
    core = Core()
    registry = CoordinatorMetrics(core, lambda: 0.0).registry
    core.counters.update(something_new=2, rejected_new_reason=3, prefill_lost=4)
    for name, labels, value in (
        ("events", {"event": "something_new"}, 2),
        ("requests_rejected", {"reason": "new_reason"}, 3),
        ("workers_lost", {"role": "prefill"}, 4),
    ):
        assert registry.get_sample_value(f"crossdock_coordinator_{name}_total", labels) == value
    assert registry.get_sample_value("crossdock_coordinator_events_total", {"event": "prefill_lost"}) is None
