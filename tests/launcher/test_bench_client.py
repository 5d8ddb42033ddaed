"""The measuring client: what counts as a gap, and which streams count as failed."""

import asyncio
import json
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from launcher.http.sse_client import BenchFailed, Stream, gaps_between, long_prompt, percentile, stream_completion


def _server(body: bytes, status: int = 200) -> httpx.AsyncClient:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50):
            yield body[start : start + 50]

    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=pieces()))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _complete(body: bytes, status: int = 200) -> Stream:
    async def scene() -> Stream:
        async with _server(body, status) as client:
            return await stream_completion(client, "m", "p", 3)

    return asyncio.run(scene())


TOKENS = b"".join(_event({"choices": [{"text": word}]}) for word in ("a", '"error"', "data: {"))
USAGE = _event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


def test_arrivals_are_tokens_not_the_events_after_them() -> None:
    finish = _event({"choices": [{"text": "", "finish_reason": "length"}]})
    stream = _complete(TOKENS + finish + USAGE + DONE)
    assert len(stream.arrivals) == 3
    assert stream.prompt_tokens == 7


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (TOKENS + USAGE, 200),
        (TOKENS + DONE, 200),
        (TOKENS + _event({"error": {"message": "lost"}}), 200),
        (TOKENS + _event({"error": {"message": "lost"}}) + DONE, 200),
        (b"no", 503),
        (b"", 200),
    ],
)
def test_streams_that_do_not_end_cleanly_fail_the_measurement(body: bytes, status: int) -> None:
    with pytest.raises(BenchFailed):
        _complete(body, status)


def test_gaps_are_within_one_stream_and_within_the_window() -> None:
    first = Stream(0.0, [1.0, 1.5, 2.5, 9.0])
    second = Stream(0.0, [2.0, 2.25])
    assert gaps_between([first, second], 1.2, 3.0) == [1.0, 0.25]
    assert gaps_between([first, second], 20.0, 30.0) == []


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.01) == percentile([3.0], 1.0) == 3.0


def test_long_prompts_have_the_length_asked_for_and_repeat_with_the_seed() -> None:
    for _ in range(50):
        assert 10 <= len(long_prompt(random.Random(), 10, 20).split()) <= 20
    assert long_prompt(random.Random(1), 10, 20) == long_prompt(random.Random(1), 10, 20)
