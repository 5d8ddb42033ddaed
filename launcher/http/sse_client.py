"""The measuring client: streams completions and notes when each token arrives. It does as little else as it can."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

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
_EVENT = b"\ndata: {"


class BenchFailed(CrossdockError):
    """The server did not do what the measurement needs."""


@dataclass
class Stream:
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
    client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, into: Stream | None = None
) -> Stream:
    """One completion with exactly `max_tokens` tokens; arrivals are noted as they come, also if it is cancelled midway.

    Raises `BenchFailed` on anything but a clean end.
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
    stream = into or Stream(0.0)
    stream.sent_at = clock.now()
    last = b"\n"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchFailed(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for data in response.aiter_raw():
            now = clock.now()
            # Nothing is parsed here but the number of events; the one with usage alone is no token and comes off below.
            # An event's mark may be cut by the end of a read: the next one begins with the bytes that could be its part.
            stream.arrivals += [now] * (last[1 - len(_EVENT) :] + data).count(_EVENT)
            last = (last + data)[-4096:]
    stream.ended_at = clock.now()
    if b"data: [DONE]" not in last or b'"error"' in last:
        raise BenchFailed(f"a stream did not end cleanly: {last[-300:].decode('utf-8', 'replace')}")
    return _settle(stream, last)


def _settle(stream: Stream, last: bytes) -> Stream:
    """Take the final events apart: usage is read, and events that carried no token are dropped from the arrivals."""
    for part in reversed(last.split(b"data: ")):
        try:
            event = json.loads(part.split(b"\n", 1)[0])
        except ValueError:
            continue
        usage = event.get("usage")
        if usage:
            stream.prompt_tokens = usage["prompt_tokens"]
            extra = len(stream.arrivals) - usage["completion_tokens"]
            if extra > 0:
                del stream.arrivals[-extra:]
            return stream
    raise BenchFailed("the server sent no usage, though stream_options asked for it")


def gaps_between(streams: Sequence[Stream], start: float, end: float) -> list[float]:
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

    def __init__(self, client: httpx.AsyncClient, model: str, count: int, tokens: int) -> None:
        self.finished: list[Stream] = []
        self._open: dict[int, Stream] = {}
        self._tasks = [
            asyncio.get_running_loop().create_task(self._run(client, model, index, tokens)) for index in range(count)
        ]

    @property
    def streams(self) -> list[Stream]:
        return [*self.finished, *self._open.values()]

    @property
    def tokens(self) -> int:
        return sum(len(stream.arrivals) for stream in self.streams)

    async def run_for(self, seconds: float) -> None:
        """Let them run. Raises what a stream failed with."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, client: httpx.AsyncClient, model: str, index: int, tokens: int) -> None:
        turn = 0
        while True:
            # Staggered lengths keep the streams from ending, and starting, all at once.
            length = tokens if turn else max(8, tokens * (index + 1) // len(self._tasks))
            stream = self._open[index] = Stream(0.0)
            prompt = f"Story number {index}.{turn}: once upon a time"
            await stream_completion(client, model, prompt, length, into=stream)
            self.finished.append(self._open.pop(index))
            turn += 1
