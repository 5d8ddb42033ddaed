"""The core's state in terms for people: `crossdock status`, and how long to wait before trying again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest

import msgspec

from coordinator.accounting.goodput import GoodputCounts
from coordinator.policy.versions import PolicyInForce
from coordinator.reporting.served import services
from coordinator.state import State
from proto.limits import MAX_CLASSES_SHOWN
from proto.messages import Hello, Role, Submit
from proto.policy import ArmStatus
from proto.status import (
    ClassStatus,
    PairStatus,
    PolicyStatus,
    Process,
    SessionStatus,
    StatusReport,
    TenantStatus,
    WorkerStatus,
)
from scheduler.request import Request
from scheduler.waiting.projection import Speed
from scheduler.waiting.tenant_work import UNCOMPUTED
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.pool import Pool

NO_CAPACITY_S = 5.0  # about the time in which a supervised worker comes back, in seconds
TENANTS_SHOWN = 16
HUNG_SHOWN = 16
WORKERS_SHOWN = 1024
PAIRS_SHOWN = 4096  # a bound, so that a report fits its frame with any data from workers
COUNTER_MAX = (1 << 63) - 1
"""The largest number that MessagePack and its readers take; some are sums of numbers that workers report."""


def retry_after_s(state: State, submit: Submit, fingerprint: int, now: float) -> float:
    """Returns seconds after which a rejected request should come again: see `Projection.retry_after_s`."""
    pool, queue = state.cluster.pools.get(submit.model), state.cluster.queues.get(submit.model)
    if pool is None or queue is None or not pool.servable():
        return NO_CAPACITY_S
    path = state.path(submit)
    at, tokens = speed(state, pool, path, now), submit.prompt_tokens
    before = queue.line.work.before(path, UNCOMPUTED, tokens) - tokens
    computed_s = before / at.prompt_tokens_per_s if at.prompt_tokens_per_s else 0.0
    return queue.projection.retry_after_s(path, queue.work(submit, path), fingerprint, at, now, computed_s)


def wait_s(state: State, request: Request, now: float) -> float:
    """How long a new request would wait for a place: see `Projection.wait_s`."""
    model, path = request.submit.model, request.path
    queue, pool = state.cluster.queues[model], state.cluster.pools[model]
    work, urgent, at = queue.work(request.submit, path), request.first_token_ms > 0, speed(state, pool, path, now)
    return queue.projection.wait_s(path, work, at, now, urgent=urgent, lacks=pool.shares.lacks(path))


def speed(state: State, pool: Pool, path: tuple[str, str, str], now: float) -> Speed:
    """The speed at which a new request of this tenant gets a place."""
    apart = pool.is_apart(state.limits.priority_classes[path[0]].tpot_ms or 0.0, now)
    return Speed(pool.tokens_per_s(), bool(pool.wakeups.closed), apart)


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
        gateways=tuple(sorted(hello.name for hello in state.peers.values() if hello.role is Role.GATEWAY)),
        queued=sum(len(queue) for queue in state.cluster.queues.values()),
        running={
            name.value: count for name, count in Counter(one.state for one in state.cluster.requests.values()).items()
        },
        finished=dict(state.outcomes),
        counters={name: min(count, COUNTER_MAX) for name, count in state.counters.items()},
        kv_pairs=tuple(sorted(_pairs(state), key=lambda pair: (pair.prefill, pair.decode))[:PAIRS_SHOWN]),
        circuit_open=tuple(sorted(_left_out(state))),
        tenants=_tenants(state),
        metrics={hello.name: hello.metrics for hello in state.peers.values() if hello.metrics},
        hung=tuple(Process(hello.name, hello.pid) for hello in list(state.fenced.values())[-HUNG_SHOWN:]),
        flips=tuple(flip.status() for flip in state.flips),
        traffic=tuple(
            pool.traffic.report(
                model, lambda name: _emitted(state, name), max(state.cluster.queues[model].line.tokens, 0), state.now
            )
            for model, pool in state.cluster.pools.items()
        ),
        step_times=tuple(
            sample.report(model, role, state.now)
            for model, pool in state.cluster.pools.items()
            for role, sample in pool.step_times.items()
        ),
        classes=classes(state),
        sessions=tuple(
            SessionStatus(model, len(one), one.leases, one.leased_tokens)
            for model, one in ((model, pool.sessions) for model, pool in state.cluster.pools.items())
        ),
        policy=_policy(state.goodput.policy),
        autopilots=tuple(
            msgspec.structs.replace(one, age_ms=1000 * max(state.now - at, 0.0))
            for one, at in state.autopilots.values()
        ),
    )


def _policy(in_force: PolicyInForce) -> PolicyStatus:
    trial = in_force.trial.number if in_force.trial is not None else 0
    return PolicyStatus(in_force.number, in_force.digest, trial, in_force.trial_digest)


def arms(state: State) -> tuple[ArmStatus, ...]:
    return tuple(
        ArmStatus(arm, one.offered, one.finished, one.kept, one.ttft_ms, one.tpot_ms)
        for arm, one in state.goodput.by_arm.items()
    )


def classes(state: State) -> tuple[ClassStatus, ...]:
    """Priority classes with a target, in the order of the tenants file."""
    found = []
    for name, one in state.limits.priority_classes.items():
        if one.has_targets:
            counts = state.goodput.by_class.get(name, GoodputCounts())
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
    waiting: Counter[str] = Counter()
    for queue in state.cluster.queues.values():
        for one in services(queue, state.now):
            costs[one.tenant] = costs.get(one.tenant, 0.0) + one.cost_per_s
            waiting[one.tenant] += one.waiting
    whole = sum(costs.values())
    first = nsmallest(TENANTS_SHOWN, costs, key=lambda tenant: (-costs[tenant], tenant))
    return tuple(
        TenantStatus(name, min(costs[name] / whole, 1.0) if whole > 0 else 0.0, waiting[name]) for name in first
    )


def _pairs(state: State) -> list[PairStatus]:
    return [
        PairStatus(
            worker.hello.name, state.cluster.workers[pair.decode_incarnation].hello.name, pair.transport, pair.why
        )
        for worker in state.cluster.workers.values()
        for pair in {pair.decode_incarnation: pair for pair in worker.kv_pairs}.values()
        if pair.decode_incarnation in state.cluster.workers
    ]


def _left_out(state: State) -> list[str]:
    found = []
    for pool in state.cluster.pools.values():
        for pair, breaker in pool.breakers.pairs.items():
            names = " → ".join(state.cluster.workers[one].hello.name for one in pair if one != NOBODY)
            what = "attempts" if NOBODY in pair else "transfers"
            again_s = max(breaker.open_until - state.now, 0.0)
            if breaker.tripped:
                found.append(f"{names}: {breaker.failures} {what} failed in a row; tried again in {again_s:.0f} s")
    return found


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
