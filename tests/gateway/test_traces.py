"""Traces without a cluster: what is read from clients, and which requests are sent."""

import socket
import time

import pytest
from msgspec import structs

from gateway.http.request_log import RequestInfo
from gateway.tracing.context import TraceContext, read_traceparent
from gateway.tracing.export import CLOSE_WAIT_S, SpanExport
from gateway.tracing.spans import Span, root_span
from gateway.tracing.trace import Trace, TracedAttempt
from gateway.tracing.tracer import Tracer
from proto.messages import AttemptTimes, ChunkTimes, Submit, Waits
from proto.sampling import Sampling

TRACES = 300
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_traceparent_is_read() -> None:
    """A valid traceparent gives its trace, its span and its decision."""
    assert read_traceparent([f"00-{TRACE}-{PARENT}-01"]) == TraceContext(int(TRACE, 16), int(PARENT, 16), True)
    assert read_traceparent([f"00-{TRACE}-{PARENT}-00"]) == TraceContext(int(TRACE, 16), int(PARENT, 16), False)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        [f"00-{TRACE}-{PARENT}-01"] * 2,
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01\n"],
        [f"00-{TRACE}-{PARENT}-01-" + "x" * 60_000],
        [f"00-{TRACE}-{PARENT}"],
    ],
    ids=["none", "empty", "two", "version", "no trace", "no span", "upper case", "line break", "long", "short"],
)
def test_bad_traceparent_is_ignored(values: list[str]) -> None:
    """A traceparent that is not exactly one of the known form counts as none."""
    assert read_traceparent(values) is None


def test_share_of_traces_is_sampled() -> None:
    """About the given share is sampled, unless the client has decided."""
    ids = [n * 0x9E3779B97F4A7C15 for n in range(1, 10_001)]
    assert 50 <= sum(TraceContext(one).is_sampled(0.01) for one in ids) <= 200
    assert TraceContext(ids[0], 1, True).is_sampled(0.0) and not TraceContext(ids[0], 1, False).is_sampled(1.0)


def made(tracer: Tracer, times: AttemptTimes, **info: object) -> None:
    """One request from its beginning to its end."""
    about = RequestInfo(token=times.request_id.removeprefix("r-"), started_at=10.0)
    about.internal_id = times.request_id
    tracer.begin(about, [], "chat")
    tracer.submitted(Submit(times.request_id, times.attempt, "m", 1, Sampling(max_tokens=1)), 10.1)
    for name, value in info.items():
        setattr(about, name, value)
    tracer.times_came(times)
    assert about.on_end is not None
    about.on_end(12.0)


def test_notable_requests_are_always_sent() -> None:
    """Without sampling, only requests are sent that failed, were resumed, or missed their target."""
    sent: list[Span] = []
    tracer = Tracer(0.0, lambda _, root: sent.append(root))
    made(tracer, AttemptTimes("r-fine", 1, target_ms=600.0), status=200, first_token_at=10.5)
    made(tracer, AttemptTimes("r-slow", 1, target_ms=400.0), status=200, first_token_at=10.5)
    made(tracer, AttemptTimes("r-failed", 1), status=503, error="queue_timeout")
    made(tracer, AttemptTimes("r-resumed", 2), status=200, first_token_at=10.5)
    assert [root.attributes["gen_ai.response.id"] for root in sent] == ["r-slow", "r-failed", "r-resumed"]


def test_parts_of_attempts_leave_no_gap() -> None:
    """A request resumed before its first token has contiguous parts over both attempts, from its headers to that token."""
    info = RequestInfo(started_at=1.0, first_token_at=8.0)
    one, two = TracedAttempt("r", 1, 2.0), TracedAttempt("r", 2, 5.0, first_at=8.0, second_at=8.5, last_at=9.0)
    one.times = AttemptTimes("r", 1, "interrupted: prefill_lost", 2500.0, chunks=(ChunkTimes(0, 4, 0.0),))
    chunks = (ChunkTimes(0, 4, 500.0, 1500.0), ChunkTimes(4, 4, 1500.0, 3500.0))
    two.times = AttemptTimes("r", 2, "", 4000.0, computed_ms=3500.0, waits=Waits(500.0), chunks=chunks)
    trace = Trace(TraceContext(1), info, "chat", ended_at=9.5, attempts=[one, two])
    spans = root_span(trace).children
    ttft = [(span.name, span.start, span.end) for span in spans if span.end <= 8.0]
    assert ttft == [
        ("gateway", 1.0, 2.0),
        ("queue", 2.0, 2.0),
        ("prefill", 2.0, 4.5),
        ("pause", 4.5, 5.0),
        ("queue", 5.0, 5.5),
        ("prefill", 5.5, 8.0),
        ("deliver", 8.0, 8.0),
    ]
    assert [(chunk.start, chunk.end) for chunk in spans[5].children] == [(5.5, 6.5), (6.5, 8.0)]


def test_interrupted_answer_has_no_gap() -> None:
    """Where an answer is interrupted after its first or a later token, and where it ends, a part goes on until then."""
    info = RequestInfo(started_at=1.0, first_token_at=3.0)
    attempts = [
        TracedAttempt("r", 1, 2.0, first_at=3.0, last_at=3.0),
        TracedAttempt("r", 2, 5.0, first_at=6.0, second_at=6.5, last_at=7.0),
        TracedAttempt("r", 3, 8.5, first_at=9.0, second_at=9.1, last_at=9.2),
    ]
    for one, ended_ms in zip(attempts, (2000.0, 3000.0, 700.0), strict=True):
        times = AttemptTimes("r", one.number, "", ended_ms, computed_ms=400.0, chunks=(ChunkTimes(0, 4, 0.0, 400.0),))
        one.times = structs.replace(times, handed_over_ms=0.0 if one.number == 1 else 500.0)
    trace = Trace(TraceContext(1), info, "chat", first_sent_at=3.1, ended_at=9.5, attempts=attempts)
    parts = sorted((span.start, span.end, span.name) for span in root_span(trace).children)
    until = 1.0
    for start, end, name in parts:
        assert start <= until, f"a gap before {name}"
        until = max(until, end)
    assert until == 9.5 and parts[-1] == (9.2, 9.5, "finish")
    assert (2.4, 4.0, "kv_transfer") in parts and (6.5, 8.0, "decode") in parts


def test_hanging_collector_delays_nothing() -> None:
    """With a collector that never answers, spans are taken at once, and closing is bounded."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        export = SpanExport(f"http://127.0.0.1:{silent.getsockname()[1]}", "gateway-0")
        root = Span("chat", 1.0, 2.0, children=[Span("queue", 1.0, 1.5)])
        started = time.process_time()
        for number in range(TRACES):
            export.emit(TraceContext(number + 1), root)
        assert time.process_time() - started < 1e-3 * TRACES, "a millisecond each, at most"
        started = time.monotonic()
        export.close()
        assert time.monotonic() - started < CLOSE_WAIT_S + 1.0
