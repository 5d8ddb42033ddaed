"""The streams of benchmarks: completions, with the time at which each token arrived."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from launcher.http.client import events, retry_after_s
from proto.errors import CrossdockError
from runtime.process import clock

WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city name team minute idea body back parent face
    others level office door health person art war history party result change morning reason research girl
    guy moment air teacher force education
    """.split()
)


TRIES_MAX = 10


class BenchFailed(CrossdockError):
    """The server did not do what the measurement needs."""


@dataclass
class ClientStream:
    """Arrivals of one request, in monotonic seconds."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    ended_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent_at


def long_prompt(source: random.Random, words_min: int, words_max: int) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(words_min, words_max)))


async def stream_completion(
    session: aiohttp.ClientSession, model: str, prompt: str, max_tokens: int, into: ClientStream | None = None
) -> ClientStream:
    """Requests one completion with exactly `max_tokens` tokens. Arrivals are noted as they come, so they are there even if it
    is cancelled midway. A request that is refused for now comes again when told, and its wait counts. Raises
    `RequestFailed` unless the stream ends cleanly, and `BenchFailed` if the usage is missing.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = into or ClientStream(0.0)
    stream.sent_at = clock.now()
    usage = None
    for tries_left in reversed(range(TRIES_MAX)):
        async with session.post("/v1/completions", json=body) as response:
            wait_s = retry_after_s(response) if response.status in {429, 503} and tries_left else None
            if wait_s is None:
                async for event, now in events(response):
                    if event.choices:
                        stream.arrivals.append(now)
                    usage = event.usage or usage
                break
        await asyncio.sleep(wait_s)
    stream.ended_at = clock.now()
    if usage is None:
        raise BenchFailed("the server sent no usage, though stream_options asked for it")
    stream.prompt_tokens = usage.prompt_tokens
    del stream.arrivals[usage.completion_tokens :]  # an event with the finish reason alone is no token
    return stream


def gaps_between(streams: Sequence[ClientStream], start: float, end: float) -> list[float]:
    """Gaps in seconds within each stream, both ends inside [start, end]."""
    found = []
    for stream in streams:
        inside = [at for at in stream.arrivals if start <= at <= end]
        found += [later - earlier for earlier, later in pairwise(inside)]
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: a value that was measured, never one in between."""
    assert values and 0.0 < share <= 1.0
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 10_000) * len(ordered) // 10_000) - 1)]


class SteadyStreams:
    """Keeps `count` streams running, each started again when it ends, until `close`."""

    def __init__(self, session: aiohttp.ClientSession, model: str, count: int, tokens: int) -> None:
        self.finished: list[ClientStream] = []
        self._open: dict[int, ClientStream] = {}
        self._tasks = [
            asyncio.get_running_loop().create_task(self._run(session, model, index, tokens)) for index in range(count)
        ]

    @property
    def streams(self) -> list[ClientStream]:
        return [*self.finished, *self._open.values()]

    @property
    def tokens(self) -> int:
        return sum(len(stream.arrivals) for stream in self.streams)

    async def run_for(self, seconds: float) -> None:
        """Lets the streams run for this time. Raises the error of a stream that failed."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, session: aiohttp.ClientSession, model: str, index: int, tokens: int) -> None:
        turn = 0
        while True:
            # Different lengths keep the streams from starting and ending all at once.
            length = tokens if turn else max(8, tokens * (index + 1) // len(self._tasks))
            stream = self._open[index] = ClientStream(0.0)
            prompt = f"Story number {index}.{turn}: once upon a time"
            await stream_completion(session, model, prompt, length, into=stream)
            self.finished.append(self._open.pop(index))
            turn += 1
