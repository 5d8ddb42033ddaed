"""The load generator against a server that does exactly what it is told: times, counts, and every way to fail."""

import asyncio
import io
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from launcher.http.client import RequestFailed, new_session
from launcher.load import client as load_client
from launcher.load import run as load_run
from launcher.load.client import LoadTarget, StreamReader
from launcher.load.plan import PlannedRequest
from launcher.load.prompts import Prompts
from launcher.load.records import RequestRecord
from launcher.load.tenants import LoadTenant
from runtime.process import clock
from tests.launcher.scripted_server import (
    DONE,
    HANG,
    RESET,
    STREAM,
    Scripted,
    chat,
    event,
    refusal,
    serving,
    token,
    usage,
)

END = [(0.0, usage(9, 3)), (0.0, DONE)]
TOKENS = [(0.0, token()), (0.0, token()), (0.0, token())]


def planned(index: int = 0, due_s: float = 0.0, **more: Any) -> PlannedRequest:
    return PlannedRequest(index, due_s, LoadTenant("t", "sk-1"), "", 9, 3, **more)


def target(url: str, **more: Any) -> LoadTarget:
    values: dict[str, Any] = {"chat": False, "ignore_eos": True, "token_ids": False, "timeout_s": 5.0, **more}
    return LoadTarget(url=f"{url}/v1/completions", model="m", **values)


def ask(
    script: list[tuple[float, bytes]], one: PlannedRequest | None = None, **more: Any
) -> tuple[RequestRecord, Scripted]:
    """One request, and what became of it."""

    async def scene() -> tuple[RequestRecord, Scripted]:
        async with serving(script) as server, new_session(silence_s=None) as session:
            where, record = target(server.url, **more), RequestRecord(0, "t", 0.0, 9, 3)
            wish = one or planned()
            body = where.body(wish, [1, 2])
            await load_client.send(session, where, wish, body, record, clock.now())
            await asyncio.sleep(0.05)
            return record, server

    return asyncio.run(scene())


def test_recorded_times_match_the_server() -> None:
    """Recorded gaps and TTFT agree with the times at which the server wrote its tokens."""
    gaps = [0.4, 0.15, 0.3, 0.15, 0.3]
    script = [(0.0, STREAM), *[(gap, token()) for gap in gaps], (0.0, usage(9, len(gaps))), (0.0, DONE)]
    record, server = ask(script)
    assert (record.outcome, record.tokens, record.prompt_tokens) == ("ok", len(gaps), 9)
    wrote = server.wrote[1 : 1 + len(gaps)]
    real = [1000 * (later - earlier) for earlier, later in pairwise(wrote)]
    assert median(abs(got - want) for got, want in zip(record.gaps_ms, real, strict=True)) < 75.0
    assert record.ttft_ms is not None
    assert 0 <= record.ttft_ms - 1000 * (wrote[0] - server.came[0]) < 250.0, "with the connection's making"
    assert sum(real) == pytest.approx(record.tpot_ms * (len(gaps) - 1), abs=100.0)  # type: ignore[operator]
    assert server.bodies[0]["max_tokens"] == 3 and server.bodies[0]["ignore_eos"] is True


def test_split_events_are_reassembled() -> None:
    """Events are read the same wherever the chunks of the stream are cut."""
    whole = b": ping\r\n\r\n" + token("ä") + token("") + chat("b") + usage(7, 5, 2) + DONE + b"data: nonsense\n\n"
    for size in (1, 2, 3, 7, 50, 10_000):
        record = RequestRecord(0, "t", 0.0, 9, 3)
        reader = StreamReader(record, 0.0)
        for at, start in enumerate(range(0, len(whole), size)):
            reader.feed(whole[start : start + size], float(at))
        assert reader.done
        assert (record.tokens, record.prompt_tokens, record.cached_tokens, len(record.gaps_ms)) == (5, 7, 2, 1)


def test_chunk_of_tokens_is_one_gap() -> None:
    """Several tokens in one chunk count one by one, but as one gap."""
    record = RequestRecord(0, "t", 0.0, 9, 3)
    reader = StreamReader(record, 10.0)
    reader.feed(token(token_ids=[1]), 11.0)
    reader.feed(token(token_ids=[2, 3, 4]), 11.3)
    reader.feed(token("", token_ids=[5]) + DONE, 11.4)
    assert record.first_s == 1.0
    assert record.gaps_ms == [300.0, 100.0]
    assert record.tokens == 5
    assert record.tpot_ms == pytest.approx(100.0)


