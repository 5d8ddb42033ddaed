"""Requests of gateways: one comes in, is cancelled, or has waited too long."""

import msgspec

from coordinator.accounting.billing import whole_of
from coordinator.admission import checks, tenancy
from coordinator.events import Received, StateChanged
from coordinator.recovery import orphans
from coordinator.reporting import report
from coordinator.state import State
from proto.codec import split_hashes
from proto.errors import CancelReason, Interrupt, Reject
from proto.limits import HASH_BYTES
from proto.messages import Accepted, Cancel, Interrupted, Rejected, Submit
from proto.progress import EndPrefix, EndSession
from scheduler.lifecycle import ON_WORKERS, RequestState, Trigger
from scheduler.request import Request


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
    known = state.cluster.requests.get(submit.request_id)
    if known is None or known.gateway_incarnation != incarnation or submit.attempt <= known.attempt:
        return ""
    changed = _changed(known.submit, submit)
    return f"{', '.join(changed)} of {submit.request_id} changed with attempt {submit.attempt}" if changed else ""


_STAYS = ("model", "tenant", "priority_class", "priority", "choices", "first_choice")


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


def submit(state: State, incarnation: int, event: Received, now: float) -> None:
    submit = event.message
    assert isinstance(submit, Submit)
    orphans.end(state, submit.request_id)
    ended = state.last_attempt(submit.request_id)
    if submit.attempt <= ended:
        if submit.attempt == ended:
            why = "this attempt has ended; its tokens were lost on their way if they have not come"
            state.send(incarnation, Interrupted(submit.request_id, submit.attempt, Interrupt.GATEWAY_LINK_LOST, why))
        return
    known = state.cluster.requests.get(submit.request_id)
    if known is not None and known.gateway_incarnation != incarnation:
        _reject(state, incarnation, event, Reject.DUPLICATE, "another gateway has a request of this id", now)
        return
    if known is not None and submit.attempt <= known.attempt:
        if submit.attempt == known.attempt:
            state.send(incarnation, Accepted(*known.key, state.billing.rates(submit.tenant, now)))
        return
    again = submit.model in state.cluster.queues and _comes_back(state, submit)
    if again and _put_off(state, incarnation, submit, now):
        return
    if submit.attempt == 1 and known is None and submit.model in state.cluster.pools:
        state.cluster.pools[submit.model].traffic.arrived(submit, now)
    reason, why = _judge(state, submit, now)
    request, retry_after_s = known, None
    if reason is None and request is None:
        request = Request(submit.request_id, incarnation, submit, event.blob, now, now, state.path(submit))
        request.fingerprint, request.counted = event.fingerprint, submit.attempt == 1
        request.whole_id = whole_of(submit)
        request.suspicion = state.last_suspicion(request.id) or state.last_suspicion(request.whole_id)
        state.cluster.set_targets(request)
        reason, why, retry_after_s = tenancy.reserve(state, request, now)
        if reason is None:
            reason, why, retry_after_s = _admit(state, request, now)
            if reason is not None:
                state.billing.undo(state.billing.bills[request.id], now, now + state.limits.orphan_s_max)
    if submit.attempt == 1 and known is None and reason not in _NOT_OFFERED:
        state.goodput.offered(state.path(submit))
    if reason is not None:
        if known is not None:
            state.end(known, Trigger.FAIL, reason, now)
        _reject(state, incarnation, event, reason, why, now, retry_after_s)
        return
    assert request is not None
    if known is None:
        _let_in(state, request, now)
    else:
        _renew(state, request, submit, event.blob, now)
    if again:
        state.counters["retries"] += 1
        state.cluster.queues[submit.model].retries.spend(now)
    state.scheduler.submit(request, now)
    state.send(incarnation, Accepted(*request.key, state.billing.rates(submit.tenant, now)))
    state.out.append(StateChanged(request.id, request.attempt, request.state, "submitted"))


def _let_in(state: State, request: Request, now: float) -> None:
    """Admit a new request."""
    state.alive[request.submit.model] += 1
    state.scheduler.admit(request, now)
    state.record_usage(tenancy.ledger_row(state, request))


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
    earlier = (state.last_drained(name) for name in (submit.request_id, whole_of(submit)))
    return submit.drained_attempts <= max(earlier)


