"""Handlers for processes that come and go, and for the requests that they hold."""

from collections.abc import Iterable, Iterator

from coordinator.events import ProtocolViolation
from coordinator.recovery import draining, flips, suspects
from coordinator.state import State, cluster_state
from proto.errors import CancelReason, Interrupt
from proto.messages import Hello, Release, Role
from proto.progress import Hung
from runtime.link.failure_detector import STILL_OPEN
from scheduler.lifecycle import TERMINAL, RequestState, Trigger
from scheduler.request import RETAINED, Request
from scheduler.workers.pool import Pool
from scheduler.workers.worker import WORKERS, Worker, worker_of

REMEMBERED_MAX = 1024
EMPTY_POOL_S_MAX = 3600.0  # how long a model without a worker stays known
_LOST = {Role.PREFILL: Interrupt.PREFILL_LOST, Role.DECODE: Interrupt.DECODE_LOST}


def on_up(state: State, incarnation: int, hello: Hello) -> None:
    members = state.members
    if incarnation in members.peers:
        on_down(state, incarnation, "connected again", lives=True)
    suspects.take_back_loss(state, incarnation)
    members.peers[incarnation] = hello
    _count_restart(state, incarnation, hello)
    if hello.role in WORKERS:
        worker = worker_of(hello)
        state.scheduler.worker_up(worker, state.now)
        members.empty_pools.pop(hello.model, None)
        state.revisions.joined(hello)
        _adopt(state, worker, hello)
        draining.on_worker_joined(state, worker, hello.hand_over_ms)
        flips.on_worker_joined(state, hello)
        state.cluster.refresh_eligibility(hello.model, state.now)
        state.send_gateways()
    elif hello.role is Role.GATEWAY:
        state.send(incarnation, cluster_state(state.revisions.pools_in_force()))


def _count_restart(state: State, incarnation: int, hello: Hello) -> None:
    """Count a restart if another process of this name was here before."""
    if hello.role is Role.OBSERVER:
        return
    names = state.members.names
    before = names.pop(hello.name, incarnation)
    state.counters[f"{hello.role}_restarted"] += before not in (incarnation, hello.flipped_from)
    names[hello.name] = incarnation
    if len(names) > REMEMBERED_MAX:
        names.popitem(last=False)


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


def on_down(state: State, incarnation: int, reason: str, *, lives: bool = False) -> None:
    """`lives`: the process still runs and has only lost its connection, so its requests are not suspected."""
    hello = state.members.peers.pop(incarnation, None)
    if hello is None:
        return
    worker = state.cluster.workers.get(incarnation)
    if worker is not None:
        _worker_lost(state, worker, reason, lives)
    elif hello.role is Role.GATEWAY:
        _gateway_lost(state, incarnation, hello)


def _worker_lost(state: State, worker: Worker, reason: str, lives: bool) -> None:
    hello, now = worker.hello, state.now
    drained = worker.draining and worker.incarnation not in state.members.fenced
    state.counters[f"{hello.role}_{'drained' if drained else 'lost'}"] += 1
    state.members.unproven.pop(worker.incarnation, None)
    pool = state.cluster.pools[hello.model]
    state.scheduler.worker_down(worker, now)
    pool.traffic.lost += not drained
    if not pool.prefill and not pool.decode:
        state.members.empty_pools[hello.model] = now
    for step, _ in worker.steps.values():
        for chunk in step.chunks:
            state.record_usage(state.billing.lost(chunk.request_id, now))
    for key, allocation in worker.allocations.items():
        if key[1] == RETAINED:
            continue  # no bill counts what is kept for a next attempt
        emitted, resumed = worker.forwarded(key), allocation.resumed_tokens
        state.accounts.emitted(hello.model, allocation.path, key[0], resumed, emitted, first=emitted > 0)
        state.record_usage(state.billing.lost(key[0], now))
    state.cluster.drop_retained_on(worker)
    if not drained and not lives:
        count = suspects.count_silence if reason.startswith(STILL_OPEN) else suspects.count_loss
        count(state, worker)
    why = Interrupt.DRAINED if drained else _LOST[hello.role]
    for request in draining.dependents(state, worker):
        state.interrupt(request, why, f"{hello.name}: {reason}"[:500])
        if hello.role is Role.PREFILL and not _has_better(pool, request, hello.host):
            state.cluster.retain_allocation(request)
    state.cluster.refresh_eligibility(hello.model, now)
    flips.on_worker_lost(state, worker, reason)
    state.send_gateways()


def _has_better(pool: Pool, request: Request, host: str) -> bool:
    """Whether its decode worker is on a host that has just lost a worker, and there are others."""
    decode = pool.decode.get(request.decode_incarnation)
    if not host or decode is None or decode.hello.host != host:
        return False
    return any(worker.hello.host != host and not worker.draining for worker in pool.decode.values())


def on_hung(state: State, worker: Worker, message: Hung) -> None:
    """Fence a hung worker, which is about to end itself. Even if it does not end, its further messages are ignored, and it may
    not join again."""
    state.counters[f"{worker.hello.role}_hung"] += 1
    fenced = state.members.fenced
    fenced[worker.incarnation] = worker.hello
    if len(fenced) > REMEMBERED_MAX:
        fenced.popitem(last=False)
    on_down(state, worker.incarnation, f"its step hung for {message.ran_ms / 1000:.1f} s")


# --- requests whose gateway is gone -----------------------------------------------------------------------------------


def _gateway_lost(state: State, incarnation: int, hello: Hello) -> None:
    """End its requests, a number of them with each event: there may be a hundred thousand."""
    requests = state.cluster.requests
    own = {name: request for name, request in requests.items() if request.gateway_incarnation == incarnation}
    state.members.orphans |= own
    state.members.lost_gateways[incarnation] = hello
    state.cluster.spread.begin(incarnation, _end_orphans(state, incarnation, own))


def _end_orphans(state: State, incarnation: int, request_ids: Iterable[str]) -> Iterator[None]:
    for request_id in request_ids:
        end_orphan(state, request_id)
        yield
    del state.members.lost_gateways[incarnation]


def end_orphan(state: State, request_id: str) -> None:
    """End a request if its gateway is gone."""
    request = state.members.orphans.pop(request_id, None)
    if request is not None and request.state not in TERMINAL:
        state.billing.doubt(request_id, state.now)
        state.end(request, Trigger.CANCEL, CancelReason.GATEWAY_LOST)


# --- models without workers -------------------------------------------------------------------------------------------


def forget_models(state: State) -> None:
    """Forget models that have been without a worker for long, unless a request still waits for one."""
    empty = state.members.empty_pools
    while empty:
        model, since = next(iter(empty.items()))
        if since + EMPTY_POOL_S_MAX > state.now:
            break
        del empty[model]
        if any(request.submit.model == model for request in state.cluster.requests.values()):
            empty[model] = state.now
            continue
        del state.cluster.pools[model], state.cluster.queues[model]
        state.revisions.forget(model)
        state.members.autopilots.pop(model, None)


def next_forgotten(state: State) -> float | None:
    empty = state.members.empty_pools
    return next(iter(empty.values())) + EMPTY_POOL_S_MAX if empty else None
