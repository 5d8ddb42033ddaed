"""Streams of events: an answer counts only if it came to its proper end."""

import asyncio

import pytest

from launcher.http.client import RequestFailed, answers_ready, events, new_session
from tests.launcher.scripted_server import DONE, RESET, STREAM, chat, event, refusal, serving

COMMENT = b": keep-alive\n\n"


def read(*script: bytes) -> str:
    """The text of an answer."""

    async def scene() -> str:
        async with serving([(0.0, data) for data in script]) as server, new_session(server.url) as session:
            text = ""
            async with session.post("/v1/chat/completions", json={}) as response:
                async for one, _ in events(response):
                    text += "".join(choice.delta.content or "" for choice in one.choices or () if choice.delta)
            return text

    return asyncio.run(scene())


def test_events_are_read_up_to_done() -> None:
    """Text of a stream is read up to its done event, past comments."""
    assert read(STREAM, chat("a") + COMMENT, chat("b") + DONE, chat("c")) == "ab"


@pytest.mark.parametrize(
    ("script", "kind", "expected"),
    [
        ([STREAM, chat("a")], "cut_short", "ended without"),
        ([STREAM], "cut_short", "ended without"),
        ([STREAM, chat("a"), event({"error": {"message": "decode worker lost"}})], "error_event", "worker lost"),
        ([STREAM, chat("a"), b"data: {\n\n"], "garbage", "none of OpenAI's"),
        ([refusal(503)], "http_503", "HTTP 503: busy"),
    ],
)
def test_cut_or_failed_stream_raises(script: list[bytes], kind: str, expected: str) -> None:
    """A stream that is cut, garbled or failed raises an error with its kind."""
    with pytest.raises(RequestFailed, match=expected) as failure:
        read(*script)
    assert failure.value.kind == kind


@pytest.mark.parametrize(("answer", "ready"), [(refusal(200), True), (refusal(503), False), (RESET, False)])
def test_only_200_counts_as_ready(answer: bytes, ready: bool) -> None:
    async def scene() -> bool:
        async with serving([(0.0, answer)]) as server, new_session() as session:
            return await answers_ready(session, f"{server.url}/ready")

    assert asyncio.run(scene()) == ready