def _put_off(state: State, incarnation: int, submit: Submit, now: float) -> bool:
    """Tell the gateway to try again later if too many requests come back at once. Returns whether it was told; nothing else
    changes."""
    retries = state.cluster.queues[submit.model].retries
    if retries.allows(state.alive[submit.model], now):
        return False
    state.counters["retries_put_off"] += 1
    why = "too many interrupted requests come back at once"
    put_off = Rejected(submit.request_id, submit.attempt, Reject.RETRY_BUDGET, why, retries.wait_s(now))
    state.send(incarnation, put_off)
    return True


def _renew(state: State, request: Request, submit: Submit, blob: bytes, now: float) -> None:
    """Begin the next attempt at a request, in any state of the one before."""
    state.cluster.withdraw(request, now)
    state.carry_out(state.scheduler.take_decisions())
    if request.state in ON_WORKERS:
        request.fire(Trigger.INTERRUPT, now)
    state.interrupted.pop(request.id, None)
    state.emitted(submit.model, request.path, request.id, submit.resumed_tokens, 0)
    request.renew(submit, blob)
    request.fire(Trigger.RESUBMIT, now)


def _judge(state: State, submit: Submit, now: float) -> checks.Refusal:
    key = submit.request_id, submit.attempt
    if key in state.cluster.where:
        return Reject.DUPLICATE, "a worker is still busy with this very attempt"
    if submit.attempt == 1 and submit.request_id in state.billing.bills:
        return Reject.DUPLICATE, "an earlier request of this id is not settled yet"
    return checks.judge(submit, state.cluster.pools.get(submit.model), state.limits, now)


def _admit(state: State, request: Request, now: float) -> tuple[Reject | None, str, float | None]:
    """Returns whether a new request is admitted beside the waiting ones, and after how many seconds another try may succeed;
    None: as long as the work before it takes. A resumed request is not checked again."""
    submit, limits = request.submit, state.limits
    pool, queue = state.cluster.pools[submit.model], state.cluster.queues[submit.model]
    obeys = queue.projection.obeys(request.path, request.fingerprint, now)
    wait_s = request.projected_s = report.wait_s(state, request, now)
    reason, why, retry_after_s = checks.feasible(request, pool, queue, wait_s, obeys=obeys)
    if reason is not None:
        grace_s = limits.priority_classes[request.path[0]].ttft_grace_s
        if submit.deadline_ms or not queue.grace.covers(request.path[0], grace_s, now):
            return reason, why, retry_after_s
        request.promised = False
    if wait_s > (limit_s := queue.line.limit_s(request)):
        return Reject.QUEUE_FULL, f"it would wait for {wait_s:.0f} s, and may for {limit_s:g} s at most", None
    # One that comes when it was told goes before those that come early or for the first time.
    most = limits.tenant_queue_max * (2 if obeys else 1)
    if queue.line.waiting(request.path) >= most:
        return Reject.QUEUE_FULL, f"{limits.tenant_queue_max} requests of this tenant are waiting already", None
    victims = queue.line.make_room(request, state.priority_classes_lowest_first)
    if victims is None:
        why = f"{len(queue)} requests of {queue.line.tokens} tokens are waiting already"
        return Reject.QUEUE_FULL, why, None
    for victim in victims:
        _shed(state, victim, now)
    return None, "", None


def _shed(state: State, victim: Request, now: float) -> None:
    why = "it waited, and had to make room in an overload"
    state.counters[f"rejected_{Reject.SHED}"] += 1
    retry_after_s = report.retry_after_s(state, victim.submit, victim.fingerprint, now)
    state.send(victim.gateway_incarnation, Rejected(*victim.key, Reject.SHED, why, retry_after_s))
    state.end(victim, Trigger.SHED, why, now)


_WORTH_ANOTHER_TRY = frozenset(
    {Reject.QUEUE_FULL, Reject.NO_CAPACITY, Reject.UNKNOWN_MODEL, Reject.DUPLICATE, Reject.DEADLINE}
)


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


