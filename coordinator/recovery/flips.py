"""Workers change their role: one is drained, and then registers as another incarnation, in the other role.

A few may change at once. The last one of its role that takes work stays, unless that is forced: it is looked at when the
change is asked for, when another worker goes, and before the worker may change over. Up to then a change can be given up. It
is given up on both sides if the connection to the worker is lost.
"""

from math import inf

from coordinator.events import Received
from coordinator.recovery import draining
from coordinator.reporting import report
from coordinator.state import State
from coordinator.workers.flip import Flip, FlipState
from coordinator.workers.worker import WORKERS, Worker
from proto.drain import Draining, FlipAnswer, FlipFailed, FlipRequest
from proto.drain import Flip as FlipOrder
from proto.limits import MAX_FLIPS_AT_ONCE
from proto.messages import Hello, Role

REGISTER_S_MAX = 15.0
"""In which a worker that holds nothing has registered in its new role, or is given its old one back."""
FIRST_VERSION = 10
"""Of the protocol: workers of an older one know nothing of this."""


def asked(state: State, incarnation: int, event: Received, now: float) -> None:
    """By a person or the autopilot."""
    request = event.message
    assert isinstance(request, FlipRequest)
    named = [worker for worker in state.workers.values() if worker.hello.name == request.worker]
    refusal = _refusal(state, request, named)
    if not refusal:
        (worker,) = named
        flip = Flip(worker.hello, request.role, request.force, request.why, now)
        state.flipping[worker.incarnation] = flip
        state.flips.append(flip)
        state.drain_orders.pop(worker.incarnation, None)
        draining.begin(state, worker, request.hand_over_ms, now)
        state.send(worker.incarnation, FlipOrder(request.role, request.hand_over_ms))
    state.send(incarnation, FlipAnswer(refusal[:500], report.workers(state)))


def _refusal(state: State, request: FlipRequest, named: list[Worker]) -> str:
    names = [worker.hello.name for worker in state.workers.values()]
    if request.role not in WORKERS:
        return f"a worker cannot take the role {request.role}; the roles are {' and '.join(WORKERS)}"
    if why := draining.unnamed(request.worker, named, names):
        return why
    (worker,) = named
    role = worker.hello.role
    if role is request.role:
        return f"{request.worker} is a {role} worker already"
    if any(worker.is_same_process(other) for other in state.workers.values()):
        return f"{request.worker} is one half of a mixed worker; start its process with another --role to change that"
    if running := state.flipping.get(worker.incarnation):
        return f"{request.worker} is changing its role to {running.role}; wait until that is done"
    if len(state.flipping) >= MAX_FLIPS_AT_ONCE:
        return f"{len(state.flipping)} workers are changing their roles, and no more than that may at once"
    if worker.draining:
        ending = "is about to end" if worker.leaving else f"is drained; crossdock drain {request.worker} --undo first"
        return f"{request.worker} {ending}"
    if worker.hello.version < FIRST_VERSION:
        return f"{request.worker} runs an older version of crossdock, which cannot change its role"
    if not request.force and _is_last(state, worker):
        return (
            f"{request.worker} is the only {role} worker of {worker.hello.model} that takes work: nothing would be served"
            " without it; --force does it all the same"
        )
    return ""


def _is_last(state: State, worker: Worker) -> bool:
    """Whether no other worker of its model and role takes work."""
    pool = state.pools[worker.hello.model]
    side = pool.prefill if worker.hello.role is Role.PREFILL else pool.decode
    return all(other is worker or other.draining for other in side.values())


def look(state: State, now: float) -> None:
    """After each event while some change: which of them may change over now, or have taken too long."""
    for flip in list(state.flipping.values()):
        _look_at(state, flip, now)


def _look_at(state: State, flip: Flip, now: float) -> None:
    worker = state.workers.get(flip.hello.incarnation)
    if flip.state is FlipState.REGISTERING:
        if now >= flip.drained_at + REGISTER_S_MAX:
            _give_up(state, flip, f"it did not register as a {flip.role} worker within {REGISTER_S_MAX:.0f} s")
    elif worker is not None and worker.leaving:
        _give_up(state, flip, "it is to end")
    elif worker is not None and not (worker.holdings or worker.steps):
        if not flip.force and _is_last(state, worker):
            _give_up(state, flip, f"it has become the only {flip.hello.role} worker that takes work")
        else:
            flip.state, flip.drained_at = FlipState.REGISTERING, now  # `draining.dismiss` follows


def worker_lost(state: State, worker: Worker, reason: str) -> None:
    """Called when any worker goes, after it has been taken out of its pool."""
    for flip in list(state.flipping.values()):
        if flip.state is not FlipState.DRAINING:
            continue  # one that may change over goes as it should; whether it comes back is seen then
        if flip.hello.incarnation == worker.incarnation:
            _give_up(state, flip, f"the connection to it was lost: {reason}")
        elif not flip.force and _is_last(state, state.workers[flip.hello.incarnation]):
            _give_up(state, flip, f"it has become the only {flip.hello.role} worker, as {worker.hello.name} is gone")


def worker_joined(state: State, hello: Hello, now: float) -> None:
    flip = next((one for one in state.flipping.values() if one.hello.name == hello.name), None)
    if flip is None:
        return
    if hello.flipped_from == flip.hello.incarnation:
        flip.state, flip.registered_at = FlipState.DONE, now
        del state.flipping[flip.hello.incarnation]
        state.counters["flips"] += 1
        state.unproven[hello.incarnation] = flip
    elif flip.state is FlipState.REGISTERING:
        again = hello.incarnation == flip.hello.incarnation
        _give_up(state, flip, "the connection to it was lost" if again else "it was started again")


def failed(state: State, incarnation: int, event: Received, now: float) -> None:
    """By the worker: it cannot."""
    assert isinstance(event.message, FlipFailed)
    if (flip := state.flipping.get(incarnation)) is not None:
        _give_up(state, flip, event.message.why)


def _give_up(state: State, flip: Flip, why: str) -> None:
    flip.state, flip.failure = FlipState.FAILED, why[:500]
    del state.flipping[flip.hello.incarnation]
    state.counters["flips_failed"] += 1
    worker = state.workers.get(flip.hello.incarnation)
    if worker is not None and not worker.leaving:
        draining.end(state, worker)
        state.send(worker.incarnation, Draining(None))


def next_deadline(state: State) -> float:
    registering = (flip for flip in state.flipping.values() if flip.state is FlipState.REGISTERING)
    return min((flip.drained_at + REGISTER_S_MAX for flip in registering), default=inf)
