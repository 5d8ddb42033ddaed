"""The rules on which processes may join, and which requests are let in. A rejection reserves and costs nothing. Pure."""

from collections.abc import Mapping
from math import inf

from coordinator.accounts import NotAdmitted
from coordinator.events import Limits
from coordinator.state import State
from proto.compatible import mismatch, text_mismatch
from proto.errors import Reject
from proto.limits import MAX_MODELS
from proto.messages import Hello, Role, Submit
from scheduler.lifecycle import Trigger
from scheduler.request import Request
from scheduler.waiting.projection import Speed, spread
from scheduler.waiting.tenant_work import UNCOMPUTED
from scheduler.workers.pool import Pool
from scheduler.workers.worker import WORKERS

NO_CAPACITY_S = 5.0  # about the time in which a supervised worker comes back, in seconds


def refusal(hello: Hello, pools: Mapping[str, Pool]) -> str | None:
    """Why a process may not join, or None."""
    if hello.role is Role.COORDINATOR:
        return "there is one coordinator, and you are speaking to it"
    if hello.role is Role.MIXED:
        return "a mixed worker registers as a prefill and as a decode worker"
    if hello.role not in WORKERS:
        return None
    if hello.capacity is None or not hello.model or not hello.fingerprint:
        return f"a {hello.role} worker must state its model, fingerprint and capacity"
    if not hello.capacity.kv_blocks:
        return "a worker without a single KV block"
    if hello.role is Role.DECODE and not hello.address:
        return "a decode worker must state the address for its KV port"
    pool = pools.get(hello.model)
    if pool is None and len(pools) >= MAX_MODELS:
        return f"{MAX_MODELS} models are served here already, or were within the last hour"
    for worker in (*pool.prefill.values(), *pool.decode.values()) if pool is not None else ():
        there, size = worker.hello, worker.capacity.block_size
        why = mismatch(there.name, there.fingerprint, size, hello.name, hello.fingerprint, hello.capacity.block_size)
        if why:
            return f"model {hello.model!r} is served here, and its workers must fit each other: {why}"
    for other in pools.values():
        there = next((worker.hello for worker in other.workers.values()), hello)
        if there.model_id == hello.model_id and there.model != hello.model:
            why = text_mismatch(there.name, there.fingerprint, hello.name, hello.fingerprint)
            if why:
                return (
                    f"revisions of {hello.model_id!r} need the same config.json and tokenizer.json: {why}; serve this model"
                    " under another --model-id"
                )
    return None


# --- how long to wait -------------------------------------------------------------------------------------------------


def retry_after_s(state: State, submit: Submit, fingerprint: int) -> float:
    """Returns seconds after which a rejected request should come again: see `Projection.retry_after_s`."""
    pool, queue = state.cluster.pools.get(submit.model), state.cluster.queues.get(submit.model)
    if pool is None or queue is None or not pool.servable():
        return NO_CAPACITY_S
    path = state.accounts.path(submit)
    at, tokens = _speed(state, submit.model, path), submit.prompt_tokens
    before = queue.line.work.before(path, UNCOMPUTED, tokens) - tokens
    computed_s = before / at.prompt_tokens_per_s if at.prompt_tokens_per_s else 0.0
    return queue.projection.retry_after_s(path, queue.work(submit, path), fingerprint, at, state.now, computed_s)


def wait_s(state: State, request: Request) -> float:
    """How long a new request would wait for a place: see `Projection.wait_s`."""
    model, path = request.submit.model, request.path
    queue, pool = state.cluster.queues[model], state.cluster.pools[model]
    work, urgent, at = queue.work(request.submit, path), request.first_token_ms > 0, _speed(state, model, path)
    return queue.projection.wait_s(path, work, at, state.now, urgent=urgent, lacks=pool.shares.lacks(path))


def _speed(state: State, model: str, path: tuple[str, str, str]) -> Speed:
    """The speed at which a new request of this tenant gets a place."""
    pool = state.cluster.pools[model]
    apart = pool.is_apart(state.limits.priority_classes[path[0]].tpot_ms or 0.0, state.now)
    is_warm, clock = pool.servable(), state.cluster.queues[model].clock
    is_full = is_warm and bool(pool.wakeups.closed)
    return Speed(pool.tokens_per_s(), is_full, apart, clock.warm_since if is_warm else inf)


# --- new requests -----------------------------------------------------------------------------------------------------


