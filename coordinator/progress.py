"""Handlers for the reports of workers: steps computed, prompts handed over, attempts ended."""

from coordinator.events import Received, StateChanged
from coordinator.recovery import flips, suspects
from coordinator.state import State
from proto.errors import Interrupt
from proto.messages import CacheEvents, CacheMiss, Chunk, Finished, HandedOver, Released, StepDone, WorkFailed
from proto.progress import DecodeProgress
from proto.status import KvHeld, KvPairs
from scheduler.kv_admission.shared_blocks import chains
from scheduler.lifecycle import ON_WORKERS, RequestState, Trigger
from scheduler.workers.worker import DecodeWorker, PrefillWorker


def fault_of_step(state: State, incarnation: int, event: Received) -> str:
    done = event.message
    assert isinstance(done, StepDone)
    step, _ = state.cluster.workers[incarnation].steps.get(done.step_id, (None, None))
    if step is None or done.computed == step.chunks or _is_part(done.computed, step.chunks):
        return ""
    return f"step {done.step_id} computed what it was not asked for"


def step_done(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, StepDone)
    worker = state.cluster.workers[incarnation]
    ended = state.scheduler.step_done(worker, done, now)
    if ended is None:
        return
    worker.tokens_forwarded = done.tokens_forwarded
    if done.computed:
        worker.steps_done += 1
        state.stepped(incarnation)
    for chunk in done.computed:
        state.billing.computed(chunk.request_id, chunk.attempt, chunk.length)
        request = state.cluster.current(chunk.request_id, chunk.attempt)
        if request is not None and request.prefill_incarnation == incarnation:
            suspects.computed(state, request)
    for request in ended.prompts_done:
        state.counters["prompt_tokens_cached"] += request.cached_tokens
        state.billing.prompt_done(request.id)
        state.out.append(StateChanged(*request.key, RequestState.HANDING_OVER, Trigger.PROMPT_DONE))
        if request.state is RequestState.DECODING:
            state.tell_state(request, Trigger.HANDED_OVER)
            path = worker.allocations[request.key].path
            state.emitted(request.submit.model, path, request.id, request.submit.resumed_tokens, 0, first=True)
    for chunk in ended.asked:
        state.record_usage(state.billing.release(chunk.request_id, now))


def _is_part(computed: tuple[Chunk, ...], asked: tuple[Chunk, ...]) -> bool:
    """Whether the computed chunks are some of those asked for, in the same order."""
    rest = iter(asked)
    return all(any(chunk == other for other in rest) for chunk in computed)


def fault_of_miss(state: State, incarnation: int, event: Received) -> str:
    miss = event.message
    assert isinstance(miss, CacheMiss)
    if miss.cached_tokens % state.cluster.workers[incarnation].capacity.block_size:
        return f"{miss.cached_tokens} cached tokens are no whole number of blocks"
    return ""


def cache_miss(state: State, incarnation: int, event: Received, now: float) -> None:
    """Put back the part of a prompt that was believed cached, but that the worker does not have. It is computed and charged
    after all."""
    miss = event.message
    assert isinstance(miss, CacheMiss)
    worker = state.cluster.workers[incarnation]
    request = state.cluster.current(miss.request_id, miss.attempt)
    if (
        request is None
        or request.prefill_incarnation != incarnation
        or request.state not in (RequestState.PLACED, RequestState.PREFILLING)
    ):
        return
    if miss.cached_tokens >= request.cached_tokens:
        return
    state.counters["cache_misses"] += 1
    state.counters["fetches_failed"] += miss.fetch_failed
    state.scheduler.cache_miss(worker, request, miss, now)


def cache_events(state: State, incarnation: int, event: Received, now: float) -> None:
    report = event.message
    assert isinstance(report, CacheEvents)
    model = state.cluster.workers[incarnation].hello.model
    state.cluster.pools[model].locality.learn(incarnation, report.inserted, report.evicted)
    if state.keeping:
        flips.cache_told(state, incarnation)


def fault_of_hand_over(state: State, incarnation: int, event: Received) -> str:
    done = event.message
    assert isinstance(done, HandedOver)
    request = state.cluster.current(done.request_id, done.attempt)
    if request is not None and request.prefill_incarnation == incarnation and request.entry is not None:
        return f"{done.request_id} is handed over before it is computed"
    return ""


