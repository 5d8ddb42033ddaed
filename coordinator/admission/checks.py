"""The rules on which processes may join and which requests are let in. Pure functions; a rejection reserves and costs
nothing."""

from collections.abc import Mapping

from coordinator.events import Limits
from proto.compatible import mismatch
from proto.errors import Reject
from proto.limits import MAX_MODELS
from proto.messages import Hello, Role, Submit
from scheduler.request import Request
from scheduler.waiting.projection import spread
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.tenant_work import UNCOMPUTED
from scheduler.workers.pool import Pool
from scheduler.workers.worker import WORKERS

Refusal = tuple[Reject | None, str]


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
    return None


def judge(submit: Submit, pool: Pool | None, limits: Limits, now: float) -> Refusal:
    """Whether a request could be served at all, however much waits: (None, "") or a reason and its words."""
    if pool is None:
        return Reject.UNKNOWN_MODEL, f"no worker has served model {submit.model!r} yet"
    if lacks := pool.lacks():
        if submit.attempt > 1:
            return None, ""  # it waits for the restart of what it lost
        if not pool.awaits_restart(now, limits.queue_wait_s_max):
            return Reject.NO_CAPACITY, lacks
    total = submit.prompt_tokens + submit.sampling.max_tokens - submit.resumed_tokens
    if total - 1 > pool.context_tokens:  # the last token is drawn, and not computed on
        return Reject.TOO_LONG, f"{total} tokens in all; the context holds {pool.context_tokens}"
    if not pool.could_ever_fit(submit):
        return Reject.TOO_LARGE, f"the KV cache of {total} tokens x {submit.choices} fits no worker here"
    if submit.prompt_tokens > limits.queue_tokens_max:
        return Reject.TOO_LARGE, f"a prompt of {submit.prompt_tokens} tokens; {limits.queue_tokens_max} may wait in all"
    return None, ""


def feasible(
    request: Request, pool: Pool, queue: WaitQueue, place_s: float, *, obeys: bool
) -> tuple[Reject | None, str, float | None]:
    """Returns whether a request's deadline, or its class's target for the first token, can be met at the measured rates,
    behind the work before it in the fair order, if as much of its prompt is cached as is believed. `place_s`: projected
    seconds until it gets a place; `obeys`: it was told to come now. Also returns seconds until another try may succeed; 0:
    never, None: as long as the work before it takes."""
    deadline_ms, own_ms = request.first_token_ms, request.submit.deadline_ms
    if not deadline_ms:
        return None, "", 0.0
    tokens = pool.uncached_tokens(request.submit)
    limit = "deadline_ms" if own_ms else f"ttft_ms of priority class {request.path[0]}"
    soonest_ms = 1000 * pool.least_prefill_s(tokens)
    if soonest_ms > deadline_ms:
        why = f"{tokens} prompt tokens to compute take {soonest_ms:.0f} ms here; {limit} is less"
        return (Reject.DEADLINE, why, 0.0 if own_ms else spread((soonest_ms - deadline_ms) / 1000, request.fingerprint))
    rate = pool.tokens_per_s()
    if not rate or not queue.line.work.total(UNCOMPUTED):
        return None, "", 0.0
    before = queue.line.work.before(request.path, UNCOMPUTED, tokens, urgent=True) - tokens
    expected_ms = 1000 * (before + tokens * len(pool.prefill)) / rate  # one prompt is computed on one worker
    if pool.wakeups.closed:
        expected_ms = max(expected_ms, 1000 * place_s + soonest_ms)
    request.expected_s = expected_ms / 1000
    if expected_ms <= queue.projection.margins.allowed_ms(request, obeys=obeys):
        return None, "", 0.0
    why = f"its first token is expected in {expected_ms:.0f} ms, behind what waits before it; {limit} is less"
    return Reject.DEADLINE, why, None
