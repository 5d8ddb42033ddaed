"""The spans of a trace. Pure.

The parts of an attempt follow each other without a gap, so that those up to the first token sum to the time that the client
waited. The coordinator's times count from when it read the `Submit`. Here they count from when this gateway sent it, so the
time of that message is part of `deliver`.

    gateway    the request's headers came → it was submitted; within it, `tokenize`
    cold_start → there is a coordinator that has workers; only if it took time
    queue      → its first chunk was ordered
    prefill    → its prompt was computed; within it, a `prefill.chunk` for each order, queued behind others on its worker or not
    deliver    → the client's connection has the first token
    kv_transfer, decode_wait, decode    → its KV is on the decode worker → its second token → its last one, or the interruption
    finish     the last token came → the end of the answer is written
    pause      an interruption → the next attempt was submitted
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.tracing.trace import Trace, TracedAttempt
from proto.messages import AttemptTimes, Waits

FELT_S: Final = 0.001


@dataclass
class Span:
    name: str
    start: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)
    children: list["Span"] = field(default_factory=list)


def root_span(trace: Trace) -> Span:
    info, ended = trace.info, trace.ended_at
    assert ended is not None
    attributes = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "crossdock",
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": info.internal_id,
        "gen_ai.usage.input_tokens": info.prompt_tokens,
        "gen_ai.usage.output_tokens": info.output_tokens,
        "gen_ai.response.finish_reasons": trace.finish_reasons,
        "gen_ai.response.time_to_first_chunk": trace.ttft_s,
        "gen_ai.conversation.id": info.session_id,
        "http.response.status_code": info.status,
        "error.type": info.error,
        "crossdock.tenant": info.tenant,
        "crossdock.attempts": len(trace.attempts),
    }
    root = Span(f"{trace.operation} {trace.model}".strip(), info.started_at, ended, attributes)
    submitted = trace.attempts[0].submitted_at if trace.attempts else ended
    read = trace.opened_at or ended
    read = read if submitted - read > FELT_S else submitted
    gateway = Span("gateway", info.started_at, read)
    if trace.tokenize_at is not None:
        gateway.children.append(Span("tokenize", trace.tokenize_at, read))
    root.children = [gateway, *(span for attempt in trace.attempts for span in _of_attempt(trace, attempt))]
    if submitted > read:
        root.children.append(Span("cold_start", read, submitted))
    tokens_until = max((at for one in trace.attempts for at in (one.last_at, trace.first_sent_at) if at), default=ended)
    if tokens_until < ended:
        root.children.append(Span("finish", tokens_until, ended))
    return root


def _of_attempt(trace: Trace, attempt: TracedAttempt) -> Iterator[Span]:
    assert trace.ended_at is not None
    later = trace.attempts[trace.attempts.index(attempt) + 1 :]
    following = next((a for a in later if _follows(a, attempt)), None)
    end = following.submitted_at if following is not None else trace.ended_at
    start, times = attempt.submitted_at, attempt.times
    common = {"crossdock.request_id": attempt.request_id, "crossdock.attempt": attempt.number}
    if times is None:  # the coordinator was lost
        yield Span("attempt", start, end, common)
        return
    over = min(start + times.ended_ms / 1000, end) if following is not None else end
    for span in _parts(trace, attempt, times, over, following is not None):
        span.attributes |= common
        yield span
    if following is not None:
        yield Span("pause", over, end, common | {"crossdock.outcome": times.outcome})


def _follows(later: TracedAttempt, attempt: TracedAttempt) -> bool:
    return later.request_id == attempt.request_id or later.request_id.startswith(f"{attempt.request_id}.c")


def _parts(trace: Trace, attempt: TracedAttempt, times: AttemptTimes, over: float, interrupted: bool) -> Iterator[Span]:
    """The parts of an attempt that was over at `over`, in order, each from the end of the one before."""
    start, first = attempt.submitted_at, attempt.first_at
    seen = min(over if first is None else first, over)  # nothing before the first token can end later

    def at(ms: float, latest: float) -> float:
        return min(start + ms / 1000, latest) if ms else latest

    began = min(start + times.chunks[0].sent_ms / 1000, seen) if times.chunks else seen  # 0 ms: as it came
    waits = {f"crossdock.wait.{name}_ms": getattr(times.waits, name) for name in Waits.__struct_fields__}
    yield Span("queue", start, began, waits)
    if not times.chunks:
        return
    computed = at(times.computed_ms, seen)
    prefill = Span("prefill", began, computed, {"crossdock.worker": times.prefill})
    prefill.attributes["crossdock.cached_tokens"] = times.cached_tokens
    for chunk in times.chunks:
        sent = min(start + chunk.sent_ms / 1000, computed)
        tokens = {"crossdock.start": chunk.start, "crossdock.tokens": chunk.length}
        prefill.children.append(Span("prefill.chunk", sent, max(at(chunk.done_ms, computed), sent), tokens))
    yield prefill
    if first is None:
        return
    is_first = trace.first_sent_at is not None and attempt is next((a for a in trace.attempts if a.first_at), None)
    delivered = max(trace.first_sent_at, first) if is_first and trace.first_sent_at is not None else first
    yield Span("deliver", computed, delivered)
    if attempt.second_at is None and not interrupted:
        return
    worker, until = {"crossdock.worker": times.decode}, attempt.second_at or over
    moved = max(at(times.handed_over_ms, until), computed)
    yield Span("kv_transfer", computed, moved, worker | {"crossdock.transfer_ms": times.transfer_ms})
    if times.handed_over_ms:
        yield Span("decode_wait", moved, until, dict(worker))
    if attempt.second_at is not None and attempt.last_at is not None:
        yield Span("decode", attempt.second_at, over if interrupted else attempt.last_at, dict(worker))
