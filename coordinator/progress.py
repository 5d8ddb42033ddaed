"""Handlers for the reports of workers: steps computed, prompts handed over, attempts ended."""

from coordinator.events import Received
from coordinator.recovery import flips, suspects
from coordinator.state import State
from proto.errors import Interrupt
from proto.messages import (
    CacheEvents,
    CacheMiss,
    Chunk,
    Finished,
    HandedOver,
    Released,
    Role,
    StepDone,
    WorkFailed,
)
from proto.progress import DecodeProgress
from proto.status import KvHeld, KvPairs
from scheduler.kv_admission.shared_blocks import chains
from scheduler.lifecycle import ON_WORKERS, RequestState, Trigger
from scheduler.placement import fetch
from scheduler.placement.preemption import charge_decode, relieve
from scheduler.request import Request
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.prefix_index import usable_hashes
from scheduler.workers.worker import Worker

FAILURES_KEPT = 7
"""Earlier failures of its model that a request keeps."""


def fault_of_step(state: State, incarnation: int, event: Received) -> str:
    done = event.message
    assert isinstance(done, StepDone)
    step, _ = state.workers[incarnation].steps.get(done.step_id, (None, None))
    if step is None or done.computed == step.chunks or _is_part(done.computed, step.chunks):
        return ""
    return f"step {done.step_id} computed what it was not asked for"


def step_done(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, StepDone)
    worker = state.workers[incarnation]
    asked, requests = worker.end_step(done.step_id)
    if not asked:
        return
    if done.computed != asked:
        _refund_skipped(state, worker, asked, requests, done.computed)
    worker.tokens_forwarded = done.tokens_forwarded
    if done.computed:
        worker.steps_done += 1
        state.stepped(incarnation)
    pool, queue = state.pools[worker.hello.model], state.queues[worker.hello.model]
    pool.changed(worker)
    pool.wakeups.has_own_work(worker)
    tokens, pairs = 0, 0.0
    for chunk in done.computed:
        tokens += chunk.length
        pairs += chunk.length * (chunk.start + chunk.length / 2)
        state.billing.computed(chunk.request_id, chunk.attempt, chunk.length)
        request = state.current(chunk.request_id, chunk.attempt)
        if request is None or (attempt_progress := request.attempt_progress).prefill_incarnation != incarnation:
            continue
        attempt_progress.computed_tokens += chunk.length
        suspects.computed(state, request)
        queue.count_uncomputed(request, max(request.submit.prompt_tokens - attempt_progress.computed_tokens, 0))
        if (
            request.state is RequestState.PREFILLING
            and attempt_progress.computed_tokens >= request.submit.prompt_tokens
        ):
            state.counters["prompt_tokens_cached"] += request.cached_tokens
            pool.traffic.computed(request.id, request.cached_tokens, now)
            request.first_token_at = request.first_token_at or now
            state.billing.prompt_done(request.id)
            state.move(request, Trigger.PROMPT_DONE, now)
            if request.decode_incarnation == incarnation:
                _decodes_here(state, request, worker, now)
    if tokens and done.step_ms > 0:
        pool.measure(worker, tokens, done.step_ms)
        if worker.admission is None:
            pool.step_times[Role.PREFILL].add(1, tokens, pairs, done.step_ms, now)
    for chunk in asked:
        state.record_usage(state.billing.release(chunk.request_id, now))


def _decodes_here(state: State, request: Request, worker: Worker, now: float) -> None:
    """Let a request decode on the decode worker that has computed its prompt, without a hand-over."""
    model, path = request.submit.model, worker.allocations[request.key].path
    state.emitted(model, path, request.id, request.submit.resumed_tokens, 0, first=True)
    state.pools[model].breakers.worked((worker.incarnation, worker.incarnation))
    state.move(request, Trigger.HANDED_OVER, now)


def _is_part(computed: tuple[Chunk, ...], asked: tuple[Chunk, ...]) -> bool:
    """Whether the computed chunks are some of those asked for, in the same order."""
    rest = iter(asked)
    return all(any(chunk == other for other in rest) for chunk in computed)


def _refund_skipped(
    state: State, worker: Worker, asked: tuple[Chunk, ...], requests: list[Request], computed: tuple[Chunk, ...]
) -> None:
    done = {(chunk.request_id, chunk.attempt) for chunk in computed}
    for chunk, request in zip(asked, requests, strict=True):
        if (chunk.request_id, chunk.attempt) not in done:
            state.queues[worker.hello.model].skipped(request, chunk)


def fault_of_miss(state: State, incarnation: int, event: Received) -> str:
    miss = event.message
    assert isinstance(miss, CacheMiss)
    if miss.cached_tokens % state.workers[incarnation].capacity.block_size:
        return f"{miss.cached_tokens} cached tokens are no whole number of blocks"
    return ""


