"""The core's state in terms for people: `crossdock status`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from math import inf
from operator import itemgetter
from typing import NamedTuple

import msgspec

from coordinator.accounts import GoodputCounts
from coordinator.state import State
from proto.limits import MAX_CLASSES_SHOWN
from proto.messages import Hello, Message, Role, StatusRequest
from proto.policy import ArmStatus, RevisionStatus
from proto.status import (
    AutopilotReport,
    ClassStatus,
    PairStatus,
    PolicyStatus,
    Process,
    SessionStatus,
    StatusReport,
    TenantStatus,
    WorkerStatus,
)
from scheduler.fairness.fair_node import Path
from scheduler.lifecycle import RequestState
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.circuit_breakers import NOBODY

TENANTS_SHOWN = 16
HUNG_SHOWN = 16
WORKERS_SHOWN = 1024
PAIRS_SHOWN = 4096  # a bound, so that a report fits its frame with any data from workers
COUNTER_MAX = (1 << 63) - 1
"""The largest number that MessagePack and its readers take; some are sums of numbers that workers report."""


def on_status_request(state: State, sender: int, message: Message) -> None:
    """Answer with what workers last reported about themselves. Then ask them for new reports, which the next answer will
    contain."""
    state.send(sender, status(state))
    for worker in state.cluster.workers:
        state.send(worker, StatusRequest())


def on_autopilot_report(state: State, observer: int, report: AutopilotReport) -> None:
    """Store an autopilot's status for status reports, and answer with the present status."""
    if report.status.model in state.cluster.pools:
        state.members.autopilots[report.status.model] = report.status, state.now
    on_status_request(state, observer, report)


def workers(state: State) -> tuple[WorkerStatus, ...]:
    found = [
        WorkerStatus(
            name=worker.hello.name,
            role=worker.hello.role,
            model=worker.hello.model,
            host=worker.hello.host,
            pid=worker.hello.pid,
            kv_blocks=worker.capacity.kv_blocks,
            kv_blocks_used=worker.capacity.kv_blocks - worker.free_blocks,
            requests=len(worker.allocations),
            steps_in_flight=len(worker.steps),
            tokens_forwarded=worker.tokens_forwarded,
            own_blocks=worker.kv_held.blocks,
            own_blocks_quarantined=worker.kv_held.blocks_quarantined,
            own_sessions=worker.kv_held.sessions,
            draining=worker.draining,
            numerics=worker.hello.numerics,
            steps=worker.steps_done,
            process=worker.process_name,
        )
        for worker in state.cluster.workers.values()
    ]
    return tuple(sorted(found, key=lambda w: (w.role, w.name))[:WORKERS_SHOWN])


def status(state: State) -> StatusReport:
    return StatusReport(
        workers=workers(state),
        gateways=tuple(sorted(hello.name for hello in state.members.peers.values() if hello.role is Role.GATEWAY)),
        queued=sum(len(queue) for queue in state.cluster.queues.values()),
        running=_by_state(state),
        finished=dict(state.outcomes),
        counters={name: min(count, COUNTER_MAX) for name, count in state.counters.items()},
        kv_pairs=_pairs(state),
        circuit_open=tuple(left_out(state)),
        tenants=_tenants(state),
        metrics={hello.name: hello.metrics for hello in state.members.peers.values() if hello.metrics},
        hung=tuple(Process(hello.name, hello.pid) for hello in list(state.members.fenced.values())[-HUNG_SHOWN:]),
        flips=tuple(flip.status() for flip in state.members.flips),
        traffic=tuple(
            pool.traffic.report(
                model, lambda name: _emitted(state, name), max(state.cluster.queues[model].line.tokens, 0), state.now
            )
            for model, pool in state.cluster.pools.items()
        ),
        classes=classes(state),
        sessions=tuple(
            SessionStatus(model, len(one), one.leases, one.leased_tokens)
            for model, one in ((model, pool.sessions) for model, pool in state.cluster.pools.items())
        ),
        policy=policy(state),
        autopilots=tuple(
            msgspec.structs.replace(one, age_ms=1000 * max(state.now - at, 0.0))
            for one, at in state.members.autopilots.values()
        ),
    )