def test_empty_last_token_is_no_gap() -> None:
    """A last token without text counts for TPOT, but not as a gap."""
    record = RequestRecord(0, "t", 0.0, 9, 3)
    reader = StreamReader(record, 10.0)
    reader.feed(token() + token(), 11.0)
    reader.feed(token("", finish_reason="length") + usage(9, 3) + DONE, 11.4)
    assert record.gaps_ms == [0.0]
    assert record.tpot_ms == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ([(0.0, refusal(429, "Retry-After: 7"))], "http_429"),
        ([(0.0, refusal(500, body=b"<html>"))], "http_500"),
        ([(0.0, refusal(200))], "garbage"),
        ([(0.0, b"nonsense\r\n\r\n")], "garbage"),
        ([(0.0, STREAM), *TOKENS, (0.0, event({"error": {"message": "lost"}}))], "error_event"),
        ([(0.0, STREAM), *TOKENS, (0.0, b"data: {broken\n\n")], "garbage"),
        ([(0.0, STREAM), *TOKENS, (0.0, event([1, 2]))], "garbage"),
        ([(0.0, STREAM), *TOKENS], "cut_short"),
        ([(0.0, STREAM), *TOKENS, (0.0, RESET)], "disconnect"),
        ([(0.0, RESET)], "disconnect"),
        ([(0.0, STREAM), *END], "empty"),
        ([(0.0, STREAM), *TOKENS, (0.0, HANG)], "timeout"),
        ([(0.0, HANG)], "timeout"),
        ([(0.0, STREAM), *TOKENS, *END], "ok"),
    ],
)
def test_every_outcome_has_its_name(script: list[tuple[float, bytes]], outcome: str) -> None:
    """Each way in which a request can end gets its own outcome."""
    record, _ = ask(script, timeout_s=0.4)
    assert record.outcome == outcome, record.detail
    assert record.ended_s >= record.sent_s
    if outcome == "http_429":
        assert (record.retry_after_s, record.detail) == (7.0, "busy")


def test_refused_connection_is_outcome_connect() -> None:
    """A request to a port without a listener has the outcome connect."""

    async def scene() -> RequestRecord:
        async with new_session(silence_s=None) as session:
            record, where = RequestRecord(0, "t", 0.0, 9, 3), target("http://127.0.0.1:1")
            await load_client.send(session, where, planned(), where.body(planned(), "x"), record, clock.now())
            return record

    assert asyncio.run(scene()).outcome == "connect"


def test_endless_line_is_refused() -> None:
    """A line that does not end is refused beyond a bound."""
    reader = StreamReader(RequestRecord(0, "t", 0.0, 9, 3), 0.0)
    for _ in range(16):
        reader.feed(b"x" * (1 << 16), 1.0)
    with pytest.raises(RequestFailed, match="without end"):
        reader.feed(b"x", 1.0)


def test_cancelled_request_closes_its_connection() -> None:
    """A client that cancels closes its connection; an answer that was complete before is ok."""
    many = [(0.0, STREAM), *[(0.01, token())] * 500]
    record, server = ask(many, planned(cancel_tokens=4))
    assert record.outcome == "cancelled" and 4 <= record.tokens < 100
    assert server.left == 1 or len(server.wrote) < 200
    record, server = ask([(0.0, HANG)], planned(cancel_s=0.1))
    assert record.outcome == "cancelled" and record.first_s is None and server.left == 1
    record, _ = ask([(0.0, STREAM), *TOKENS, *END], planned(cancel_s=3.0, cancel_tokens=3000))
    assert record.outcome == "ok", "it had its answer before it would have left"


def drive(
    server_script: list[tuple[float, bytes]], requests: list[PlannedRequest], in_flight: int, cancel_s: float = 0.0
) -> Any:
    async def scene() -> Any:
        async with serving(server_script) as server, new_session(silence_s=None) as session:
            prompts = Prompts(0, (1, 2, 3), 512, 4)
            console = Console(file=io.StringIO())
            work = load_run.drive(session, target(server.url), requests, prompts, console)
            task = asyncio.get_running_loop().create_task(work)
            if cancel_s:
                await asyncio.sleep(cancel_s)
                task.cancel()
            return await task

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load_run, "IN_FLIGHT_MAX", in_flight)
        return asyncio.run(scene())


def test_requests_are_sent_on_schedule() -> None:
    """Requests are sent when they are due, though none has been answered yet."""
    requests = [planned(index, 0.02 * index) for index in range(20)]
    run = drive([(2.0, STREAM), *TOKENS, *END], requests, 100)
    assert [record.outcome for record in run.records] == ["ok"] * 20
    assert all(record.sent_s >= record.due_s for record in run.records)
    assert max(record.sent_s for record in run.records) < min(record.ended_s for record in run.records)


def test_excess_requests_are_not_sent() -> None:
    """Requests over the limit in flight are not sent, and are recorded as not_sent."""
    run = drive([(0.3, STREAM), *TOKENS, *END], [planned(index) for index in range(10)], 4)
    assert sorted(record.outcome for record in run.records) == ["not_sent"] * 6 + ["ok"] * 4


def test_early_end_keeps_partial_records() -> None:
    """A run that is ended early keeps its records and marks open requests as interrupted."""
    requests = [planned(0, 0.0), planned(1, 0.01), planned(2, 60.0)]
    run = drive([(0.0, STREAM), *TOKENS, (0.0, HANG)], requests, 10, cancel_s=0.5)
    assert run.interrupted
    assert [record.outcome for record in run.records] == ["interrupted"] * 2
    assert all(record.first_s is not None and record.ended_s > 0 for record in run.records)
