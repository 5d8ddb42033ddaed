"""Requests that may have ended the workers they ran on: a prompt that meets a bug of the engine ends each process that
computes it.

A request that was in a running step of a worker whose process ended is suspected until it has made progress. After a loss in
prefill it has steps of its own; after a loss in decode it is tried on a decode worker without other suspects
(`scheduler.workers.trials`). It fails

- with the second loss in a row, in prefill, if no other request was in a running step of both and its answer had not begun;
- after two losses in a row, the last one in decode, once all others that ran in the last one have made progress;
- with the third loss in a row.

A request that is lost with others is not at fault for that alone. Losses that are explained by a request that failed are taken
back from those that ran beside it.

The loss of a host is not evidence against a request:

- The silence of a process does not show that it ended, and counts for nothing.
- The second loss on one host within `HOST_LOSS_S` is not counted.
- A loss does not count if the host soon loses all its workers, and some of them did not run the request.
- A loss does not count if the process joins again, because it has only lost its link.

The halves of a mixed worker are one process, so the requests of both are judged together when the first half goes.
"""

import msgspec

from coordinator.state import State
from proto.errors import Reject
from scheduler.lifecycle import RequestState, Trigger
from scheduler.request import LOSSES_MAX, PROGRESS_TOKENS, LostProcess, Request, Suspicion
from scheduler.workers.circuit_breakers import HOST_LOSS_S
from scheduler.workers.worker import Worker


def count_loss(state: State, worker: Worker) -> None:
    """A worker's process has ended: suspect what ran there, and fail what has ended too many."""
    if worker.loss_counted:
        return
    before, losses, ran = _lost_on(state, worker.hello.host), {}, {}
    for half in _halves(state, worker):
        for request, suspicion in _in_step(state, half, before):
            losses[request.id], ran[request.id] = request.losses, request
            request.suspicion = suspicion
            state.cluster.pools[worker.hello.model].suspects[request.id] = request
    _lost(state, worker, before, frozenset(ran))
    again = [request for request in ran.values() if request.losses > max(losses[request.id], 1)]
    for request in again:
        begun = request.submit.resumed_tokens >= PROGRESS_TOKENS
        is_alone = (len(again) == 1 and not begun) if request.own_step else len(ran) == 1
        if request.losses >= LOSSES_MAX or is_alone:
            _fail(state, request, request.losses)


def fail_culprits(state: State) -> None:
    """Fail requests that wait for a third trial in decode, and are alone left of those that ran in their last loss."""
    for pool in state.cluster.pools.values():
        trials = pool.trials
        if not trials.held:
            continue
        trials.held.clear()
        pool.wakeups.may_go_out_of_turn()
        for request in [one for one in trials.waiting.values() if one.losses > 1]:
            last = next((lost for lost in reversed(state.members.lost_processes) if lost.ran(request)), None)
            others = [
                one for one in pool.suspects.values() if last is not None and one is not request and last.ran(one)
            ]
            if any(other.losses < request.losses for other in others):
                trials.held.add(request.id)
            elif last is not None and not others:
                _fail(state, request, request.losses)


def count_silence(state: State, worker: Worker) -> None:
    """A worker is out of reach, which is not evidence against what ran there."""
    if not worker.loss_counted:
        _lost(state, worker, _lost_on(state, worker.hello.host), frozenset())


def _halves(state: State, worker: Worker) -> list[Worker]:
    pool = state.cluster.pools[worker.hello.model]
    return [worker, *(w for w in pool.workers.values() if w.is_same_process(worker))]


def _lost(state: State, worker: Worker, before: list[LostProcess], ran: frozenset[str]) -> None:
    halves, host = _halves(state, worker), worker.hello.host
    for half in halves:
        half.loss_counted = True
    lost = LostProcess(frozenset(half.incarnation for half in halves), host, state.now, ran)
    state.members.lost_processes.append(lost)
    if before and all(w.hello.host != host or w in halves for w in state.cluster.workers.values()):
        _clear_host(state, [*before, lost])
    for pool in state.cluster.pools.values():
        pool.breakers.lost_on(host, state.now)


def take_back_loss(state: State, incarnation: int) -> None:
    """Take back what was counted when a process lost its link, since it has joined again."""
    for lost in [lost for lost in state.members.lost_processes if incarnation in lost.incarnations]:
        state.members.lost_processes.remove(lost)
        for request in _suspects(state):
            if lost.ran(request):
                _drop_suspicion(state, request)