def handed_over(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, HandedOver)
    request = state.cluster.current(done.request_id, done.attempt)
    state.counters["kv_bytes_moved"] += done.kv_bytes
    worker = state.cluster.workers[incarnation]
    if done.fetched_tokens and done.fetch_ms and isinstance(worker, PrefillWorker):
        worker.measure_fetch(done.fetched_tokens, done.fetch_ms)
    state.counters["kv_exposed_us"] += round(1000 * done.transfer_ms)  # what prefill did not hide
    state.release(incarnation, (done.request_id, done.attempt), 0, first=True)
    if (
        request
        and request.prefill_incarnation == incarnation
        and request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER)
    ):
        if request.key not in state.cluster.workers[request.decode_incarnation].allocations:
            state.interrupt(request, Interrupt.TRANSFER_FAILED, "its decode worker had let go of it", now)
            return
        state.scheduler.handed_over(request, done.transfer_ms, now)
        state.tell_state(request, Trigger.HANDED_OVER)


def kv_pairs(state: State, incarnation: int, event: Received, now: float) -> None:
    assert isinstance(event.message, KvPairs)
    state.cluster.workers[incarnation].kv_pairs = event.message.pairs


def kv_held(state: State, incarnation: int, event: Received, now: float) -> None:
    assert isinstance(event.message, KvHeld)
    state.cluster.workers[incarnation].kv_held = event.message


def fault_of_progress(state: State, incarnation: int, event: Received) -> str:
    done, worker = event.message, state.cluster.workers[incarnation]
    assert isinstance(done, DecodeProgress) and isinstance(worker, DecodeWorker)
    for shared in done.prefixes:
        if not worker.admission.may_share((shared.request_id, shared.attempt), chains(shared.parts)):
            return f"{shared.request_id} shares more blocks than its prompt has"
    return ""


def decode_progress(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    worker = state.cluster.workers[incarnation]
    assert isinstance(done, DecodeProgress) and isinstance(worker, DecodeWorker)
    if done.steps:
        state.stepped(incarnation)
    state.scheduler.progress(worker, done, now)
    suspects.emitted(state, worker)
    state.carry_out(state.scheduler.take_decisions())


def fault_of_end(state: State, incarnation: int, event: Received) -> str:
    """Returns a fault if a worker releases a running attempt without being asked to."""
    done = event.message
    assert isinstance(done, Finished | Released)
    request = state.cluster.current(done.request_id, done.attempt)
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
    worker = state.cluster.workers[incarnation]
    state.release(incarnation, (done.request_id, done.attempt), done.output_tokens)
    worker.tokens_forwarded = done.tokens_forwarded
    state.counters["output_tokens"] += done.output_tokens
    if state.billing.is_open_to(done.request_id):
        # It finished while no coordinator was there to be told, so it was in no registration.
        state.billing.emitted(done.request_id, done.resumed_tokens, done.output_tokens)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.FINISHED, now))
    request = state.cluster.current(done.request_id, done.attempt)
    if request is None or incarnation not in (request.prefill_incarnation, request.decode_incarnation):
        return
    if request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER, RequestState.DECODING):
        output_tokens = done.output_tokens + request.submit.resumed_tokens
        state.scheduler.finished(request, worker, output_tokens, now)
        state.count_finished(request, output_tokens)
        state.end(request, Trigger.FINISH, "done", now)


def released(state: State, incarnation: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, Released)
    _cut_short(state, incarnation, done)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.CANCELLED, now))


def _cut_short(state: State, incarnation: int, done: Released | WorkFailed) -> None:
    # A decode worker does not count the first tokens, which were emitted before its own.
    first = done.output_tokens > 0 and state.cluster.workers[incarnation].is_decode
    state.release(incarnation, (done.request_id, done.attempt), done.output_tokens, first=first)


def work_failed(state: State, incarnation: int, event: Received, now: float) -> None:
    failed = event.message
    assert isinstance(failed, WorkFailed)
    worker = state.cluster.workers[incarnation]
    _cut_short(state, incarnation, failed)
    state.counters[f"work_failed_{failed.reason}"] += 1
    request = state.cluster.current(failed.request_id, failed.attempt)
    if (
        request is None
        or request.state not in ON_WORKERS
        or incarnation not in (request.prefill_incarnation, request.decode_incarnation)
    ):
        return
    decodes_here = incarnation == request.decode_incarnation
    if incarnation == request.prefill_incarnation and request.state is RequestState.DECODING and not decodes_here:
        return
    left_out = state.scheduler.failed(request, worker, failed.reason, now)
    if left_out:
        state.counters[f"{left_out}_left_out"] += 1
    state.interrupt(request, failed.reason, f"{worker.hello.name}: {failed.message}"[:500], now)
