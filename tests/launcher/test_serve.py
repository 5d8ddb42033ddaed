"""The first question: its answer counts only if the stream came to its proper end."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from launcher.local.serve import AnswerFailed, sse_events


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _read(body: str) -> list[dict[str, Any]]:
    async def scene() -> list[dict[str, Any]]:
        return [event async for event in sse_events(httpx.Response(200, content=body.encode()))]

    return asyncio.run(scene())


def test_events_up_to_done() -> None:
    assert _read(_event({"a": 1}) + ": comment\n\n" + _event({"a": 2}) + "data: [DONE]\n\n") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (_event({"a": 1}), "ended before"),
        ("", "ended before"),
        (_event({"a": 1}) + _event({"error": {"message": "decode worker lost"}}), "decode worker lost"),
    ],
)
def test_cut_or_failed_streams_are_failures(body: str, expected: str) -> None:
    with pytest.raises(AnswerFailed, match=expected):
        _read(body)
