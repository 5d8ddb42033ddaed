"""What gateways ask for: a request comes in, is cancelled, or has waited too long."""

from coordinator import admission, report
from coordinator.events import Misbehaved, Moved, Received
from coordinator.lifecycle import ON_WORKERS, Trigger
from coordinator.lifecycle import State as Life
from coordinator.request import Request
from coordinator.state import State
from proto.errors import Reject
from proto.messages import Accepted, Cancel, Rejected, Submit


def submit(state: State, epoch: int, event: Received, now: float) -> None:
    submit = event.message
    assert isinstance(submit, Submit)
    if len(event.blob) != 4 * submit.prompt_tokens:
        state.out.append(Misbehaved(epoch, f"{len(event.blob)} bytes for {submit.prompt_tokens} prompt tokens"))
        return
    if submit.attempt <= state.ended.get(submit.request_id, 0):
        return
    known = state.requests.get(submit.request_id)
    if known is not None and known.gateway_epoch != epoch:
        _reject(state, epoch, submit, Reject.DUPLICATE, "another gateway has a request of this id")
        return
    if known is not None and submit.attempt <= known.attempt:
        if submit.attempt == known.attempt:
            state.send(epoch, Accepted(*known.key))
        return
    reason, why = _judge(state, submit)
    if reason is not None:
        if known is not None:
            state.end(known, Trigger.FAIL, reason, now)
        _reject(state, epoch, submit, reason, why)
        return
    if known is None:
        request = Request(submit.request_id, epoch, submit, event.blob, now, now, state.path(submit))
        state.requests[request.id] = request
    else:
        request = known
        state.withdraw(request)
        if request.state in ON_WORKERS:
            request.fire(Trigger.INTERRUPT, now)
        state.interrupted.pop(request.id, None)
        if request.unreported:
            more = submit.resumed_tokens - request.submit.resumed_tokens
            state.queues[submit.model].emitted(request.path, max(more, 0))
        request.renew(submit, event.blob)
        request.fire(Trigger.RESUBMIT, now)
    state.queues[submit.model].push(request, now)
    state.pools[submit.model].full = False
    state.send(epoch, Accepted(*request.key))
    state.out.append(Moved(request.id, request.attempt, request.state, "submitted"))


def _judge(state: State, submit: Submit) -> tuple[Reject | None, str]:
    if any((submit.request_id, submit.attempt) in worker.holdings for worker in state.workers.values()):
        return Reject.DUPLICATE, "a worker is still busy with this very attempt"
    pool, queue = state.pools.get(submit.model), state.queues.get(submit.model)
    return admission.judge(submit, pool, len(queue) if queue is not None else 0, state.limits)


def _reject(state: State, epoch: int, submit: Submit, reason: Reject, why: str) -> None:
    state.outcomes[Life.REJECTED] += 1
    state.counters[f"rejected_{reason}"] += 1
    retry_after_s = (
        report.retry_after_s(state, submit.model) if reason in (Reject.QUEUE_FULL, Reject.NO_CAPACITY) else 0.0
    )
    state.send(epoch, Rejected(submit.request_id, submit.attempt, reason, why, retry_after_s))
    state.out.append(Moved(submit.request_id, submit.attempt, Life.REJECTED, reason))


def cancel(state: State, epoch: int, event: Received, now: float) -> None:
    cancel = event.message
    assert isinstance(cancel, Cancel)
    request = state.requests.get(cancel.request_id)
    if request is not None and request.gateway_epoch == epoch and cancel.attempt >= request.attempt:
        state.end(request, Trigger.CANCEL, cancel.reason, now)
    elif request is None:
        # Accepted by an earlier coordinator: the workers know it, and so do their holdings.
        # One that has still to come back finds the cancel here.
        state.release_everywhere((cancel.request_id, cancel.attempt))
        state.remember(cancel.request_id, cancel.attempt)


def expire(state: State, now: float) -> None:
    for queue in state.queues.values():
        for request in queue.overdue(now):
            late = request.deadline is not None and request.deadline <= now
            reason = Reject.DEADLINE if late else Reject.EXPIRED
            why = (
                f"no first token within its deadline of {request.submit.deadline_ms:g} ms"
                if late
                else f"waited {state.limits.queue_wait_s_max:g} s in the queue"
            )
            retry_after_s = report.retry_after_s(state, request.submit.model)
            state.send(request.gateway_epoch, Rejected(*request.key, reason, why, retry_after_s))
            state.end(request, Trigger.EXPIRE, why, now)
    while state.interrupted:
        first = next(iter(state.interrupted.values()))
        if first.since + state.limits.resubmit_s_max > now:
            break
        state.end(first, Trigger.EXPIRE, "its gateway did not resume it", now)
