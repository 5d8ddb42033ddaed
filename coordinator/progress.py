"""Handlers for the reports of workers: steps computed, prompts handed over, attempts ended."""

from coordinator.events import StateChanged
from coordinator.recovery import flips, suspects
from coordinator.state import State
from proto.errors import Interrupt
from proto.messages import CacheEvents, CacheMiss, Chunk, Finished, HandedOver, Released, StepDone, WorkFailed
from proto.progress import DecodeProgress
from proto.status import KvHeld, KvPairs
from scheduler.kv_admission.shared_blocks import chains
from scheduler.lifecycle import ON_WORKERS, RequestState, Trigger
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

# --- prompts ----------------------------------------------------------------------------------------------------------


def fault_of_step(state: State, worker: Worker, done: StepDone) -> str:
    step, _ = worker.steps.get(done.step_id, (None, None))
    if step is None or done.computed == step.chunks or _is_part(done.computed, step.chunks):
        return ""
    return f"step {done.step_id} computed what it was not asked for"


def _is_part(computed: tuple[Chunk, ...], asked: tuple[Chunk, ...]) -> bool:
    """Whether the computed chunks are some of those asked for, in the same order."""
    rest = iter(asked)
    return all(any(chunk == other for other in rest) for chunk in computed)


def on_step_done(state: State, worker: Worker, done: StepDone) -> None:
    ended = state.scheduler.step_done(worker, done, state.now)
    if ended is None:
        return
    worker.tokens_forwarded = done.tokens_forwarded
    if done.computed:
        worker.steps_done += 1
        state.members.confirm_flip(worker.incarnation, state.now)
    for chunk in done.computed:
        state.billing.computed(chunk.request_id, chunk.attempt, chunk.length)
        request = state.cluster.current(chunk.request_id, chunk.attempt)
        if request is not None and request.prefill_incarnation == worker.incarnation:
            suspects.clear_computed(state, request)
    for request in ended.prompts_done:
        state.counters["prompt_tokens_cached"] += request.cached_tokens
        state.billing.prompt_done(request.id)
        state.out.append(StateChanged(*request.key, RequestState.HANDING_OVER, Trigger.PROMPT_DONE))
        if request.state is RequestState.DECODING:
            state.note_state(request, Trigger.HANDED_OVER)
            path = worker.allocations[request.key].path
            submit = request.submit
            state.accounts.emitted(submit.model, path, request.id, submit.resumed_tokens, 0, first=True)
    for chunk in ended.asked:
        state.record_usage(state.billing.release(chunk.request_id, state.now))


def fault_of_miss(state: State, worker: Worker, miss: CacheMiss) -> str:
    if miss.cached_tokens % worker.capacity.block_size:
        return f"{miss.cached_tokens} cached tokens are no whole number of blocks"
    return ""


def on_cache_miss(state: State, worker: Worker, miss: CacheMiss) -> None:
    """Put back the part of a prompt that was believed cached, but that the worker does not have. It is computed and charged
    after all."""
    request = state.cluster.current(miss.request_id, miss.attempt)
    if request is None or request.prefill_incarnation != worker.incarnation:
        return
    is_early = request.state in (RequestState.PLACED, RequestState.PREFILLING)
    if is_early and miss.cached_tokens < request.cached_tokens:
        state.counters["cache_misses"] += 1
        state.counters["fetches_failed"] += miss.fetch_failed
        state.scheduler.cache_miss(worker, request, miss, state.now)


def on_cache_events(state: State, worker: Worker, report: CacheEvents) -> None:
    state.cluster.pools[worker.hello.model].locality.learn(worker.incarnation, report.inserted, report.evicted)
    if state.members.keeping:
        flips.cache_reported(state, worker.incarnation)


def fault_of_hand_over(state: State, worker: Worker, done: HandedOver) -> str:
    request = state.cluster.current(done.request_id, done.attempt)
    if request is not None and request.prefill_incarnation == worker.incarnation and request.entry is not None:
        return f"{done.request_id} is handed over before it is computed"
    return ""


