"""Worker processes change their role: one is drained, and then registers as another incarnation, in the other role, or in both.

A few may change at once. The last worker of a role that takes work keeps it, unless the change is forced. This is checked when
the change is asked for, when another worker goes, and before the process may change over. Until then a change can be given up.
It is given up on both sides if a connection to the process is lost.
"""

from collections.abc import Sequence
from math import inf

from coordinator.members import FlipState, RunningFlip
from coordinator.recovery import draining
from coordinator.reporting import status
from coordinator.state import State
from proto import drain
from proto.drain import Draining, FlipAnswer, FlipFailed, FlipRequest
from proto.errors import Interrupt
from proto.limits import flips_at_once
from proto.messages import Hello, Interrupted, Role
from scheduler.lifecycle import RequestState
from scheduler.workers.worker import WORKERS, Worker

REGISTER_S_MAX = 15.0
"""How long a process that holds nothing may take to register in its new role, in seconds; after that it gets its old role
back."""
CACHE_TOLD_S = 0.1  # how long a worker that has come back may take to report what it has cached, in seconds


def on_flip_request(state: State, observer: int, request: FlipRequest) -> None:
    """Begin a change of role that a person or the autopilot asks for."""
    members = state.members
    workers = members.named(request.worker)
    refusal = _refusal(state, request, workers)
    if not refusal:
        flip = RunningFlip([worker.hello for worker in workers], request.role, request.force, request.why, state.now)
        members.flips.append(flip)
        for worker in workers:
            members.flipping[worker.incarnation] = flip
            members.drain_orders.pop(worker.incarnation, None)
            draining.begin(state, worker, request.hand_over_ms)
            state.send(worker.incarnation, drain.Flip(request.role, request.hand_over_ms))
    state.send(observer, FlipAnswer(refusal[:500], status.workers(state)))


def _refusal(state: State, request: FlipRequest, workers: Sequence[Worker]) -> str:
    name = request.worker
    if request.role not in (*WORKERS, Role.MIXED):
        return f"a worker cannot take the role {request.role}; the roles are prefill, decode and mixed"
    if why := state.members.why_ambiguous(name, workers):
        return why
    if (process := workers[0].process_name) != name:
        return f"{name} is one role of the mixed worker {process}; name that"
    before = Role.MIXED if workers[0].hello.process else Role(workers[0].hello.role)
    if before is request.role:
        return f"{name} is a {before} worker already"
    if running := state.members.flipping.get(workers[0].incarnation):
        return f"{name} is changing its role to {running.role}; wait until that is done"
    if len(workers) < len(before.registers_as):
        return f"{name} is a mixed worker, and registered in one of its roles alone; try again"
    model = workers[0].hello.model
    others = sum(flip.hellos[0].model == model for flip in state.members.running_flips())
    pool = state.cluster.pools[model]
    processes = {worker.process_name for side in (pool.prefill, pool.decode) for worker in side.values()}
    if others >= flips_at_once(len(processes)):
        return f"{others} workers of {model} are changing their roles, and no more than that may at once"
    return next(filter(None, (_refusal_of(state, request, worker) for worker in workers)), "")


def _refusal_of(state: State, request: FlipRequest, worker: Worker) -> str:
    """Why one of its workers cannot go."""
    name, role = worker.hello.name, worker.hello.role
    if worker.draining:
        ending = "is about to end" if worker.leaving else f"is drained; crossdock drain {name} --undo first"
        return f"{name} {ending}"
    if not request.force and _is_last(state, worker):
        return (
            f"{name} is the only {role} worker of {worker.hello.model} that takes work: nothing would be served without it;"
            " --force does it all the same"
        )
    if not request.force and request.role is not Role.MIXED and _holds_what_fits_nowhere(state, worker):
        return (
            f"{name} holds a request that fits no other {role} worker that takes work; wait for its end, or use --force"
        )
    return ""


def _holds_what_fits_nowhere(state: State, worker: Worker) -> bool:
    """Whether no other worker of its role that takes work could ever hold one of its requests."""
    pool = state.cluster.pools[worker.hello.model]
    side = pool.prefill if worker.hello.role is Role.PREFILL else pool.decode
    others = [other for other in side.values() if other is not worker and not other.draining]
    held = filter(None, (state.cluster.current(*key) for key in worker.allocations))
    return any(not any(other.could_ever_take(request.submit) for other in others) for request in held)


def _is_last(state: State, worker: Worker) -> bool:
    """Whether no other worker of its model and role takes work."""
    pool = state.cluster.pools[worker.hello.model]
    side = pool.prefill if worker.hello.role is Role.PREFILL else pool.decode
    return all(other is worker or other.draining for other in side.values())