def cache_miss(state: State, incarnation: int, event: Received, now: float) -> None:
    """Put back the part of a prompt that was believed cached, but that the worker does not have. It is computed and charged
    after all."""
    miss = event.message
    assert isinstance(miss, CacheMiss)
    worker = state.workers[incarnation]
    size = worker.capacity.block_size
    request = state.current(miss.request_id, miss.attempt)
    if (
        request is None
        or request.prefill_incarnation != incarnation
        or request.state not in (RequestState.PLACED, RequestState.PREFILLING)
    ):
        return
    if miss.cached_tokens >= request.cached_tokens:
        return
    state.counters["cache_misses"] += 1
    if miss.fetch_failed:
        state.counters["fetches_failed"] += 1
        fetch.failed(worker, request.decode_incarnation, now)
    submit = request.submit
    state.pools[submit.model].locality.forget(incarnation, usable_hashes(submit, size), miss.cached_tokens // size)
    request.cached_tokens = request.attempt_progress.computed_tokens = miss.cached_tokens
    queue = state.queues[submit.model]
    queue.put_back(request, miss.cached_tokens)
    queue.count_uncomputed(request, submit.prompt_tokens - miss.cached_tokens)
    worker.placed[request.id] = request
    worker.expect(request)
    state.pools[submit.model].wakeups.has_own_work(worker)


def cache_events(state: State, incarnation: int, event: Received, now: float) -> None:
    report = event.message
    assert isinstance(report, CacheEvents)
    model = state.workers[incarnation].hello.model
    state.pools[model].locality.learn(incarnation, report.inserted, report.evicted)
    if state.keeping:
        flips.cache_told(state, incarnation)


def fault_of_hand_over(state: State, incarnation: int, event: Received) -> str:
    done = event.message
    assert isinstance(done, HandedOver)
    request = state.current(done.request_id, done.attempt)
    if request is not None and request.prefill_incarnation == incarnation and request.entry is not None:
        return f"{done.request_id} is handed over before it is computed"
    return ""


def handed_over(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, HandedOver)
    request = state.current(done.request_id, done.attempt)
    state.counters["kv_bytes_moved"] += done.kv_bytes
    if done.fetched_tokens and done.fetch_ms:
        fetch.measured(state.workers[incarnation], done.fetched_tokens, done.fetch_ms)
    state.counters["kv_exposed_us"] += round(1000 * done.transfer_ms)  # what prefill did not hide
    state.release(incarnation, (done.request_id, done.attempt), 0, first=True)
    if (
        request
        and request.prefill_incarnation == incarnation
        and request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER)
    ):
        if request.key not in state.workers[request.decode_incarnation].allocations:
            state.interrupt(request, Interrupt.TRANSFER_FAILED, "its decode worker had let go of it", now)
            return
        breakers = state.pools[request.submit.model].breakers
        breakers.worked((incarnation, request.decode_incarnation))
        breakers.worked((incarnation, NOBODY), request.failed_on)
        state.move(request, Trigger.HANDED_OVER, now)


def kv_pairs(state: State, incarnation: int, event: Received, now: float) -> None:
    assert isinstance(event.message, KvPairs)
    state.workers[incarnation].kv_pairs = event.message.pairs


def kv_held(state: State, incarnation: int, event: Received, now: float) -> None:
    assert isinstance(event.message, KvHeld)
    state.workers[incarnation].kv_held = event.message


def fault_of_progress(state: State, incarnation: int, event: Received) -> str:
    done, admission = event.message, state.workers[incarnation].admission
    assert isinstance(done, DecodeProgress) and admission is not None
    for shared in done.prefixes:
        if not admission.may_share((shared.request_id, shared.attempt), chains(shared.parts)):
            return f"{shared.request_id} shares more blocks than its prompt has"
    return ""


def decode_progress(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, DecodeProgress)
    worker = state.workers[incarnation]
    admission = worker.admission
    assert admission is not None
    for joined in done.joined:
        admission.joined((joined.request_id, joined.attempt), joined.step)
    admission.reached(done.steps)
    worker.steps_done = done.steps
    _time_steps(state, worker, done, now)
    if done.steps:
        state.stepped(incarnation)
    suspects.emitted(state, worker)
    for shared in done.prefixes:
        admission.shares((shared.request_id, shared.attempt), chains(shared.parts))
    charge_decode(state, worker, now)
    was_short, admission.short = admission.short, done.short_blocks > 0 and state.limits.kv_overcommit > 1
    if admission.short:
        relieve(state, worker, done.short_blocks, now)
    elif done.joined or done.prefixes or was_short:
        # A running attempt has a known end, so it counts for less than a pending one, which may join at any time.
        state.pools[worker.hello.model].freed(worker)