def _by_state(state: State) -> dict[str, int]:
    """Waiting requests are known by their number: there may be 100,000, and hashing a state for each takes long."""
    others = [one.state.value for one in state.cluster.requests.values() if one.state is not RequestState.QUEUED]
    queued = sum(len(queue) for queue in state.cluster.queues.values())
    return dict(Counter(others)) | ({RequestState.QUEUED.value: queued} if queued else {})


def policy(state: State) -> PolicyStatus:
    in_force = state.accounts.goodput.policy
    trial = in_force.trial.number if in_force.trial is not None else 0
    return PolicyStatus(in_force.number, in_force.digest, trial, in_force.trial_digest)


def arms(state: State) -> tuple[ArmStatus, ...]:
    return tuple(
        ArmStatus(arm, one.offered, one.finished, one.kept, one.ttft_ms, one.tpot_ms)
        for arm, one in state.accounts.goodput.by_arm.items()
    )


def revisions(state: State, now: float) -> tuple[RevisionStatus, ...]:
    """Revisions that have workers, or had some within the last hour."""
    return tuple(
        _revision(state, model, revision, key, now)
        for model, known in state.revisions.of.items()
        for revision, key in known.items()
    )


def _revision(state: State, model: str, revision: str, key: str, now: float) -> RevisionStatus:
    pool, counts = state.cluster.pools[key], state.accounts.goodput.of_pool(key)
    rollout, is_in_force = state.revisions.rollouts.get(model), state.revisions.in_force(model) == key
    on_trial = rollout is not None and rollout.trial == revision
    prefill, decode = (sum(not one.draining for one in side.values()) for side in (pool.prefill, pool.decode))
    return RevisionStatus(
        model,
        revision,
        prefill,
        decode,
        is_in_force,
        on_trial,
        *(
            (rollout.share, rollout.by_organisation, rollout.organisations)
            if rollout and on_trial
            else (0.0, False, ())
        ),
        state.alive[key],
        pool.sessions.awaited(now),
        counts.offered,
        counts.finished,
        counts.failed,
        counts.ttft_ms,
    )


def classes(state: State) -> tuple[ClassStatus, ...]:
    """Priority classes with a target, in the order of the tenants file."""
    found = []
    for name, one in state.limits.priority_classes.items():
        if one.has_targets:
            counts = state.accounts.goodput.by_class.get(name, GoodputCounts())
            targets = (one.ttft_ms or 0.0, one.tpot_ms or 0.0, one.percentile)
            found.append(ClassStatus(name, *targets, counts.offered, counts.finished, counts.kept))
    return tuple(found[:MAX_CLASSES_SHOWN])


def _emitted(state: State, request_id: str) -> int | None:
    """Returns the tokens of a running answer that its worker is known to have emitted; None if it has ended."""
    request = state.cluster.requests.get(request_id)
    if request is None:
        return None
    worker = state.cluster.workers.get(request.decode_incarnation)
    if worker is None:
        return 0
    return request.submit.resumed_tokens + worker.forwarded(request.key)


def _tenants(state: State) -> tuple[TenantStatus, ...]:
    """Returns the tenants that were served most lately, or that wait."""
    costs: dict[str, float] = {}
    waiting: dict[str, int] = {}
    for queue in state.cluster.queues.values():
        for one in services(queue, state.now):
            costs[one.tenant] = costs.get(one.tenant, 0.0) + one.cost_per_s
            waiting[one.tenant] = waiting.get(one.tenant, 0) + one.waiting
    whole = sum(costs.values()) or inf
    first = nsmallest(TENANTS_SHOWN, ((-cost, name) for name, cost in costs.items()))
    return tuple(TenantStatus(name, min(-cost / whole, 1.0), waiting[name]) for cost, name in first)


def with_ttft(tenants: Iterable[TenantStatus], ttft_ms: Mapping[str, tuple[float, float]]) -> Iterator[TenantStatus]:
    """`ttft_ms`: the median and the 99th percentile of each tenant."""
    for one in tenants:
        p50, p99 = ttft_ms.get(one.name, (0.0, 0.0))
        yield msgspec.structs.replace(one, ttft_p50_ms=p50, ttft_p99_ms=p99)


