"""The measuring client: what counts as a gap, and which streams count as failed."""

import asyncio
import random
from typing import Any, cast

import pytest
from rich.console import Console

from launcher.bench import serve as serve_bench
from launcher.http.client import RequestFailed, new_session
from launcher.http.streams import (
    TRIES_MAX,
    BenchFailed,
    ClientStream,
    gaps_between,
    long_prompt,
    percentile,
    stream_completion,
)
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant, Ratio
from launcher.models.resolve import ReadyModel
from runtime.settings.serve import options_for
from runtime.settings.workers import WorkerSettings
from tests.launcher.scripted_server import DONE, STREAM, event, refusal, serving, token, usage

TOKENS = b"".join(token(word) for word in ("a", '"error"', "data: {"))
USAGE = usage(7, 3)


def _complete(body: bytes, head: bytes = STREAM) -> ClientStream:
    async def scene() -> ClientStream:
        pieces = [(0.0, body[start : start + 50]) for start in range(0, len(body), 50)]
        async with serving([(0.0, head), *pieces]) as server, new_session(server.url) as session:
            return await stream_completion(session, "m", "p", 3)

    return asyncio.run(scene())


def test_only_tokens_count_as_arrivals() -> None:
    """A stream's arrivals are its tokens, without the finish, usage and done events after them."""
    finish = token("", finish_reason="length")
    stream = _complete(TOKENS + finish + USAGE + DONE)
    assert len(stream.arrivals) == 3
    assert stream.prompt_tokens == 7


@pytest.mark.parametrize(
    ("body", "head"),
    [
        (TOKENS + USAGE, STREAM),
        (TOKENS + DONE, STREAM),
        (TOKENS + event({"error": {"message": "lost"}}), STREAM),
        (TOKENS + event({"error": {"message": "lost"}}) + DONE, STREAM),
        (b"", refusal(503)),
        (b"", STREAM),
    ],
)
def test_unclean_stream_end_fails_measurement(body: bytes, head: bytes) -> None:
    """A stream that does not end cleanly makes the measurement fail."""
    with pytest.raises((BenchFailed, RequestFailed)):
        _complete(body, head)


def test_refused_stream_comes_again_when_told() -> None:
    """A request that is refused for now is sent again, a bounded number of times."""

    async def scene() -> None:
        body = refusal(429, "Retry-After: 0")
        async with serving([(0.0, body)]) as server, new_session(server.url) as session:
            with pytest.raises(RequestFailed, match="busy"):
                await stream_completion(session, "m", "p", 3)
            assert len(server.came) == TRIES_MAX

    asyncio.run(scene())


def test_gaps_stay_within_stream_and_window() -> None:
    """Gaps are measured between tokens of one stream, and within the given window only."""
    first = ClientStream(0.0, [1.0, 1.5, 2.5, 9.0])
    second = ClientStream(0.0, [2.0, 2.25])
    assert gaps_between([first, second], 1.2, 3.0) == [1.0, 0.25]
    assert gaps_between([first, second], 20.0, 30.0) == []


def test_percentiles_are_measured_values() -> None:
    """A percentile is always one of the measured values, never interpolated."""
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.01) == percentile([3.0], 1.0) == 3.0


def test_long_prompts_are_sized_and_repeatable() -> None:
    """A long prompt has a length within the given bounds, and the same seed gives the same prompt."""
    for _ in range(50):
        assert 10 <= len(long_prompt(random.Random(), 10, 20).split()) <= 20
    assert long_prompt(random.Random(1), 10, 20) == long_prompt(random.Random(1), 10, 20)


def test_measured_cluster_has_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that a command starts to measure it computes with the engine that was given to the command."""
    asked: list[Any] = []

    def running(serve: Any, *_: object) -> Any:
        asked.append(serve)
        raise Interrupted

    class Interrupted(Exception):
        pass

    monkeypatch.setattr(serve_bench, "running", running)

    async def measure() -> None:
        load = LoadSettings(engine="vllm", vllm_args="--enforce-eager")
        model = cast(ReadyModel, None)
        async with serve_bench.started(load, Ratio(1, 1), [LoadTenant("default")], model, Console()):
            pass

    with pytest.raises(Interrupted):
        asyncio.run(measure())
    assert options_for(asked[0], WorkerSettings) == {"engine": "vllm", "vllm_args": "--enforce-eager"}
