"""Workers leave on purpose: nothing new is placed on them, and running requests go on. Requests that still run when the time
is up are handed over: their gateways submit them again with the tokens they have, as attempts that do not count as tries.

Streams are not handed over earlier, even if other workers have room, since a stream that ends where it runs has no gap. A
worker is told that it may go when it holds nothing and nothing can be on its way to it.

A worker that is drained because it is to prefill keeps the KV of its streams. The streams wait until it prefills. It then
computes their last tokens, and sends the KV to the decode worker on which they go on.
"""

from collections.abc import Sequence
from math import inf

from coordinator.members import FlipState
from coordinator.reporting import status
from coordinator.state import State
from proto.drain import DrainAnswer, Drained, Draining, DrainRequest
from proto.errors import Interrupt
from proto.messages import Interrupted, Release, Role
from scheduler.lifecycle import ON_WORKERS, RequestState
from scheduler.request import Request
from scheduler.workers.worker import Worker

ORDERS_MAX = 1024
KEPT_S_MAX = 0.5
"""A stream waits for so long at most to be resumed where its KV is, instead of being computed again elsewhere."""


def needs(request: Request, worker: Worker) -> bool:
    """Whether the request's attempt cannot go on without this worker."""
    if request.state not in ON_WORKERS:
        return False
    if worker.hello.role is Role.DECODE:
        return request.decode_incarnation == worker.incarnation
    return request.prefill_incarnation == worker.incarnation and request.state is not RequestState.DECODING


def dependents(state: State, worker: Worker) -> list[Request]:
    """Returns requests whose attempts cannot go on without this worker. Each of them has an allocation here, or, if this is a
    decode worker, on a prefill worker that is to hand its prompt over. So waiting requests need not be looked at."""
    keys = dict.fromkeys(worker.allocations)
    if worker.hello.role is Role.DECODE:
        for prefill in state.cluster.pools[worker.hello.model].prefill.values():
            keys.update(dict.fromkeys(prefill.allocations))
    found = (state.cluster.current(*key) for key in keys)
    return [request for request in found if request is not None and needs(request, worker)]


def begin(state: State, worker: Worker, hand_over_ms: float) -> None:
    worker.draining, worker.dismissed = True, False
    worker.hand_over_at = state.now + hand_over_ms / 1000
    state.cluster.draining[worker.incarnation] = worker
    state.cluster.drop_retained_on(worker)
    state.cluster.unbind_all(worker)
    _refresh_eligibility(state, worker)


def on_worker_joined(state: State, worker: Worker, hand_over_ms: float | None) -> None:
    """Drain a worker that registers, if it should be. `hand_over_ms`: what the worker knows of its draining. A person's order
    goes before that, since the message with it may have been lost with the connection."""
    orders = state.members.drain_orders
    if worker.incarnation in orders:
        until = orders[worker.incarnation]
        ordered_ms = None if until is None else max(0.0, 1000 * (until - state.now))
        if ordered_ms != hand_over_ms:
            state.send(worker.incarnation, Draining(ordered_ms))
        hand_over_ms = ordered_ms
    if hand_over_ms is not None:
        begin(state, worker, hand_over_ms)


def end(state: State, worker: Worker) -> None:
    worker.draining, worker.hand_over_at = False, inf
    state.cluster.draining.pop(worker.incarnation, None)
    _refresh_eligibility(state, worker)


def _refresh_eligibility(state: State, worker: Worker) -> None:
    model = worker.hello.model
    state.cluster.pools[model].changed(worker)
    state.cluster.refresh_eligibility(model, state.now)
    state.send_gateways()


def on_draining(state: State, worker: Worker, message: Draining) -> None:
    """Drain a worker that reports that it is to end, or take that back."""
    worker.leaving = message.hand_over_ms is not None
    state.members.drain_orders.pop(worker.incarnation, None)
    if message.hand_over_ms is None:
        end(state, worker)
    else:
        begin(state, worker, message.hand_over_ms)


def on_drain_request(state: State, observer: int, request: DrainRequest) -> None:
    """Drain the workers that a person has named, or undo that."""
    workers, orders = state.members.named(request.worker), state.members.drain_orders
    refusal = _refusal(state, request, workers)
    for worker in workers if not refusal else ():
        if request.undo:
            end(state, worker)
        else:
            begin(state, worker, request.hand_over_ms)
        orders.pop(worker.incarnation, None)
        orders[worker.incarnation] = None if request.undo else worker.hand_over_at
        if len(orders) > ORDERS_MAX:
            orders.popitem(last=False)
        state.send(worker.incarnation, Draining(None if request.undo else request.hand_over_ms))
    state.send(observer, DrainAnswer(refusal[:500], status.workers(state)))


def _refusal(state: State, request: DrainRequest, workers: Sequence[Worker]) -> str:
    if why := state.members.why_ambiguous(request.worker, workers):
        return why
    if (flip := state.members.flipping.get(workers[0].incarnation)) is not None:
        return f"{request.worker} is changing its role to {flip.role}; wait until that is done"
    if workers[0].leaving:
        return f"{request.worker} is about to end, and will be gone when it is drained" if request.undo else ""
    return ""


def hand_over_due(state: State) -> None:
    """Hand over the requests of draining workers whose time is up."""
    for worker in state.cluster.draining.values():
        if state.now < worker.hand_over_at:
            continue
        worker.hand_over_at = inf
        flip = state.members.flipping.get(worker.incarnation)
        for request in dependents(state, worker):
            keeps = flip is not None and flip.keeps(worker.hello.role) and _is_kept(request)
            state.interrupt(request, Interrupt.DRAINED, f"{worker.hello.name} is drained", tell=not keeps)
            if keeps and flip is not None:
                flip.kept.append(request.key)
                flip.kept_until = state.now + KEPT_S_MAX
                state.members.keeping[flip] = None
            if worker.hello.role is Role.PREFILL:
                state.cluster.retain_allocation(request)
        if worker.hello.role is Role.DECODE:
            _hand_over_adopted(state, worker)


def _is_kept(request: Request) -> bool:
    """Whether a worker that is to prefill keeps its KV: that of a stream with one choice, whose blocks have names."""
    submit = request.submit
    return request.state is RequestState.DECODING and submit.choices == 1 and submit.hash_block_size > 0


def _hand_over_adopted(state: State, worker: Worker) -> None:
    """Hand over streams of an earlier coordinator. All gateways are told, and each knows its own."""
    for request_id, attempt in worker.allocations:
        if request_id in state.cluster.requests or request_id in state.ended:
            continue
        state.counters[f"interrupted_{Interrupt.DRAINED}"] += 1
        state.send(worker.incarnation, Release(request_id, attempt))
        for incarnation in state.members.gateways():
            why = f"{worker.hello.name} is drained"
            state.send(incarnation, Interrupted(request_id, attempt, Interrupt.DRAINED, why))


def dismiss(state: State) -> None:
    """Tell draining workers that hold nothing any more that they may go."""
    for worker in state.cluster.draining.values():
        if worker.dismissed or worker.allocations or worker.steps:
            continue
        flip = state.members.flipping.get(worker.incarnation)
        if flip is not None and flip.state is FlipState.DRAINING:
            continue  # its process has something in its other role
        worker.dismissed = True
        state.send(worker.incarnation, Drained())


def next_hand_over(state: State) -> float | None:
    due = min((worker.hand_over_at for worker in state.cluster.draining.values()), default=inf)
    return due if due < inf else None
