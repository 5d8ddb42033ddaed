"""Handlers for the messages of gateways: a request comes, is cancelled, or has waited too long."""

import msgspec

from coordinator import admission
from coordinator.accounting.billing import whole_of
from coordinator.accounts import NotAdmitted
from coordinator.events import Received, StateChanged
from coordinator.recovery import processes
from coordinator.state import State, because
from proto.codec import split_hashes
from proto.errors import CancelReason, Interrupt, Reject
from proto.limits import HASH_BYTES
from proto.messages import Accepted, Cancel, Interrupted, Rejected, Submit, Waits
from proto.progress import EndPrefix, EndSession
from scheduler.lifecycle import ON_WORKERS, RequestState, Trigger
from scheduler.request import Request
from scheduler.workers.pool import Pool

_STAYS = ("model", "tenant", "priority_class", "priority", "choices", "first_choice")
_NOT_OFFERED = frozenset(
    {
        Reject.UNKNOWN_MODEL,
        Reject.TOO_LONG,
        Reject.TOO_LARGE,
        Reject.DUPLICATE,
        Reject.QUOTA,
        Reject.UNKNOWN_TENANT,
        Reject.PRIORITY_CLASS,
    }
)
"""Reasons that lie with the client or its tenant's limits: no capacity could have served these."""
_WHOLE_ANSWER = frozenset({CancelReason.STOP_STRING, CancelReason.ANSWERED})
"""The gateway has all of the answer, so its length says how long this tenant's answers are."""


def fault_of_submit(state: State, incarnation: int, event: Received) -> str:
    """Returns a fault for which a worker would blame this coordinator, or by which one request would take the place of
    another."""
    submit, blob = event.message, event.blob
    assert isinstance(submit, Submit)
    if len(blob) != 4 * submit.prompt_tokens:
        return f"{len(blob)} bytes for {submit.prompt_tokens} prompt tokens"
    if len(submit.block_hashes) % HASH_BYTES:
        return f"{len(submit.block_hashes)} bytes are no whole number of block hashes"
    if submit.resumed_tokens >= submit.prompt_tokens:
        return f"{submit.resumed_tokens} resumed tokens of {submit.prompt_tokens} leave no prompt"
    if submit.pool not in ("", submit.model) and not submit.pool.startswith(f"{submit.model}@"):
        return f"pool {submit.pool!r} is no revision of {submit.model!r}"
    known = state.cluster.requests.get(submit.request_id)
    if known is None or known.gateway_incarnation != incarnation or submit.attempt <= known.attempt:
        return ""
    if state.revisions.is_of(known.submit.model, submit.model):
        submit = msgspec.structs.replace(submit, model=known.submit.model)
    changed = _changed(known.submit, submit)
    return f"{', '.join(changed)} of {submit.request_id} changed with attempt {submit.attempt}" if changed else ""


def _changed(before: Submit, submit: Submit) -> list[str]:
    """The fields that differ, of those that the next attempt at a request may not change. Its prompt grows by the tokens that
    were sent; block hashes, what is left of its deadline, and whether the prompt's log-probabilities are wanted change with
    that."""
    changed = [name for name in _STAYS if getattr(before, name) != getattr(submit, name)]
    if before.sampling != msgspec.structs.replace(submit.sampling, prompt_logprobs=before.sampling.prompt_logprobs):
        changed.append("sampling")
    if before.prompt_tokens - before.resumed_tokens != submit.prompt_tokens - submit.resumed_tokens:
        changed.append("the prompt")
    if submit.resumed_tokens < before.resumed_tokens or submit.drained_attempts < before.drained_attempts:
        changed.append("what was said before")
    if submit.deadline_ms and not before.deadline_ms:
        changed.append("deadline_ms")
    return changed


# --- one comes --------------------------------------------------------------------------------------------------------


