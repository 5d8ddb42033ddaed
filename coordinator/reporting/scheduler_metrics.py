"""Metrics of scheduling and goodput: why steps are not larger, how far estimates were off, the oldest waits, and requests
within their class's targets.

All are read from the core's state when metrics are requested. No cost grows with the number of requests.
"""

from collections.abc import Callable, Iterator, Mapping

from coordinator.state import State
from runtime.metrics.registry import Labels, MetricsRegistry
from scheduler.placement.step_end import decode_limits
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.ratios import Ratios

PREFIX = "crossdock_coordinator_"
RESUMED = "(resumed)"  # the label of later attempts, whatever their priority class


def schedule_metrics(registry: MetricsRegistry, core: Callable[[], State], clock: Callable[[], float]) -> None:
    def steps() -> Iterator[tuple[Labels, float]]:
        for model, pool in core().cluster.pools.items():
            for end, count in pool.step_ends.items():
                yield (model, end), count

    def batches() -> Iterator[tuple[Labels, float]]:
        for model, pool in core().cluster.pools.items():
            for end, count in decode_limits(pool, core().cluster.queues[model]).items():
                yield (model, end), count

    def oldest() -> Iterator[tuple[Labels, float]]:
        now = clock()
        for model, queue in core().cluster.queues.items():
            since = queue.line.oldest_since()
            for name in {**core().limits.priority_classes, **since}:
                yield (model, name or RESUMED), max(now - since.get(name, now), 0.0)

    registry.read(
        "counter",
        PREFIX + "prefill_steps",
        "Prefill steps that were sent, by why they have no more tokens.",
        ("model", "limit"),
        steps,
    )
    registry.read(
        "gauge",
        PREFIX + "decode_batches",
        "Decode workers by why no more sequences run there.",
        ("model", "limit"),
        batches,
    )
    registry.read(
        "gauge",
        PREFIX + "leased_tokens",
        "Tokens whose KV is kept for the next turns of sessions, until their room is needed.",
        ("model",),
        lambda: [((model,), pool.sessions.leased_tokens) for model, pool in core().cluster.pools.items()],
    )
    registry.read(
        "gauge",
        PREFIX + "oldest_wait_seconds",
        f"How long the request that waits longest has waited; {RESUMED}: of later attempts.",
        ("model", "priority_class"),
        oldest,
    )


def estimate_metrics(registry: MetricsRegistry, core: Callable[[], State]) -> None:
    def ratios(of: Callable[[WaitQueue], Mapping[str, Ratios]]) -> Callable[[], Iterator[tuple[Labels, float]]]:
        def read() -> Iterator[tuple[Labels, float]]:
            for model, queue in core().cluster.queues.items():
                for name, found in of(queue).items():
                    yield (model, name, "sum"), found.sum
                    for bound, count in found.buckets():
                        yield (model, name, bound), count

        return read

    labels = ("model", "priority_class")
    registry.read_histogram(
        PREFIX + "output_estimate_ratio",
        "Tokens of each answer that finished, divided by those expected when its request was admitted.",
        labels,
        ratios(lambda queue: queue.output_ratios),
    )
    registry.read_histogram(
        PREFIX + "wait_projection_ratio",
        "Wait for a place of each request that got one, divided by that projected when it came. Waits below 0.1 s count as"
        " 0.1 s, and are left out where such a one was projected.",
        labels,
        ratios(lambda queue: queue.projection.ratios),
    )


def goodput_metrics(registry: MetricsRegistry, core: Callable[[], State]) -> None:
    def by_class() -> Iterator[tuple[Labels, float]]:
        for name, counts in core().accounts.goodput.by_class.items():
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
        policy = core().accounts.goodput.policy
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
        for arm, counts in core().accounts.goodput.by_arm.items():
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
