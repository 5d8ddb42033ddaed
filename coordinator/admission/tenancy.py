"""Checks the rights of new requests by the tenants file, and puts a new file in force. Pure."""

from dataclasses import replace
from math import ceil
from zlib import crc32

from coordinator.accounting.quota import Ask, Denial
from coordinator.accounting.usage import Opened, Past
from coordinator.events import Configured
from coordinator.state import State
from proto.errors import Reject
from proto.messages import Submit
from scheduler.request import Request
from scheduler.waiting.projection import JITTER

RELOAD_S = 5.0
"""Retry time for a tenant that only the gateway knows. The coordinator will have read the same file by then."""
JITTERED_MAX_S = 60.0
"""The jitter of a wait is at most a part of this, so that a client that waits for midnight does not lose minutes."""
Refusal = tuple[Reject | None, str, float | None]
"""A reason, its words, and seconds until another try, 0 for never; None: as long as what waits before it takes."""


def configure(state: State, event: Configured, now: float) -> None:
    """Put a tenants file in force. Live requests stay in the priority class they came in, even if the file no longer has it.
    Such a class has no floor, or all floors might leave nothing to share."""
    tenants = event.tenants
    still = {request.path[0] for request in state.cluster.requests.values()}
    kept = {
        name: replace(priority_class, floor_share=0.0)
        for name, priority_class in state.limits.priority_classes.items()
        if name in still
    }
    state.limits = replace(
        state.limits, priority_classes=kept | dict(tenants.priority_classes), weights=tenants.weights()
    )
    state.cluster.limits = state.limits
    state.priority_classes_lowest_first = sorted(
        state.limits.priority_classes, key=lambda name: state.limits.priority_classes[name].weight
    )
    state.goodput.forget_others(state.limits.priority_classes)
    state.goodput.put_in_force(event.policy, now)
    for model, queue in state.cluster.queues.items():
        queue.replace_limits(state.limits)
        state.cluster.pools[model].shares.reweigh(queue.fair.weights)
    quotas = state.billing.quotas
    known = dict.fromkeys([*quotas.accounts, *state.leaving])
    state.billing.configure(tenants, event.utc_offset_s, event.past or Past(), now + state.limits.orphan_s_max, now)
    known |= dict.fromkeys(quotas.accounts)
    state.leaving = {tenant: None for tenant in known if tenants.policy(tenant) is None}
    state.let_leave(list(state.leaving))


def reserve(state: State, request: Request, now: float) -> Refusal:
    """Open the request's bill, or say why not; then nothing is taken."""
    submit, billing = request.submit, state.billing
    policy = billing.quotas.tenants.policy(submit.tenant)
    if submit.attempt > 1:
        if policy is None:
            state.leaving[submit.tenant] = None
        bill = billing.adopt(request.id, submit.resumed_tokens)
        if bill is None:
            ask, held = _ask(state, request), 0
            for worker in state.cluster.workers.values():
                held += sum(key[0] == request.id for key in worker.allocations)
            bill = billing.open_promised(submit, ask, held, now)
        request.times = bill.times
        return None, "", None
    if policy is None:
        return Reject.UNKNOWN_TENANT, f"the coordinator does not know tenant {submit.tenant}", RELOAD_S
    if submit.priority_class and submit.priority_class not in policy.priority_classes:
        return (
            Reject.PRIORITY_CLASS,
            f"tenant {submit.tenant} may not use the priority class {submit.priority_class}",
            0.0,
        )
    idle = not state.cluster.queues[submit.model].fair.size
    usual_s = state.cluster.queues[submit.model].projection.placed.mean_s
    ask = _ask(state, request)
    opened = billing.open(
        request.id,
        submit.tenant,
        ask,
        now,
        idle=idle,
        choices=submit.choices,
        usual_s=usual_s,
        fingerprint=request.fingerprint,
    )
    if isinstance(opened, Denial):
        return Reject.QUOTA, str(opened), _retry_after_s(opened, submit)
    request.times, request.borrowed = opened.times, opened.borrowed
    return None, "", None


def ledger_row(state: State, request: Request) -> Opened:
    bill, submit = state.billing.bills[request.id], request.submit
    return Opened(
        request.id,
        bill.day,
        submit.tenant,
        submit.model,
        request.path[0],
        request.borrowed,
        bill.estimate,
        bill.counters.again,
        bill.counters.from_token,
    )


def _retry_after_s(denial: Denial, submit: Submit) -> float:
    """A few seconds of jitter keep those who were told the same from coming back together."""
    jitter_s = JITTER * min(denial.retry_after_s, JITTERED_MAX_S) * crc32(submit.request_id.encode()) / (1 << 32)
    return min(denial.retry_after_s + jitter_s, 86_400.0)


def _ask(state: State, request: Request) -> Ask:
    submit = request.submit
    output_tokens = ceil(state.cluster.queues[submit.model].output_estimate(request))
    output_tokens_max = submit.choices * max(submit.sampling.max_tokens - submit.resumed_tokens, 1)
    decode = next(iter(state.cluster.pools[submit.model].decode.values()), None)
    kv_blocks = decode.whole_blocks(submit) if decode is not None else 0
    return Ask(submit.prompt_tokens, output_tokens, kv_blocks, output_tokens_max, submit.choices)