def _pairs(state: State) -> tuple[PairStatus, ...]:
    """Returns the first pairs by name. There may be as many as prefill workers times decode workers."""
    found: list[PairStatus] = []
    workers = state.cluster.workers
    for worker in sorted(workers.values(), key=lambda worker: worker.hello.name):
        own = {pair.decode_incarnation: pair for pair in worker.kv_pairs if pair.decode_incarnation in workers}
        pairs = [(workers[incarnation].hello.name, pair) for incarnation, pair in own.items()]
        pairs.sort(key=itemgetter(0))
        left = PAIRS_SHOWN - len(found)
        found += [PairStatus(worker.hello.name, name, pair.transport, pair.why) for name, pair in pairs[:left]]
        if len(found) == PAIRS_SHOWN:
            break
    return tuple(found)


def left_out(state: State) -> list[str]:
    """Returns the pairs and workers that get no requests for a while, in words."""
    found = []
    for pool in state.cluster.pools.values():
        for pair, breaker in pool.breakers.pairs.items():
            if breaker.tripped:
                names = " → ".join(state.cluster.workers[one].hello.name for one in pair if one != NOBODY)
                what = "attempts" if NOBODY in pair else "transfers"
                again_s = max(breaker.open_until - state.now, 0.0)
                found.append(f"{names}: {breaker.failures} {what} failed in a row; tried again in {again_s:.0f} s")
    return sorted(found)


def summed(
    now: tuple[Mapping[str, int], Mapping[str, int]], earlier: tuple[Mapping[str, int], Mapping[str, int]]
) -> list[dict[str, int]]:
    """Returns counters plus their values from before they began anew."""
    return [
        {name: min(one.get(name, 0) + before.get(name, 0), COUNTER_MAX) for name in {**before, **one}}
        for one, before in zip(now, earlier, strict=True)
    ]


def targets(own: tuple[Role, str, str], hellos: Iterable[Hello]) -> list[dict[str, object]]:
    """All that can be observed, as Prometheus asks for it (`http_sd_configs`). `own`: role, name and address."""
    others = [(hello.role, hello.name, hello.metrics) for hello in hellos if hello.metrics]
    return [
        {"targets": [address], "labels": {"crossdock_role": role.value, "crossdock_name": name}}
        for role, name, address in (own, *others)
    ]


# --- tenants that were served lately ----------------------------------------------------------------------------------


class ServedTenant(NamedTuple):
    """One tenant in one priority class of one model."""

    path: Path
    cost_per_s: float  # dispatched over about the last ten seconds, answers as estimated
    waiting: int  # requests

    @property
    def tenant(self) -> str:
        return "/".join(filter(None, self.path[1:]))


def services(queue: WaitQueue, now: float) -> Iterator[ServedTenant]:
    """Yields the tenants that were served lately, or that wait."""
    for path in {**queue.served, **queue.line.tenants}:
        served = queue.served.get(path)
        cost_per_s, waiting = served.per_s(now) if served else 0.0, queue.line.waiting(path)
        if waiting or cost_per_s >= 0.01:
            yield ServedTenant(path, cost_per_s, waiting)


def jain(values: Iterable[float]) -> float:
    """Jain's index (Jain, Chiu & Hawe 1984): 1 where all have the same, 1/n where one of n has all."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def evenness(queue: WaitQueue, found: Iterable[ServedTenant]) -> dict[str, float]:
    """Jain's index of the cost served per weight for each priority class, over organisations with requests waiting. Those
    without any get what they ask for, which is no question of fairness."""
    served: dict[Path, float] = {}
    waiting: set[Path] = set()
    for one in found:
        where = one.path[:2]
        served[where] = served.get(where, 0.0) + one.cost_per_s
        if one.waiting:
            waiting.add(where)
    by_priority_class: dict[str, list[float]] = {}
    for path in sorted(waiting):
        by_priority_class.setdefault(path[0], []).append(served[path] / queue.weight(path))
    return {priority_class: jain(values) for priority_class, values in by_priority_class.items()}
