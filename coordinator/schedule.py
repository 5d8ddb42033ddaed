"""Placing what waits and keeping prefill workers busy: after every event, as much as there is room for."""

from coordinator.lifecycle import State as Life
from coordinator.lifecycle import Trigger
from coordinator.placement import orders, place
from coordinator.pool import Pool, Worker
from coordinator.queue import WaitQueue
from coordinator.state import State
from coordinator.steps import compose
from proto.messages import Peer, Role


def schedule(state: State, now: float) -> None:
    for model, queue in state.queues.items():
        while len(queue) and _place_one(state, state.pools[model], queue, now):
            pass
    for worker in state.workers.values():
        if worker.hello.role is Role.PREFILL:
            _fill(state, worker, now)


def _place_one(state: State, pool: Pool, queue: WaitQueue, now: float) -> bool:
    placed = place(pool, queue, state.limits.steps_in_flight * state.limits.step_tokens)
    if placed is None:
        return False
    request, prefill, decode = placed
    gateway = Peer(state.peers[request.gateway_epoch].address, request.gateway_epoch)
    reserve, take_in = orders(request, prefill, decode, gateway)
    state.send(decode.epoch, reserve)
    state.send(prefill.epoch, take_in, request.blob)
    request.blob = b""
    state.move(request, Trigger.PLACE, now, f"{prefill.hello.name} + {decode.hello.name}")
    return True


def _fill(state: State, worker: Worker, now: float) -> None:
    while worker.placed and len(worker.steps) < state.limits.steps_in_flight:
        step = compose(worker, state.limits.step_tokens)
        if step is None:
            return
        state.send(worker.epoch, step)
        for chunk in step.chunks:
            request = state.requests[chunk.request_id]
            if request.state is Life.PLACED:
                state.move(request, Trigger.DISPATCH, now)