def change_over_due(state: State) -> None:
    """Check after each event which changing workers may change over now, or have taken too long."""
    for flip in state.members.running_flips():
        workers = [state.cluster.workers[one] for one in flip.incarnations if one in state.cluster.workers]
        if flip.state is FlipState.REGISTERING:
            if state.now >= flip.drained_at + REGISTER_S_MAX:
                _give_up(state, flip, f"it did not register as a {flip.role} worker within {REGISTER_S_MAX:.0f} s")
        elif any(worker.leaving for worker in workers):
            _give_up(state, flip, "it is to end")
        elif workers and not any(worker.allocations or worker.steps for worker in workers):
            last = [worker for worker in workers if not flip.force and _is_last(state, worker)]
            if last:
                _give_up(state, flip, f"it has become the only {last[0].hello.role} worker that takes work")
            else:
                flip.state, flip.drained_at = FlipState.REGISTERING, state.now  # `draining.dismiss` follows


def on_worker_lost(state: State, worker: Worker, reason: str) -> None:
    """Called when any worker goes, after it has been taken out of its pool."""
    for flip in state.members.running_flips():
        if flip.state is not FlipState.DRAINING:
            continue  # one that may change over goes as it should; whether it comes back is seen then
        if worker.incarnation in flip.incarnations:
            _give_up(state, flip, f"the connection to it was lost: {reason}")
            continue
        left = [state.cluster.workers[one] for one in flip.incarnations]
        if not flip.force and (last := [one for one in left if _is_last(state, one)]):
            role = last[0].hello.role
            _give_up(state, flip, f"it has become the only {role} worker, as {worker.hello.name} is gone")


def on_worker_joined(state: State, hello: Hello) -> None:
    name = hello.process or hello.name
    flip = next((one for one in state.members.running_flips() if one.name == name), None)
    if flip is None:
        return
    if hello.flipped_from in flip.incarnations:
        state.members.unproven[hello.incarnation] = flip
        if flip.came_back(hello):
            flip.state, flip.registered_at = FlipState.DONE, state.now
            flip.kept_until = min(flip.kept_until, state.now + CACHE_TOLD_S)
            _forget(state, flip)
            state.counters["flips"] += 1
    elif flip.state is FlipState.REGISTERING:
        again = hello.incarnation in flip.incarnations
        _give_up(state, flip, "the connection to it was lost" if again else "it was started again")


def on_flip_failed(state: State, worker: Worker, message: FlipFailed) -> None:
    """Give up a change, since the worker reports that it cannot."""
    if (flip := state.members.flipping.get(worker.incarnation)) is not None:
        _give_up(state, flip, message.why)


def _give_up(state: State, flip: RunningFlip, why: str) -> None:
    flip.state, flip.failure = FlipState.FAILED, why[:500]
    _forget(state, flip)
    state.counters["flips_failed"] += 1
    _resume(state, flip)
    for incarnation in flip.incarnations:
        worker = state.cluster.workers.get(incarnation)
        if worker is not None and not worker.leaving:
            draining.end(state, worker)
            state.send(worker.incarnation, Draining(None))


def _forget(state: State, flip: RunningFlip) -> None:
    names = state.members.names
    for hello in flip.hellos:
        del state.members.flipping[hello.incarnation]
        if flip.state is FlipState.DONE and names.get(hello.name) == hello.incarnation:
            del names[hello.name]  # a mixed worker's names are others


def cache_reported(state: State, incarnation: int) -> None:
    """Resume the kept streams of a worker that has just come back, since it has reported what it has cached."""
    flip = state.members.unproven.get(incarnation)
    if flip is not None and flip.state is FlipState.DONE:
        _resume(state, flip)


def resume_due(state: State) -> None:
    """Resume streams that have waited too long for their worker to come back. They are computed again elsewhere."""
    for flip in list(state.members.keeping):
        if state.now >= flip.kept_until:
            _resume(state, flip)


def _resume(state: State, flip: RunningFlip) -> None:
    state.members.keeping.pop(flip, None)
    kept, flip.kept = flip.kept, []
    for key in kept:
        request = state.cluster.current(*key)
        if request is not None and request.state is RequestState.INTERRUPTED:
            why = f"{flip.name} is drained"
            state.send(request.gateway_incarnation, Interrupted(*key, Interrupt.DRAINED, why))


def next_deadline(state: State) -> float | None:
    running = state.members.running_flips()
    due = [flip.drained_at + REGISTER_S_MAX for flip in running if flip.state is FlipState.REGISTERING]
    due += [flip.kept_until for flip in state.members.keeping if flip.kept_until < inf]
    return min(due, default=None)
