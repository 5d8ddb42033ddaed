"""Gathers the traces of a gateway's requests, and sends those that are sampled or notable."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from gateway.http.request_log import RequestInfo
from gateway.tracing.context import TraceContext, read_traceparent
from gateway.tracing.spans import Span, root_span
from gateway.tracing.trace import Trace, TracedAttempt
from proto.messages import AttemptTimes, Rejected, Submit
from runtime.process import clock

TIMES_WAIT_S: Final = 2.0  # how long an ended trace waits for the coordinator's times


class Tracer:
    """Used on the event loop's thread."""

    def __init__(self, share: float, emit: Callable[[TraceContext, Span], None]) -> None:
        """`share`: of the traces, sampled whatever becomes of the request."""
        self._share, self._emit = share, emit
        self._traces: dict[str, Trace] = {}  # by the request's internal id

    def begin(self, info: RequestInfo, traceparents: Sequence[str], operation: str) -> Trace:
        context = read_traceparent(traceparents) or TraceContext(secrets.randbits(128) or 1)
        trace = self._traces[info.internal_id] = Trace(context, info, operation)
        info.trace_id = f"{context.trace_id:032x}"
        info.on_sent = trace.first_token_sent
        info.on_end = lambda now: self._ended(trace, now)
        return trace

    def opened(self, stream_id: str, now: float) -> None:
        trace = self._of(stream_id)
        if trace is not None:
            trace.opened_at = now

    def submitted(self, submit: Submit, now: float) -> None:
        """A message of a traced stream was sent: a new attempt, or a question about one."""
        trace = self._of(submit.request_id)
        if trace is None:
            return
        attempt = trace.attempt(submit.request_id, submit.attempt)
        if attempt is None:
            trace.attempts.append(TracedAttempt(submit.request_id, submit.attempt, now))
            trace.model = submit.model
        elif attempt.rejected:
            attempt.submitted_at, attempt.rejected = now, False

    def rejected(self, rejected: Rejected) -> None:
        trace = self._of(rejected.request_id)
        attempt = trace.attempt(rejected.request_id, rejected.attempt) if trace is not None else None
        if attempt is not None:
            attempt.rejected = True

    def delivered(self, stream_id: str, choice: int, finish: str | None, now: float) -> None:
        trace = self._of(stream_id)
        if trace is None:
            return
        attempt = trace.latest(f"{stream_id}.c{choice}") or trace.latest(stream_id)
        if attempt is not None:
            attempt.delivered(now)
        if finish is not None:
            trace.finish_reasons.append(finish)

    def times_came(self, times: AttemptTimes) -> None:
        trace = self._of(times.request_id)
        attempt = trace.attempt(times.request_id, times.attempt) if trace is not None else None
        if trace is not None and attempt is not None:
            attempt.times = times
            if trace.ended_at is not None and trace.complete:
                self._finish(trace)

    def _of(self, request_id: str) -> Trace | None:
        """Ids of prompts and choices begin with their request's."""
        return self._traces.get(request_id.partition(".")[0])

    def _ended(self, trace: Trace, now: float) -> None:
        trace.ended_at = now
        if trace.complete:
            self._finish(trace)
        else:
            asyncio.get_running_loop().call_later(TIMES_WAIT_S, self._finish, trace)

    def _finish(self, trace: Trace) -> None:
        if self._traces.pop(trace.info.internal_id, None) is None:
            return
        if trace.context.is_sampled(self._share) or trace.notable:
            self._emit(trace.context, root_span(trace))

    def flush(self) -> None:
        """Finish what waits for the coordinator's times. Requests that have not ended are left out."""
        for trace in list(self._traces.values()):
            if trace.ended_at is not None:
                self._finish(trace)


def seconds_to_unix_ns() -> Callable[[float], int]:
    """Converts monotonic seconds, as the wall clock is now."""
    offset_ns = round(1e9 * (clock.unix_time() - clock.now()))
    return lambda seconds: offset_ns + round(1e9 * seconds)