def on_submit(state: State, incarnation: int, event: Received) -> None:
    submit = event.message
    assert isinstance(submit, Submit)
    if (pool := pool_for(state, submit, event.blob)) != submit.model:
        submit = msgspec.structs.replace(submit, model=pool)
        event = msgspec.structs.replace(event, message=submit)
    processes.end_orphan(state, submit.request_id)
    if submit.attempt <= (ended := state.last(submit.request_id).attempt):
        if submit.attempt == ended:
            why = "this attempt has ended; its tokens were lost on their way if they have not come"
            state.send(incarnation, Interrupted(submit.request_id, submit.attempt, Interrupt.GATEWAY_LINK_LOST, why))
        return
    known = state.cluster.requests.get(submit.request_id)
    if known is not None and known.gateway_incarnation != incarnation:
        _reject(state, incarnation, event, NotAdmitted(Reject.DUPLICATE, "another gateway has a request of this id"))
        return
    if known is not None and submit.attempt <= known.attempt:
        if submit.attempt == known.attempt:
            _accept(state, known)
        return
    again = submit.model in state.cluster.queues and _comes_back(state, submit)
    if again and _put_off(state, incarnation, submit):
        return
    is_first = submit.attempt == 1 and known is None
    if is_first and submit.model in state.cluster.pools:
        state.cluster.pools[submit.model].traffic.arrived(submit, state.now)
    request, refusal = known, _refusal(state, submit)
    if refusal is None and request is None:
        request = _new_request(state, incarnation, event)
        refusal = _reserve_and_admit(state, request)
    if is_first and (refusal is None or refusal.reason not in _NOT_OFFERED):
        state.accounts.goodput.offered(submit.model, state.accounts.path(submit))
    if refusal is not None:
        if known is not None:
            state.end(known, Trigger.FAIL, refusal.reason)
        _reject(state, incarnation, event, refusal)
        return
    assert request is not None
    if known is None:
        state.alive[submit.model] += 1
        state.scheduler.admit(request, state.now)
        state.record_usage(state.accounts.ledger_row(request))
    else:
        _renew(state, request, submit, event.blob)
    if again:
        state.counters["retries"] += 1
        state.cluster.queues[submit.model].retries.spend(state.now)
    state.scheduler.submit(request, state.now)
    _accept(state, request)
    state.note_state(request, "submitted")


def pool_for(state: State, submit: Submit, blob: bytes) -> str:
    """The pool of workers that a request goes to: it stays with one revision of its model."""
    known = state.cluster.requests.get(submit.request_id)
    if known is not None:
        return known.submit.model
    if submit.pool:
        return submit.pool

    def can_serve(pool: Pool) -> bool:
        return pool.servable() and admission.cannot_serve(submit, pool, state.limits, state.now) is None

    return state.revisions.pool_for(submit, blob, can_serve, state.now)


def _refusal(state: State, submit: Submit) -> NotAdmitted | None:
    if (submit.request_id, submit.attempt) in state.cluster.where:
        return NotAdmitted(Reject.DUPLICATE, "a worker is still busy with this very attempt")
    if submit.attempt == 1 and submit.request_id in state.billing.bills:
        return NotAdmitted(Reject.DUPLICATE, "an earlier request of this id is not settled yet")
    return admission.cannot_serve(submit, state.cluster.pools.get(submit.model), state.limits, state.now)


def _new_request(state: State, incarnation: int, event: Received) -> Request:
    submit, now = event.message, state.now
    assert isinstance(submit, Submit)
    request = Request(submit.request_id, incarnation, submit, event.blob, now, now, state.accounts.path(submit))
    request.fingerprint, request.counted = event.fingerprint, submit.attempt == 1
    request.whole_id = whole_of(submit)
    request.suspicion = state.last(request.id).suspicion or state.last(request.whole_id).suspicion
    state.cluster.set_targets(request)
    return request


def _reserve_and_admit(state: State, request: Request) -> NotAdmitted | None:
    refusal = state.accounts.reserve(request, state.now)
    if refusal is None and (refusal := admission.admit(state, request)) is not None:
        bill = state.billing.bills[request.id]
        state.billing.undo(bill, state.now, state.now + state.limits.orphan_s_max)
    return refusal


def _accept(state: State, request: Request) -> None:
    rates = state.billing.rates(request.submit.tenant, state.now)
    state.send(request.gateway_incarnation, Accepted(*request.key, rates))


def _reject(state: State, incarnation: int, event: Received, refusal: NotAdmitted) -> None:
    submit, (reason, why, again_s) = event.message, refusal
    assert isinstance(submit, Submit)
    state.outcomes[RequestState.REJECTED] += 1
    state.counters[f"rejected_{reason}"] += 1
    if again_s is None:
        again_s = admission.retry_after_s(state, submit, event.fingerprint)
    rates = state.billing.rates(submit.tenant, state.now)
    queue = state.cluster.queues.get(submit.model)
    waits = Waits()
    why_it_would_wait = because(reason, state.accounts.path(submit), queue, waits)
    state.send(
        incarnation,
        Rejected(submit.request_id, submit.attempt, reason, why[:500], again_s, rates, waits, why_it_would_wait),
    )
    state.out.append(StateChanged(submit.request_id, submit.attempt, RequestState.REJECTED, reason))


def _comes_back(state: State, submit: Submit) -> bool:
    """Whether an earlier attempt at it, or at all of its choices, was cut short here, and not by a drain. Nothing is known of
    requests that an earlier coordinator had accepted."""
    known = state.cluster.requests.get(submit.request_id)
    if known is not None:
        drained = submit.drained_attempts > known.submit.drained_attempts
        return known.state is RequestState.INTERRUPTED and not drained
    if submit.attempt == 1:
        return False
    # A choice that was put off and cancelled was never accepted under its own id.
    earlier = (state.last(name).drained for name in (submit.request_id, whole_of(submit)))
    return submit.drained_attempts <= max(earlier)