def _lost_on(state: State, host: str) -> list[LostProcess]:
    """The losses on a host within `HOST_LOSS_S`."""
    return [
        lost
        for lost in state.members.lost_processes
        if host and lost.host == host and lost.at + HOST_LOSS_S >= state.now
    ]


def _clear_host(state: State, lost: list[LostProcess]) -> None:
    """A host has lost all its workers: take back one loss of each request that ran on some of them, and not on all."""
    for request in _suspects(state):
        if 0 < sum(one.ran(request) for one in lost) < len(lost):
            _drop_suspicion(state, request)


def _suspects(state: State) -> list[Request]:
    return [request for pool in state.cluster.pools.values() for request in pool.suspects.values()]


def _drop_suspicion(state: State, request: Request) -> None:
    if request.suspicion is None or request.losses == 1:
        _clear(state, request)
    else:
        request.suspicion = msgspec.structs.replace(request.suspicion, losses=request.losses - 1)


def _in_step(state: State, worker: Worker, before: list[LostProcess]) -> list[tuple[Request, Suspicion]]:
    """Returns the requests in the steps that the worker was given, with their new suspicions. Its last word may be lost, so it
    is not certain which of two steps it was in. A request that decodes has had all its chunks computed."""
    found = []
    for step, requests in worker.steps.values():
        for chunk, request in zip(step.chunks, requests, strict=True):
            if (
                state.cluster.current(chunk.request_id, chunk.attempt) is request
                and request.prefill_incarnation == worker.incarnation
                and request.state is not RequestState.DECODING
            ):
                found.append((request, _one_more(request, chunk.start + chunk.length, before)))
    for key in worker.allocations:
        decoding = state.cluster.current(*key)
        if (
            decoding is not None
            and decoding.state is RequestState.DECODING
            and decoding.decode_incarnation == worker.incarnation
        ):
            progressed = worker.forwarded(key) >= PROGRESS_TOKENS
            found.append((decoding, Suspicion(1) if progressed else _one_more(decoding, 0, before)))
    return found


def _decodes_on(request: Request, worker: Worker) -> bool:
    return request.state is RequestState.DECODING and request.decode_incarnation == worker.incarnation


def _one_more(request: Request, prompt_tokens: int, lost_there: list[LostProcess]) -> Suspicion:
    """`lost_there`: what its host has lost lately."""
    before = request.suspicion
    if before is None:
        return Suspicion(1, prompt_tokens)
    counts = sum(lost.ran(request) for lost in lost_there) != 1
    return Suspicion(before.losses + counts, max(prompt_tokens, before.prompt_tokens) if prompt_tokens else 0)


def _fail(state: State, request: Request, losses: int) -> None:
    why = f"{losses} workers in a row were lost while they computed this request"
    for lost in [lost for lost in state.members.lost_processes if lost.ran(request)]:
        for other in _suspects(state):
            if other is not request and other.losses > 1 and lost.ran(other):
                _drop_suspicion(state, other)
    state.billing.doubt(request.id, state.now)  # its gateway may have more of the answer than the worker has said
    state.reject(request, Reject.LOSES_WORKERS, Trigger.FAIL, why)


def clear_computed(state: State, request: Request) -> None:
    """Clear a suspicion once its prompt is computed beyond the step in which its worker was lost."""
    suspicion = request.suspicion
    if suspicion and 0 < suspicion.prompt_tokens <= request.attempt_progress.computed_tokens:
        _clear(state, request)


def clear_emitted(state: State, worker: Worker) -> None:
    """Clear the suspects that have made progress in a decode worker's steps."""
    for request in list(state.cluster.pools[worker.hello.model].suspects.values()):
        if _decodes_on(request, worker) and worker.forwarded(request.key) >= PROGRESS_TOKENS:
            _clear(state, request)


def _clear(state: State, request: Request) -> None:
    request.suspicion = None
    pool, queue = state.cluster.pools[request.submit.model], state.cluster.queues[request.submit.model]
    pool.suspects.pop(request.id, None)
    if request.id in pool.trials.waiting and request.entry is not None:
        queue.unsettle(request)
        pool.wakeups.request_came()
    pool.end_trial(request)