def on_handed_over(state: State, worker: Worker, done: HandedOver) -> None:
    request = state.cluster.current(done.request_id, done.attempt)
    state.counters["kv_bytes_moved"] += done.kv_bytes
    if done.fetched_tokens and done.fetch_ms and isinstance(worker, PrefillWorker):
        worker.measure_fetch(done.fetched_tokens, done.fetch_ms)
    state.counters["kv_exposed_us"] += round(1000 * done.transfer_ms)  # what prefill did not hide
    state.release(worker.incarnation, (done.request_id, done.attempt), 0, first=True)
    if (
        request
        and request.prefill_incarnation == worker.incarnation
        and request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER)
    ):
        if request.key not in state.cluster.workers[request.decode_incarnation].allocations:
            state.interrupt(request, Interrupt.TRANSFER_FAILED, "its decode worker had let go of it")
            return
        state.scheduler.handed_over(request, done.transfer_ms, state.now)
        state.note_state(request, Trigger.HANDED_OVER)


def on_kv_pairs(state: State, worker: Worker, report: KvPairs) -> None:
    worker.kv_pairs = report.pairs


def on_kv_held(state: State, worker: Worker, report: KvHeld) -> None:
    worker.kv_held = report


# --- answers ----------------------------------------------------------------------------------------------------------


def fault_of_progress(state: State, worker: DecodeWorker, done: DecodeProgress) -> str:
    for shared in done.prefixes:
        if not worker.admission.may_share((shared.request_id, shared.attempt), chains(shared.parts)):
            return f"{shared.request_id} shares more blocks than its prompt has"
    return ""


def on_decode_progress(state: State, worker: DecodeWorker, done: DecodeProgress) -> None:
    if done.steps:
        state.members.confirm_flip(worker.incarnation, state.now)
    state.scheduler.progress(worker, done, state.now)
    suspects.clear_emitted(state, worker)
    state.carry_out(state.scheduler.take_decisions())


def fault_of_end(state: State, worker: Worker, done: Finished | Released) -> str:
    """Returns a fault if a worker releases a running attempt without being asked to."""
    request = state.cluster.current(done.request_id, done.attempt)
    if request is None or request.state not in ON_WORKERS:
        return ""
    is_over = isinstance(done, Finished) and request.state is not RequestState.PLACED
    is_decoding = request.state is RequestState.DECODING
    if worker.incarnation == request.prefill_incarnation and not is_decoding and not is_over:
        return f"{done.request_id} is to be computed, and was let go of"
    if worker.incarnation == request.decode_incarnation and is_decoding and not is_over:
        return f"{done.request_id} runs, and was let go of"
    return ""


def on_finished(state: State, worker: Worker, done: Finished) -> None:
    state.release(worker.incarnation, (done.request_id, done.attempt), done.output_tokens)
    worker.tokens_forwarded = done.tokens_forwarded
    state.counters["output_tokens"] += done.output_tokens
    if state.billing.is_open_to(done.request_id):
        # It finished while no coordinator was there to be told, so it was in no registration.
        state.billing.emitted(done.request_id, done.resumed_tokens, done.output_tokens)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.FINISHED, state.now))
    request = state.cluster.current(done.request_id, done.attempt)
    if request is None or worker.incarnation not in (request.prefill_incarnation, request.decode_incarnation):
        return
    if request.state in (RequestState.PREFILLING, RequestState.HANDING_OVER, RequestState.DECODING):
        output_tokens = done.output_tokens + request.submit.resumed_tokens
        state.scheduler.finished(request, worker, output_tokens, state.now)
        state.accounts.count_finished(request, output_tokens, state.now)
        state.end(request, Trigger.FINISH, "done")


def on_released(state: State, worker: Worker, done: Released) -> None:
    _release_unfinished(state, worker, done)
    state.record_usage(state.billing.end_orphan(done.request_id, RequestState.CANCELLED, state.now))


def _release_unfinished(state: State, worker: Worker, done: Released | WorkFailed) -> None:
    # A decode worker does not count the first tokens, which were emitted before its own.
    first = done.output_tokens > 0 and worker.is_decode
    state.release(worker.incarnation, (done.request_id, done.attempt), done.output_tokens, first=first)


def on_work_failed(state: State, worker: Worker, failed: WorkFailed) -> None:
    _release_unfinished(state, worker, failed)
    state.counters[f"work_failed_{failed.reason}"] += 1
    request = state.cluster.current(failed.request_id, failed.attempt)
    if request is None or request.state not in ON_WORKERS:
        return
    computes = worker.incarnation == request.prefill_incarnation and request.state is not RequestState.DECODING
    if computes or worker.incarnation == request.decode_incarnation:
        left_out = state.scheduler.failed(request, worker, failed.reason, state.now)
        if left_out:
            state.counters[f"{left_out}_left_out"] += 1
        state.interrupt(request, failed.reason, f"{worker.hello.name}: {failed.message}"[:500])