def _put_off(state: State, incarnation: int, submit: Submit) -> bool:
    """Tell the gateway to try again later if too many requests come back at once. Returns whether it was told; nothing else
    changes."""
    retries = state.cluster.queues[submit.model].retries
    if retries.allows(state.alive[submit.model], state.now):
        return False
    state.counters["retries_put_off"] += 1
    why, again_s = "too many interrupted requests come back at once", retries.wait_s(state.now)
    state.send(incarnation, Rejected(submit.request_id, submit.attempt, Reject.RETRY_BUDGET, why, again_s))
    return True


def _renew(state: State, request: Request, submit: Submit, blob: bytes) -> None:
    """Begin the next attempt at a request, in any state of the one before."""
    state.cluster.withdraw(request, state.now)
    state.carry_out(state.scheduler.take_decisions())
    if request.state in ON_WORKERS:
        request.fire(Trigger.INTERRUPT, state.now)
    state.interrupted.pop(request.id, None)
    state.accounts.emitted(submit.model, request.path, request.id, submit.resumed_tokens, 0)
    request.renew(submit, blob)
    request.fire(Trigger.RESUBMIT, state.now)


# --- one ends ---------------------------------------------------------------------------------------------------------


def on_cancel(state: State, incarnation: int, cancel: Cancel) -> None:
    request = state.cluster.requests.get(cancel.request_id)
    if request is not None and request.gateway_incarnation == incarnation and cancel.attempt >= request.attempt:
        state.accounts.emitted(request.submit.model, request.path, request.id, cancel.output_tokens, 0)
        if cancel.reason in _WHOLE_ANSWER and cancel.output_tokens:
            state.cluster.queues[request.submit.model].learn(request, cancel.output_tokens)
            state.accounts.count_finished(request, cancel.output_tokens, state.now)
        whole = cancel.reason is CancelReason.ANSWERED and request.state is RequestState.INTERRUPTED
        state.end(request, Trigger.FINISH if whole else Trigger.CANCEL, cancel.reason)
    elif request is None:
        # An earlier coordinator accepted it: the workers know it, and `where` lists their allocations. A worker that has still
        # to come back finds the cancel here.
        for attempt in range(1, cancel.attempt + 1):  # one before may have missed that it was given up
            state.release_everywhere((cancel.request_id, attempt))
        state.remember(cancel.request_id, cancel.attempt)
        state.billing.emitted(cancel.request_id, cancel.output_tokens, 0)
        if cancel.reason is CancelReason.ANSWERED:
            state.record_usage(state.billing.end_orphan(cancel.request_id, RequestState.FINISHED, state.now))
        else:
            state.record_usage(state.billing.give_up(cancel.request_id, state.now))


def on_end_session(state: State, incarnation: int, ended: EndSession) -> None:
    """A client has said that a conversation is over: workers give up what they keep of it."""
    for pool in state.cluster.pools.values():
        for tail in pool.sessions.end(ended.tenant, ended.session):
            for worker in pool.locality.having(split_hashes(tail)):
                state.send(worker, EndPrefix(tail))


def expire(state: State) -> None:
    """End what has waited too long: for a turn, for a gateway to resume it, or for a report about an open bill."""
    now = state.now
    for model, queue in state.cluster.queues.items():
        if now < queue.line.nothing_due_before:
            continue
        pool = state.cluster.pools[model]
        for request in queue.line.overdue(now, pool.fastest_tokens_per_s(), pool.uncached_tokens):
            reason, why = Reject.EXPIRED, f"waited {now - request.since:.3g} s in the queue"
            if not request.waits or now < request.since + queue.line.limit_s(request):
                reason = Reject.DEADLINE
                why = f"no first token within its deadline of {request.submit.deadline_ms:g} ms"
            again_s = admission.retry_after_s(state, request.submit, request.fingerprint)
            state.reject(request, reason, Trigger.EXPIRE, why, again_s)
    while state.interrupted:
        first = next(iter(state.interrupted.values()))
        if first.since + state.limits.resubmit_s_max > now:
            break
        state.end(first, Trigger.EXPIRE, "its gateway did not resume it")
    if state.billing.orphans or state.billing.doubts:
        for entry in state.billing.write_off(now, now + state.limits.orphan_s_max):
            state.record_usage(entry)


def next_expiry(state: State) -> float | None:
    """Returns when the next interrupted request has waited too long for its gateway."""
    first = next(iter(state.interrupted.values()), None)
    return first.since + state.limits.resubmit_s_max if first is not None else None