def cannot_serve(submit: Submit, pool: Pool | None, limits: Limits, now: float) -> NotAdmitted | None:
    """Why a request could not be served at all, however little waits."""
    if pool is None:
        return NotAdmitted(Reject.UNKNOWN_MODEL, f"no worker has served model {submit.model!r} yet")
    if lacks := pool.lacks():
        if submit.attempt > 1:
            return None  # it waits for the restart of what it lost
        if not pool.awaits_restart(now, limits.queue_wait_s_max):
            return NotAdmitted(Reject.NO_CAPACITY, lacks)
    total = submit.prompt_tokens + submit.sampling.max_tokens - submit.resumed_tokens
    if total - 1 > pool.context_tokens:  # the last token is drawn, and not computed on
        return NotAdmitted(Reject.TOO_LONG, f"{total} tokens in all; the context holds {pool.context_tokens}", 0.0)
    # A stream that has run waits for the worker that held it to come back.
    if submit.attempt == 1 and not pool.could_ever_fit(submit):
        return NotAdmitted(
            Reject.TOO_LARGE, f"the KV cache of {total} tokens x {submit.choices} fits no worker here", 0.0
        )
    if submit.prompt_tokens > limits.queue_tokens_max:
        why = f"a prompt of {submit.prompt_tokens} tokens; {limits.queue_tokens_max} may wait in all"
        return NotAdmitted(Reject.TOO_LARGE, why, 0.0)
    return None


def admit(state: State, request: Request) -> NotAdmitted | None:
    """Returns why a new request is not admitted beside the waiting ones. Sheds others for it. A resumed request is not checked
    again."""
    limits, queue = state.limits, state.cluster.queues[request.submit.model]
    obeys = queue.projection.obeys(request.path, request.fingerprint, state.now)
    request.projected_s = wait_s(state, request)
    late = _infeasible(state, request, obeys=obeys)
    if late is not None:
        grace_s = limits.priority_classes[request.path[0]].ttft_grace_s
        if request.submit.deadline_ms or not queue.grace.covers(request.path[0], grace_s, state.now):
            return late
        request.promised = False
    if request.projected_s > (limit_s := queue.line.limit_s(request)):
        why = f"it would wait for {request.projected_s:.0f} s, and may for {limit_s:g} s at most"
        return NotAdmitted(Reject.QUEUE_FULL, why)
    # One that comes when it was told goes before those that come early or for the first time.
    most = limits.tenant_queue_max * (2 if obeys else 1)
    if queue.line.waiting(request.path) >= most:
        why = f"{limits.tenant_queue_max} requests of this tenant are waiting already"
        return NotAdmitted(Reject.QUEUE_FULL, why)
    victims = queue.line.make_room(request, state.accounts.classes_lowest_first)
    if victims is None:
        why = f"{len(queue)} requests of {queue.line.tokens} tokens are waiting already"
        return NotAdmitted(Reject.QUEUE_FULL, why)
    for victim in victims:
        _shed(state, victim)
    return None


def _infeasible(state: State, request: Request, *, obeys: bool) -> NotAdmitted | None:
    """Returns why a request's deadline, or its class's target for the first token, cannot be met at the measured rates, behind
    the work before it in the fair order, if as much of its prompt is cached as is believed. `obeys`: it was told to come
    now."""
    deadline_ms, own_ms = request.first_token_ms, request.submit.deadline_ms
    if not deadline_ms:
        return None
    pool, queue = state.cluster.pools[request.submit.model], state.cluster.queues[request.submit.model]
    tokens = pool.uncached_tokens(request.submit)
    limit = "deadline_ms" if own_ms else f"ttft_ms of priority class {request.path[0]}"
    soonest_ms = 1000 * pool.least_prefill_s(tokens)
    if soonest_ms > deadline_ms:
        why = f"{tokens} prompt tokens to compute take {soonest_ms:.0f} ms here; {limit} is less"
        again_s = 0.0 if own_ms else spread((soonest_ms - deadline_ms) / 1000, request.fingerprint)
        return NotAdmitted(Reject.DEADLINE, why, again_s)
    rate = pool.tokens_per_s()
    if not rate or not queue.line.work.total(UNCOMPUTED):
        return None
    before = queue.line.work.before(request.path, UNCOMPUTED, tokens, urgent=True) - tokens
    expected_ms = 1000 * (before + tokens * len(pool.prefill)) / rate  # one prompt is computed on one worker
    if pool.wakeups.closed:
        expected_ms = max(expected_ms, 1000 * request.projected_s + soonest_ms)
    request.expected_s = expected_ms / 1000
    allowed_ms = queue.projection.margins.allowed_ms(request, obeys=obeys)
    if expected_ms <= allowed_ms:
        return None
    why = (
        f"its first token is expected in {expected_ms:.0f} ms, behind what waits before it; {limit}, less the measured error"
        f" of such expectations, allows {allowed_ms:.0f} ms"
    )
    return NotAdmitted(Reject.DEADLINE, why)


def _shed(state: State, victim: Request) -> None:
    again_s = retry_after_s(state, victim.submit, victim.fingerprint)
    state.reject(victim, Reject.SHED, Trigger.SHED, "it waited, and had to make room in an overload", again_s)
