"""Metrics of the coordinator. Metrics of the core's state are read when they are requested; the driver counts the others, once
or twice per request. Pure.

A part of the core that counts something new in `State.counters` needs no line here: under the prefixes below it gets the label
value that follows them, and anything else is an event.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from coordinator.accounting.billing import Closed, Opened
from coordinator.events import StateChanged
from coordinator.reporting.recent import RecentTimes
from coordinator.reporting.status import ServedTenant, evenness, services
from coordinator.state import State
from proto.messages import Role
from proto.status import StatusReport
from runtime.metrics.registry import LATENCY_S, Labels, MetricsRegistry
from runtime.metrics.tenant_labels import OTHER, TENANTS_MAX, TenantLabels
from scheduler.lifecycle import RequestState
from scheduler.placement.steps import decode_limits
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.rates import Ratios

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


_BY_REASON = {
    "rejected": ("requests_rejected", "reason", "Requests rejected, at once or after waiting, by reason."),
    "interrupted": ("interruptions", "reason", "Attempts cut short, whose requests continue elsewhere, by reason."),
    "work_failed": ("work_failed", "reason", "Attempts that failed on a worker, by reason."),
    "lease": (
        "leases",
        "outcome",
        "Later turns of sessions, by whether KV was still there that had been kept for them.",
    ),
}
"""Prefixes of `State.counters`."""
_TOKENS = ("prompt_tokens_cached", "output_tokens", "kv_bytes_moved", "kv_exposed_us")
"""Entries of `State.counters` that have metrics of their own, or are reported better elsewhere."""
_LOST = "_lost"


class CoordinatorMetrics:
    def __init__(self, core: State, clock: Callable[[], float]) -> None:
        self.registry = registry = MetricsRegistry("coordinator")
        self.recent = RecentTimes()
        self._core, self._clock = core, clock
        self._accepted: dict[str, tuple[str, str, str]] = {}
        """Request → (tenant, model, priority class), until its bill is closed. The tuples are shared by all that are alike."""
        self._kinds: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        self._cancelled_at: dict[str, float] = {}  # requests of which workers still hold something
        self.refused_behind = 0  # requests that the driver refused, since usage could not be written fast enough
        self.earlier: tuple[Mapping[str, int], Mapping[str, int]] = {}, {}
        """Counters and requests that have ended, as `crossdock status` shows them, from before this process last began anew."""
        self._services: list[tuple[str, ServedTenant]] = []
        self._admitted = registry.counter(
            PREFIX + "requests_admitted", "Requests accepted into the queue.", "model", "priority_class"
        )
        self._tenant_tokens = registry.counter(
            PREFIX + "tenant_charged_tokens",
            "Prompt and output tokens charged, when a request's bill is closed.",
            "tenant",
        )
        self._tenant_requests = registry.counter(
            PREFIX + "tenant_requests", "Requests whose bill was closed, by outcome.", "tenant", "outcome"
        )
        self._prompt_tokens = registry.counter(
            PREFIX + "prompt_tokens",
            "Prompt tokens of requests that have ended, computed or found in a prefix cache.",
            "model",
            "source",
        )
        self._output_tokens = registry.counter(
            PREFIX + "output_tokens", "Output tokens of requests that have ended.", "model"
        )
        self._phases = registry.histogram(
            PREFIX + "phase_seconds",
            "Time of each request in the queue, in prefill, in transfer (prompt computed, KV not yet there) and in decode, over"
            " all its attempts.",
            LATENCY_S,
            *("model", "priority_class", "phase"),
        )
        self._release = registry.histogram(
            PREFIX + "cancel_to_release_seconds",
            "Time from the cancellation of a request until its workers have released it.",
            LATENCY_S,
        )
        self._absences = registry.counter(
            PREFIX + "absences", "Times that this process was stopped for longer than its peers wait, and started over."
        )
        self.absences = 0
        self._tenants = TenantLabels(self._tenant_tokens, self._tenant_requests)
        registry.before.append(self._prepare)
        self._read_requests(registry)
        goodput_metrics(registry, lambda: self._core)
        schedule_metrics(registry, lambda: self._core, self._clock)
        estimate_metrics(registry, lambda: self._core)
        self._read_fairness(registry)
        self._read_workers(registry)
        self._read_faults(registry)

    def begin_anew(self, core: State, shown: StatusReport) -> None:
        """Go on with a new core after the process was away. `shown`: the last status before. Counters never go back."""
        self.registry.carry_over()
        self.earlier = shown.counters, shown.finished
        self._core = core
        self._accepted.clear()
        self._cancelled_at.clear()
        self._services = []
        self.refused_behind = 0
        self.absences += 1
        self._absences.inc()

    # --- what the driver sees -------------------------------------------------------------------------------------------

    def on_opened(self, entry: Opened) -> None:
        kind = (entry.tenant, entry.model, entry.priority_class)
        self._accepted[entry.request_id] = self._kinds.setdefault(kind, kind)
        self._admitted.labels(entry.model, entry.priority_class).inc()
        self._cancelled_at.pop(entry.request_id, None)

    def on_state_changed(self, entry: StateChanged) -> None:
        if entry.state is RequestState.CANCELLED and entry.request_id in self._core.accounts.billing.bills:
            self._cancelled_at[entry.request_id] = self._clock()

    def on_closed(self, entry: Closed) -> None:
        """The request is over, and nothing of it is left on any worker."""
        kind = tenant, model, priority_class = self._accepted.pop(entry.request_id, (OTHER, "", ""))
        self._tenants.served(tenant, entry.charged_tokens)
        label = self._tenants.label(tenant)
        settled = self._core.accounts.billing.settled.get(entry.request_id)
        charged_before = settled.charged_tokens if settled is not None else 0
        self._tenant_tokens.labels(label).inc(max(entry.charged_tokens - charged_before, 0))
        self._tenant_requests.labels(label, entry.outcome).inc()
        self._prompt_tokens.labels(model, "computed").inc(entry.prompt_tokens)
        self._prompt_tokens.labels(model, "cached").inc(entry.cached_tokens)
        self._output_tokens.labels(model).inc(entry.output_tokens)
        phases = self._phases
        for phase, spent_ms in (
            ("queue", entry.queue_ms),
            ("prefill", entry.prefill_ms),
            ("transfer", entry.transfer_ms),
            ("decode", entry.decode_ms),
        ):
            if spent_ms > 0.0:
                phases.labels(model, priority_class, phase).observe(spent_ms / 1000)
        self.recent.add(entry, kind, self._clock())
        cancelled_at = self._cancelled_at.pop(entry.request_id, None)
        if cancelled_at is not None:
            self._release.observe(self._clock() - cancelled_at)

    # --- what is read -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        now = self._clock()
        self._tenants.rank(now)
        if len(self._kinds) > 4096:
            self._kinds = {kind: kind for kind in self._accepted.values()}
        self._services = [
            (model, one) for model, queue in self._core.cluster.queues.items() for one in services(queue, now)
        ]

    def _read_requests(self, registry: MetricsRegistry) -> None:
        def live() -> Iterator[tuple[Labels, float]]:
            for model, queue in self._core.cluster.queues.items():
                yield (model, RequestState.QUEUED), len(queue)
            states: Counter[Labels] = Counter()
            for request in self._core.interrupted.values():
                states[request.submit.model, request.state] += 1
            for worker in self._core.cluster.workers.values():
                if worker.hello.role is Role.DECODE:
                    for key in worker.allocations:
                        request_ = self._core.cluster.current(*key)
                        if request_ is not None:
                            states[request_.submit.model, request_.state] += 1
            yield from states.items()

        def ended() -> Iterator[tuple[Labels, float]]:
            for outcome, count in self._core.outcomes.items():
                if outcome != RequestState.REJECTED:
                    yield (outcome,), count
            yield ("shed",), self._core.cluster.counters["rejected_shed"]

        def deferred() -> Iterator[tuple[Labels, float]]:
            for model, pool in self._core.cluster.pools.items():
                yield (model, "no_room"), pool.no_room
                yield (model, "waits_for_cache"), pool.cache_waits

        registry.read("gauge", PREFIX + "requests", "Live requests, by state.", ("model", "state"), live)
        registry.read("counter", PREFIX + "requests_ended", "Accepted requests that have ended.", ("outcome",), ended)
        registry.read(
            "counter",
            PREFIX + "deferrals",
            "Times that a request was passed over, because there was no room or another worker has more of it cached.",
            ("model", "reason"),
            deferred,
        )
        registry.read(
            "gauge",
            PREFIX + "queue_tokens",
            "Prompt tokens that wait.",
            ("model",),
            lambda: [((model,), queue.line.tokens) for model, queue in self._core.cluster.queues.items()],
        )
        registry.total(
            PREFIX + "requests_refused_behind",
            "Requests refused because usage could not be written fast enough.",
            lambda: self.refused_behind,
        )

    def _read_fairness(self, registry: MetricsRegistry) -> None:
        def summed(values: Iterable[tuple[str, float]]) -> dict[str, float]:
            total: dict[str, float] = {}
            for tenant, value in values:
                label = self._tenants.label(tenant)
                total[label] = total.get(label, 0.0) + value
            return total

        def index() -> Iterator[tuple[Labels, float]]:
            for model, queue in self._core.cluster.queues.items():
                own = [one for other, one in self._services if other == model]
                for priority_class, value in evenness(queue, own).items():
                    yield (model, priority_class), value

        registry.by(
            "gauge",
            PREFIX + "tenant_service_rate",
            "Cost in weighted tokens per second, dispatched over about the last ten seconds; answers count as estimated.",
            "tenant",
            lambda: summed((one.tenant, one.cost_per_s) for _, one in self._services),
        )
        registry.by(
            "gauge",
            PREFIX + "tenant_waiting_requests",
            "Requests that wait.",
            "tenant",
            lambda: summed((one.tenant, one.waiting) for _, one in self._services),
        )
        registry.read(
            "counter",
            PREFIX + "tenant_over_quota",
            "Requests refused for a limit of the tenants file, for the 50 tenants and limits with the most.",
            ("tenant", "limit"),
            lambda: self._core.accounts.over_quota.most_common(TENANTS_MAX),
        )
        registry.read(
            "gauge",
            PREFIX + "fairness_jain_ratio",
            "Jain's index of that cost per weight, over organisations with requests waiting: 1 is even.",
            ("model", "priority_class"),
            index,
        )

    def _read_workers(self, registry: MetricsRegistry) -> None:
        def workers() -> Iterator[tuple[Labels, float]]:
            for model, pool in self._core.cluster.pools.items():
                yield (model, Role.PREFILL), len(pool.prefill)
                yield (model, Role.DECODE), len(pool.decode)

        def pairs() -> Iterator[tuple[Labels, float]]:
            for worker in self._core.cluster.workers.values():
                for pair in worker.kv_pairs:
                    if (decode := self._core.cluster.workers.get(pair.decode_incarnation)) is not None:
                        name = f"{worker.hello.name}/{decode.hello.name}"
                        yield (name, pair.transport, pair.why[:120]), 1.0

        registry.read("gauge", PREFIX + "workers", "Workers that are registered.", ("model", "role"), workers)
        registry.read(
            "gauge",
            PREFIX + "kv_free_ratio",
            "Share of a worker's KV blocks that the requests placed there will not need.",
            ("worker",),
            lambda: [
                ((w.hello.name,), w.free_blocks / w.capacity.kv_blocks) for w in self._core.cluster.workers.values()
            ],
        )
        registry.read(
            "gauge",
            "crossdock_kv_transport",
            "1 for each connected pair of a prefill and a decode worker, with its transport and why better ones were not used.",
            ("pair", "transport", "why"),
            pairs,
        )
        registry.total(
            PREFIX + "kv_moved_bytes", "KV handed over.", lambda: self._core.cluster.counters["kv_bytes_moved"]
        )
        registry.total(
            PREFIX + "kv_exposed_seconds",
            "Time from the end of a prompt's computation until its KV has arrived: transfer that prefill did not hide.",
            lambda: self._core.cluster.counters["kv_exposed_us"] / 1e6,
        )

    def _read_faults(self, registry: MetricsRegistry) -> None:
        def reader(prefix: str) -> Callable[[], dict[str, float]]:
            return lambda: {
                key.removeprefix(f"{prefix}_"): count
                for key, count in self._core.cluster.counters.items()
                if key.startswith(f"{prefix}_")
            }

        for prefix, (name, label, help_) in _BY_REASON.items():
            registry.by("counter", PREFIX + name, help_, label, reader(prefix))
        registry.total(
            PREFIX + "remembered_dropped",
            "Ended requests forgotten before ten minutes had passed, because there were too many. If one of them is submitted"
            " again, it runs and is charged again.",
            lambda: self._core.ended.dropped_early,
        )
        registry.by(
            "counter",
            PREFIX + "workers_lost",
            "Workers that left or were lost, by role.",
            "role",
            lambda: {
                key.removesuffix(_LOST): n
                for key, n in self._core.cluster.counters.items()
                if key.endswith(_LOST) and _is_event(key)
            },
        )
        registry.by(
            "counter",
            PREFIX + "events",
            "Other counters of the core.",
            "event",
            lambda: {
                key: n for key, n in self._core.cluster.counters.items() if not key.endswith(_LOST) and _is_event(key)
            },
        )


def _is_event(key: str) -> bool:
    return key not in _TOKENS and not any(key.startswith(f"{prefix}_") for prefix in _BY_REASON)
