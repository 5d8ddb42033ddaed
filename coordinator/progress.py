"""What workers report: steps computed, prompts handed over, attempts that are over."""

from coordinator.events import Received
from coordinator.lifecycle import ON_WORKERS, Trigger
from coordinator.lifecycle import State as Life
from coordinator.state import State
from proto.messages import Finished, HandedOver, Released, StepDone, WorkFailed


def step_done(state: State, epoch: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, StepDone)
    worker = state.workers[epoch]
    if worker.steps.pop(done.step_id, None) is None:
        return
    tokens = sum(chunk.length for chunk in done.computed)
    worker.tokens_forwarded = done.tokens_forwarded
    if tokens and done.step_ms > 0:
        worker.tokens_per_s += 0.2 * (tokens * 1000 / done.step_ms - worker.tokens_per_s)
    for chunk in done.computed:
        request = state.current(chunk.request_id, chunk.attempt)
        if request is None or request.prefill_epoch != epoch:
            continue
        request.computed_tokens += chunk.length
        if request.state is Life.PREFILLING and request.computed_tokens >= request.submit.prompt_tokens:
            state.move(request, Trigger.PROMPT_DONE, now)


def handed_over(state: State, epoch: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, HandedOver)
    state.counters["kv_bytes_moved"] += done.kv_bytes
    state.workers[epoch].let_go((done.request_id, done.attempt))
    request = state.current(done.request_id, done.attempt)
    if request and request.prefill_epoch == epoch and request.state in (Life.PREFILLING, Life.HANDING_OVER):
        state.move(request, Trigger.HANDED_OVER, now)


def finished(state: State, epoch: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, Finished)
    worker = state.workers[epoch]
    worker.let_go((done.request_id, done.attempt))
    worker.tokens_forwarded = done.tokens_forwarded
    state.counters["output_tokens"] += done.output_tokens
    request = state.current(done.request_id, done.attempt)
    if request is None or epoch not in (request.prefill_epoch, request.decode_epoch):
        return
    if request.state in (Life.PREFILLING, Life.HANDING_OVER, Life.DECODING):
        state.end(request, Trigger.FINISH, "done", now)


def released(state: State, epoch: int, event: Received, now: float) -> None:
    done = event.message
    assert isinstance(done, Released)
    state.workers[epoch].let_go((done.request_id, done.attempt))


def work_failed(state: State, epoch: int, event: Received, now: float) -> None:
    failed = event.message
    assert isinstance(failed, WorkFailed)
    worker = state.workers[epoch]
    worker.let_go((failed.request_id, failed.attempt))
    state.counters[f"work_failed_{failed.reason}"] += 1
    request = state.current(failed.request_id, failed.attempt)
    if request is None or request.state not in ON_WORKERS or epoch not in (request.prefill_epoch, request.decode_epoch):
        return
    if epoch == request.prefill_epoch and request.state is Life.DECODING:
        return
    state.interrupt(request, failed.reason, f"{worker.hello.name}: {failed.message}"[:500], now)