def _time_steps(state: State, worker: Worker, done: DecodeProgress, now: float) -> None:
    """Record how long a decode worker's steps took. Steps of a mixed worker are left out, since prompts were computed between
    them."""
    steps, sequences = done.timed_steps, done.timed_sequences
    if not steps <= sequences <= steps * worker.capacity.max_seqs or worker.hello.process or not steps * done.timed_ms:
        return
    pool, means = (
        state.pools[worker.hello.model],
        (sequences / steps, done.timed_kv_tokens / steps, done.timed_ms / steps),
    )
    pool.step_times[Role.DECODE].add(steps, *means, now)
    pool.targets.measured(worker, *means)
    if pool.targets.used and pool.wakeups.closed:
        pool.freed(worker)  # its batch may be larger now


def fault_of_end(state: State, incarnation: int, event: Received) -> str:
    """Returns a fault if a worker releases a running attempt without being asked to."""
    done = event.message
    assert isinstance(done, Finished | Released)
    request = state.current(done.request_id, done.attempt)
    if request is None or request.state not in ON_WORKERS:
        return ""
    is_over = isinstance(done, Finished) and request.state is not RequestState.PLACED
    if incarnation == request.prefill_incarnation and request.state is not RequestState.DECODING and not is_over:
        return f"{done.request_id} is to be computed, and was let go of"
    if incarnation == request.decode_incarnation and request.state is RequestState.DECODING and not is_over:
        return f"{done.request_id} runs, and was let go of"
    return ""


def finished(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, Finished)
    worker = state.workers[incarnation]
    state.release(incarnation, (done.request_id, done.attempt), done.output_tokens)
    worker.tokens_forwarded = done.tokens_forwarded
    state.counters["output_tokens"] += done.output_tokens
    if state.billing.is_open_to(done.request_id):
        # It finished while no coordinator was there to be told, so it was in no registration.
        state.billing.emitted(done.request_id, done.resumed_tokens, done.output_tokens)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.FINISHED, now))
    request = state.current(done.request_id, done.attempt)
    if request is None or incarnation not in (request.prefill_incarnation, request.decode_incarnation):
        return
    if request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER, RequestState.DECODING):
        output_tokens = done.output_tokens + request.submit.resumed_tokens
        state.queues[request.submit.model].learn(request, output_tokens)
        state.count_finished(request, output_tokens)
        state.pools[request.submit.model].traffic.finished(request.id, output_tokens, now)
        pool = state.pools[request.submit.model]
        pool.record_success()
        alone = (NOBODY, incarnation) if worker.is_decode else (incarnation, NOBODY)
        pool.breakers.worked(alone, request.failed_on)
        state.end(request, Trigger.FINISH, "done", now)


def released(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, Released)
    _cut_short(state, incarnation, done)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.CANCELLED, now))


def _cut_short(state: State, incarnation: int, done: Released | WorkFailed) -> None:
    # A decode worker does not count the first tokens, which were emitted before its own.
    first = done.output_tokens > 0 and state.workers[incarnation].is_decode
    state.release(incarnation, (done.request_id, done.attempt), done.output_tokens, first=first)


def work_failed(state: State, incarnation: int, event: Received, now: float) -> None:
    failed = event.message
    assert isinstance(failed, WorkFailed)
    worker = state.workers[incarnation]
    _cut_short(state, incarnation, failed)
    state.counters[f"work_failed_{failed.reason}"] += 1
    request = state.current(failed.request_id, failed.attempt)
    if (
        request is None
        or request.state not in ON_WORKERS
        or incarnation not in (request.prefill_incarnation, request.decode_incarnation)
    ):
        return
    decodes_here = incarnation == request.decode_incarnation
    if incarnation == request.prefill_incarnation and request.state is RequestState.DECODING and not decodes_here:
        return
    _record_failure(state, request, worker, failed.reason, now)
    state.interrupt(request, failed.reason, f"{worker.hello.name}: {failed.message}"[:500], now)


def _record_failure(state: State, request: Request, worker: Worker, reason: Interrupt, now: float) -> None:
    pool = state.pools[request.submit.model]
    if reason is Interrupt.ENGINE_ERROR:
        pool.record_failure(worker)
        alone = (worker.incarnation, NOBODY) if not worker.is_decode else (NOBODY, worker.incarnation)
        request.failed_on = (*request.failed_on[-FAILURES_KEPT:], alone)
        if pool.breakers.failed(alone, request.attempt_progress.placed_at, now):
            state.counters["workers_left_out"] += 1
            state.unbind_without_pair(pool)
    elif reason is Interrupt.TRANSFER_FAILED:
        pair = request.prefill_incarnation, request.decode_incarnation
        if pool.breakers.failed(pair, request.attempt_progress.placed_at, now):
            state.counters["pairs_left_out"] += 1
            state.unbind_without_pair(pool)
