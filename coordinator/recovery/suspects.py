"""Requests that may have ended the workers they ran on: a prompt that meets a bug of the engine ends each process that
computes it.

A request that was in a running step of a lost worker is suspected until it has made progress. After one loss in prefill it has
steps of its own; after two losses it also has a decode worker of its own. It fails if two workers in a row were lost and no
other request was in a running step of both, or with the third loss. A request that is lost with others is not at fault for
that alone.

The halves of a mixed worker are one process, so the requests of both are judged together when the first half goes.
"""

from coordinator.lifecycle import RequestState, Trigger
from coordinator.request import LOSSES_MAX, PROGRESS_TOKENS, Request, Suspicion
from coordinator.state import State
from coordinator.workers.worker import Worker
from proto.errors import Reject
from proto.messages import Rejected


def count_loss(state: State, worker: Worker) -> None:
    """A worker's process is gone: suspect what ran there, and fail what has ended too many."""
    if worker.loss_counted:
        return
    pool = state.pools[worker.hello.model]
    halves = [worker, *(w for w in (*pool.prefill.values(), *pool.decode.values()) if w.is_same_process(worker))]
    running = {request.id: found for half in halves for request, found in _in_step(state, half)}
    for half in halves:
        half.loss_counted = True
    for request_id, suspicion in running.items():
        state.requests[request_id].suspicion = suspicion
        pool.suspects[request_id] = state.requests[request_id]
    again = [request_id for request_id, suspicion in running.items() if suspicion.losses > 1]
    for request_id in again:
        losses = running[request_id].losses
        if losses >= LOSSES_MAX or len(again) == 1:
            _fail(state, state.requests[request_id], losses)


def _in_step(state: State, worker: Worker) -> list[tuple[Request, Suspicion]]:
    """Returns the requests in the steps that the worker was given, with their new suspicions. Its last word may be lost, so it
    is not certain which of two steps it was in. A request that decodes has had all its chunks computed."""
    found = []
    for step, requests in worker.steps.values():
        for chunk, request in zip(step.chunks, requests, strict=True):
            if (
                state.current(chunk.request_id, chunk.attempt) is request
                and request.prefill_incarnation == worker.incarnation
                and request.state is not RequestState.DECODING
            ):
                found.append((request, _one_more(request, chunk.start + chunk.length)))
    for key in worker.allocations:
        decoding = state.current(*key)
        if (
            decoding is not None
            and decoding.state is RequestState.DECODING
            and decoding.decode_incarnation == worker.incarnation
        ):
            progressed = worker.forwarded(key) >= PROGRESS_TOKENS
            found.append((decoding, Suspicion(1) if progressed else _one_more(decoding, 0)))
    return found


def _decodes_on(request: Request, worker: Worker) -> bool:
    return request.state is RequestState.DECODING and request.decode_incarnation == worker.incarnation


def _one_more(request: Request, prompt_tokens: int) -> Suspicion:
    before = request.suspicion
    if before is None:
        return Suspicion(1, prompt_tokens)
    return Suspicion(before.losses + 1, max(prompt_tokens, before.prompt_tokens) if prompt_tokens else 0)


def _fail(state: State, request: Request, losses: int) -> None:
    why = f"{losses} workers in a row were lost while they computed this request"
    state.counters[f"rejected_{Reject.LOSES_WORKERS}"] += 1
    state.billing.doubt(request.id, state.now)  # its gateway may have more of the answer than the worker has said
    state.send(request.gateway_incarnation, Rejected(*request.key, Reject.LOSES_WORKERS, why))
    state.end(request, Trigger.FAIL, why, state.now)


def computed(state: State, request: Request) -> None:
    """Clear a suspicion once its prompt is computed beyond the step in which its worker was lost."""
    suspicion = request.suspicion
    if suspicion and 0 < suspicion.prompt_tokens <= request.attempt_progress.computed_tokens:
        _clear(state, request)


def emitted(state: State, worker: Worker) -> None:
    """Clear the suspects that have made progress in a decode worker's steps."""
    for request in list(state.pools[worker.hello.model].suspects.values()):
        if _decodes_on(request, worker) and worker.forwarded(request.key) >= PROGRESS_TOKENS:
            _clear(state, request)


def _clear(state: State, request: Request) -> None:
    request.suspicion = None
    pool = state.pools[request.submit.model]
    pool.suspects.pop(request.id, None)
    pool.end_lone(request)