def _reject(
    state: State,
    incarnation: int,
    event: Received,
    reason: Reject,
    why: str,
    now: float,
    retry_after_s: float | None = None,
) -> None:
    submit = event.message
    assert isinstance(submit, Submit)
    state.outcomes[RequestState.REJECTED] += 1
    state.counters[f"rejected_{reason}"] += 1
    if retry_after_s is None:
        retry_after_s = (
            report.retry_after_s(state, submit, event.fingerprint, now) if reason in _WORTH_ANOTHER_TRY else 0.0
        )
    rates = state.billing.rates(submit.tenant, now)
    state.send(incarnation, Rejected(submit.request_id, submit.attempt, reason, why[:500], retry_after_s, rates))
    state.out.append(StateChanged(submit.request_id, submit.attempt, RequestState.REJECTED, reason))


_WHOLE_ANSWER = frozenset({CancelReason.STOP_STRING, CancelReason.ANSWERED})
"""The gateway has all of the answer, so its length says how long this tenant's answers are."""


def cancel(state: State, incarnation: int, event: Received, now: float) -> None:
    cancel = event.message
    assert isinstance(cancel, Cancel)
    request = state.cluster.requests.get(cancel.request_id)
    if request is not None and request.gateway_incarnation == incarnation and cancel.attempt >= request.attempt:
        state.emitted(request.submit.model, request.path, request.id, cancel.output_tokens, 0)
        if cancel.reason in _WHOLE_ANSWER and cancel.output_tokens:
            state.cluster.queues[request.submit.model].learn(request, cancel.output_tokens)
            state.count_finished(request, cancel.output_tokens)
        whole = cancel.reason is CancelReason.ANSWERED and request.state is RequestState.INTERRUPTED
        state.end(request, Trigger.FINISH if whole else Trigger.CANCEL, cancel.reason, now)
    elif request is None:
        # An earlier coordinator accepted it: the workers know it, and `where` lists their allocations. A worker that has still
        # to come back finds the cancel here.
        for attempt in range(1, cancel.attempt + 1):  # one before may have missed that it was given up
            state.release_everywhere((cancel.request_id, attempt))
        state.remember(cancel.request_id, cancel.attempt)
        state.billing.emitted(cancel.request_id, cancel.output_tokens, 0)
        if cancel.reason is CancelReason.ANSWERED:
            state.record_usage(state.billing.end_orphan(cancel.request_id, RequestState.FINISHED, now))
        else:
            state.record_usage(state.billing.give_up(cancel.request_id, now))


def end_session(state: State, _: int, event: Received, __: float) -> None:
    """A client has said that a conversation is over: workers give up what they keep of it."""
    ended = event.message
    assert isinstance(ended, EndSession)
    for pool in state.cluster.pools.values():
        for tail in pool.sessions.end(ended.tenant, ended.session):
            for incarnation in pool.locality.having(split_hashes(tail)):
                state.send(incarnation, EndPrefix(tail))


def expire(state: State, now: float) -> None:
    for model, queue in state.cluster.queues.items():
        if now < queue.line.nothing_due_before:
            continue
        pool = state.cluster.pools[model]
        for request in queue.line.overdue(now, pool.fastest_tokens_per_s(), pool.uncached_tokens):
            late = not request.waits or now < request.since + queue.line.limit_s(request)
            reason = Reject.DEADLINE if late else Reject.EXPIRED
            why = (
                f"no first token within its deadline of {request.submit.deadline_ms:g} ms"
                if late
                else f"waited {now - request.since:.3g} s in the queue"
            )
            state.counters[f"rejected_{reason}"] += 1
            retry_after_s = report.retry_after_s(state, request.submit, request.fingerprint, now)
            state.send(request.gateway_incarnation, Rejected(*request.key, reason, why, retry_after_s))
            state.end(request, Trigger.EXPIRE, why, now)
    while state.interrupted:
        first = next(iter(state.interrupted.values()))
        if first.since + state.limits.resubmit_s_max > now:
            break
        state.end(first, Trigger.EXPIRE, "its gateway did not resume it", now)
    if state.billing.orphans or state.billing.doubts:
        for entry in state.billing.write_off(now, now + state.limits.orphan_s_max):
            state.record_usage(entry)
