"""Processes come and go: what that means for the requests they hold."""

from coordinator.events import Misbehaved, Received
from coordinator.lifecycle import State as Life
from coordinator.lifecycle import Trigger
from coordinator.recovery import draining
from coordinator.state import State
from coordinator.waiting.queue import WaitQueue
from coordinator.workers.pool import WORKERS, Pool, Worker
from proto.errors import CancelReason, Interrupt
from proto.messages import Hello, Release, Role
from proto.progress import Hung

REMEMBERED_MAX = 1024
_LOST = {Role.PREFILL: Interrupt.PREFILL_LOST, Role.DECODE: Interrupt.DECODE_LOST}


def up(state: State, epoch: int, hello: Hello, now: float) -> None:
    if epoch in state.peers:
        down(state, epoch, "connected again", now)
    state.peers[epoch] = hello
    _count_restart(state, epoch, hello)
    if hello.role in WORKERS:
        worker = Worker.from_hello(hello)
        worker.where = state.where
        pool = state.pools.get(hello.model)
        if pool is None:
            pool = state.pools[hello.model] = Pool(hello.model, state.limits.placement, state.limits.steps_in_flight)
        pool.add(worker)
        state.queues.setdefault(hello.model, WaitQueue(state.limits))
        state.workers[epoch] = worker
        _adopt(state, worker, hello)
        draining.join(state, worker, hello.hand_over_ms, now)
        state.sort_out(hello.model)
        state.tell_gateways()
    elif hello.role is Role.GATEWAY:
        state.send(epoch, state.cluster_state())


def _count_restart(state: State, epoch: int, hello: Hello) -> None:
    """A process of this name was here before, and it was another one."""
    if hello.role is Role.OBSERVER:
        return
    state.counters[f"{hello.role}_restarted"] += state.names.pop(hello.name, epoch) != epoch
    state.names[hello.name] = epoch
    if len(state.names) > REMEMBERED_MAX:
        state.names.popitem(last=False)


def down(state: State, epoch: int, reason: str, now: float) -> None:
    hello = state.peers.pop(epoch, None)
    if hello is None:
        return
    worker = state.workers.pop(epoch, None)
    if worker is not None:
        hung = epoch in state.fenced
        let_go = state.billing.let_go if hung else state.billing.lost
        drained = worker.draining and not hung
        why = Interrupt.DRAINED if drained else _LOST[hello.role]
        state.counters[f"{hello.role}_{'drained' if drained else 'lost'}"] += 1
        state.draining.pop(epoch, None)
        state.unbind_all(worker)
        state.pools[hello.model].remove(worker)
        worker.leave()
        for step, requests in worker.steps.values():
            for chunk, request in zip(step.chunks, requests, strict=True):
                state.queues[hello.model].skipped(request, chunk)
                state.journal(let_go(request.id, now))
        for key, holding in worker.holdings.items():
            state.collect_rent(worker, key, holding)
            emitted = worker.forwarded(key)
            state.emitted(hello.model, holding.path, key[0], holding.resumed_tokens, emitted, first=emitted > 0)
            state.journal(let_go(key[0], now))
        state.drop_claims_on(worker)
        for request in [request for request in state.requests.values() if draining.needs(request, worker)]:
            state.interrupt(request, why, f"{hello.name}: {reason}"[:500], now)
            if hello.role is Role.PREFILL:
                state.claim_room(request)
        state.sort_out(hello.model)
        state.tell_gateways()
    elif hello.role is Role.GATEWAY:
        for request in [r for r in state.requests.values() if r.gateway_epoch == epoch]:
            state.end(request, Trigger.CANCEL, CancelReason.GATEWAY_LOST, now)


def hung(state: State, epoch: int, event: Received, now: float) -> None:
    """The worker is about to end itself. Whatever becomes of that, it is fenced from now on: nothing more that it says is
    taken, and it is not let in again."""
    assert isinstance(event.message, Hung)
    state.counters[f"{state.peers[epoch].role}_hung"] += 1
    state.fenced[epoch] = state.peers[epoch]
    if len(state.fenced) > REMEMBERED_MAX:
        state.fenced.popitem(last=False)
    down(state, epoch, f"its step hung for {event.message.ran_ms / 1000:.1f} s", now)


def _adopt(state: State, worker: Worker, hello: Hello) -> None:
    """Count what the worker held through a loss of the link; streams we have given up meanwhile are to end."""
    for held in hello.held:
        key = (held.request_id, held.attempt)
        request = state.current(*key)
        if request is not None and request.state is Life.QUEUED:
            state.out.append(Misbehaved(worker.epoch, "holds an attempt that was not placed yet"))
            return
        if not worker.adopt(held, state.limits.kv_overcommit):
            state.out.append(Misbehaved(worker.epoch, "holds more than its capacity"))
            return
        state.billing.found(held, of_answer=worker.room is not None)
        if held.request_id in state.requests or held.request_id in state.ended:
            state.send(worker.epoch, Release(*key))
