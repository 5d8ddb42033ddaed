"""Handlers for processes that come and go, and for the requests that they hold."""

from coordinator.events import ProtocolViolation, Received
from coordinator.recovery import draining, flips, orphans, suspects
from coordinator.room import cluster_state
from coordinator.state import State
from proto.errors import Interrupt
from proto.messages import Hello, Release, Role
from proto.progress import Hung
from runtime.link.failure_detector import STILL_OPEN
from scheduler.lifecycle import RequestState
from scheduler.request import Request
from scheduler.workers.pool import Pool
from scheduler.workers.worker import WORKERS, Worker, worker_of

REMEMBERED_MAX = 1024
EMPTY_POOL_S_MAX = 3600.0  # how long a model without a worker stays known
_LOST = {Role.PREFILL: Interrupt.PREFILL_LOST, Role.DECODE: Interrupt.DECODE_LOST}


def up(state: State, incarnation: int, hello: Hello, now: float) -> None:
    if incarnation in state.peers:
        down(state, incarnation, "connected again", now, lives=True)
    suspects.lives(state, incarnation)
    state.peers[incarnation] = hello
    _count_restart(state, incarnation, hello)
    if hello.role in WORKERS:
        worker = worker_of(hello)
        state.scheduler.worker_up(worker, now)
        state.empty_pools.pop(hello.model, None)
        _adopt(state, worker, hello)
        draining.join(state, worker, hello.hand_over_ms, now)
        flips.worker_joined(state, hello, now)
        state.cluster.refresh_eligibility(hello.model, now)
        state.tell_gateways()
    elif hello.role is Role.GATEWAY:
        state.send(incarnation, cluster_state(state.cluster.pools))


def _count_restart(state: State, incarnation: int, hello: Hello) -> None:
    """Count a restart if another process of this name was here before."""
    if hello.role is Role.OBSERVER:
        return
    before = state.names.pop(hello.name, incarnation)
    state.counters[f"{hello.role}_restarted"] += before not in (incarnation, hello.flipped_from)
    state.names[hello.name] = incarnation
    if len(state.names) > REMEMBERED_MAX:
        state.names.popitem(last=False)


def down(state: State, incarnation: int, reason: str, now: float, *, lives: bool = False) -> None:
    """`lives`: the process still runs and has only lost its connection, so its requests are not suspected."""
    hello = state.peers.pop(incarnation, None)
    if hello is None:
        return
    worker = state.cluster.workers.get(incarnation)
    if worker is not None:
        hung = incarnation in state.fenced
        drained = worker.draining and not hung
        why = Interrupt.DRAINED if drained else _LOST[hello.role]
        state.counters[f"{hello.role}_{'drained' if drained else 'lost'}"] += 1
        state.unproven.pop(incarnation, None)
        pool = state.cluster.pools[hello.model]
        state.scheduler.worker_down(worker, now)
        pool.traffic.lost += not drained
        if not pool.prefill and not pool.decode:
            state.empty_pools[hello.model] = now
        for step, _ in worker.steps.values():
            for chunk in step.chunks:
                state.record_usage(state.billing.lost(chunk.request_id, now))
        for key, allocation in worker.allocations.items():
            state.charge_room_for_large(worker, key, allocation)
            emitted = worker.forwarded(key)
            state.emitted(hello.model, allocation.path, key[0], allocation.resumed_tokens, emitted, first=emitted > 0)
            state.record_usage(state.billing.lost(key[0], now))
        state.cluster.drop_retained_on(worker)
        if not drained and not lives:
            count = suspects.count_silence if reason.startswith(STILL_OPEN) else suspects.count_loss
            count(state, worker)
        for request in draining.dependents(state, worker):
            state.interrupt(request, why, f"{hello.name}: {reason}"[:500], now)
            if hello.role is Role.PREFILL and not _has_better(pool, request, hello.host):
                state.cluster.retain_allocation(request)
        state.cluster.refresh_eligibility(hello.model, now)
        flips.worker_lost(state, worker, reason)
        state.tell_gateways()
    elif hello.role is Role.GATEWAY:
        orphans.gateway_lost(state, incarnation, hello)


def _has_better(pool: Pool, request: Request, host: str) -> bool:
    """Whether its decode worker is on a host that has just lost a worker, and there are others."""
    decode = pool.decode.get(request.decode_incarnation)
    if not host or decode is None or decode.hello.host != host:
        return False
    return any(worker.hello.host != host and not worker.draining for worker in pool.decode.values())


def forget_models(state: State, now: float) -> None:
    """Forget models that have been without a worker for long, unless a request still waits for one."""
    while state.empty_pools:
        model, since = next(iter(state.empty_pools.items()))
        if since + EMPTY_POOL_S_MAX > now:
            break
        del state.empty_pools[model]
        if any(request.submit.model == model for request in state.cluster.requests.values()):
            state.empty_pools[model] = now
            continue
        del state.cluster.pools[model], state.cluster.queues[model]
        state.autopilots.pop(model, None)


def hung(state: State, incarnation: int, event: Received, now: float) -> None:
    """Fence a hung worker, which is about to end itself. Even if it does not end, its further messages are ignored, and it may
    not join again."""
    assert isinstance(event.message, Hung)
    state.counters[f"{state.peers[incarnation].role}_hung"] += 1
    state.fenced[incarnation] = state.peers[incarnation]
    if len(state.fenced) > REMEMBERED_MAX:
        state.fenced.popitem(last=False)
    down(state, incarnation, f"its step hung for {event.message.ran_ms / 1000:.1f} s", now)


def _adopt(state: State, worker: Worker, hello: Hello) -> None:
    """Count what the worker held through a loss of the link; streams we have given up meanwhile are to end."""
    for held in hello.held:
        key = (held.request_id, held.attempt)
        request = state.cluster.current(*key)
        if request is not None and request.state is RequestState.QUEUED:
            state.out.append(ProtocolViolation(worker.incarnation, "holds an attempt that was not placed yet"))
            return
        if not worker.adopt(held, state.limits.kv_overcommit):
            state.out.append(ProtocolViolation(worker.incarnation, "holds more than its capacity"))
            return
        state.billing.found(held, of_answer=worker.is_decode)
        if held.request_id in state.cluster.requests or held.request_id in state.ended:
            state.send(worker.incarnation, Release(*key))
