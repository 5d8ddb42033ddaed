"""Metrics of goodput: requests within their class's targets and by version of the policy.

All are read from the core's state when metrics are requested.
"""

from collections.abc import Callable, Iterator

from coordinator.reporting.schedule_metrics import PREFIX
from coordinator.state import State
from runtime.metrics.registry import Labels, MetricsRegistry


def goodput_metrics(registry: MetricsRegistry, core: Callable[[], State]) -> None:
    def by_class() -> Iterator[tuple[Labels, float]]:
        for name, counts in core().goodput.by_class.items():
            yield (name, "offered"), counts.offered
            yield (name, "finished"), counts.finished
            yield (name, "within_targets"), counts.kept

    registry.read(
        "counter",
        PREFIX + "class_requests",
        "Requests by priority class: offered (without those refused for what they are or for a quota), finished, and"
        " finished within the class's ttft_ms and tpot_ms.",
        ("priority_class", "result"),
        by_class,
    )

    def versions() -> Iterator[tuple[Labels, float]]:
        policy = core().goodput.policy
        yield ("active", str(policy.number), policy.digest), 1
        if policy.trial is not None:
            yield ("candidate", str(policy.trial.number), policy.trial_digest), 1

    registry.read(
        "gauge",
        PREFIX + "policy_info",
        "The version of the scheduling policy that is in force, and the one on trial.",
        ("arm", "version", "digest"),
        versions,
    )

    def by_arm() -> Iterator[tuple[Labels, float]]:
        for arm, counts in core().goodput.by_arm.items():
            yield (arm, "offered"), counts.offered
            yield (arm, "finished"), counts.finished
            yield (arm, "within_targets"), counts.kept

    registry.read(
        "gauge",
        PREFIX + "policy_requests",
        "Requests by version of the policy, since that is in force or on trial; see crossdock policy compare.",
        ("arm", "result"),
        by_arm,
    )
