"""`crossdock bench isolation`: inter-token gaps at the client, alone and under long prompts.

The figure is that of the disaggregation papers (DistServe, Zhong et al. 2024; Splitwise, Patel et al. 2024): the
latency between tokens of running streams, as its distribution, with and without prompts arriving.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher import reports, tables
from launcher.bench.serve import READY_TIMEOUT_S
from launcher.bench.settings import IsolationSettings
from launcher.http.client import new_session
from launcher.http.streams import (
    BenchFailed,
    ClientStream,
    SteadyStreams,
    gaps_between,
    long_prompt,
    percentile,
    stream_completion,
)
from launcher.load import plot
from launcher.local.lifetime import running, until_interrupted
from launcher.models import resolve
from runtime.process import clock
from runtime.settings.serve import ServeSettings

PREFILL_ALONE_PROMPTS = 5
LONG_PROMPT_TOKENS = 2  # of answer: decode computes the second one, so the KV really moves
BATCHES = (1, 8, 16)
STREAM_TOKENS = 384  # of each steady stream, after which it starts again
WARMUP_S = 3.0
PROMPT_WORDS = (1000, 1500)  # of the shortest and the longest long prompt, about one token each
PROMPTS_AT_ONCE = 1
FIRST_TOKENS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Window:
    """One measured span of steady streams."""

    gaps_s: list[float]
    tokens_per_s: float
    seconds: float


def run(settings: IsolationSettings) -> int:
    plot.check(settings.plot)
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: IsolationSettings, console: Console) -> int:
    try:
        async with _server(settings, console) as client:
            model = await _model_id(client)
            result = await _measure(client, model, settings, console)
    except aiohttp.ClientError as error:
        raise BenchFailed(f"the server cannot be reached: {error or type(error).__name__}") from None
    result["settings"] = settings.model_dump(exclude={"api_key", "plot"})
    show_isolation(result, console)
    reports.write_json(settings, result)
    if settings.plot:
        plot.draw_isolation(settings.plot, result)
    return 0


@contextlib.asynccontextmanager
async def _server(settings: IsolationSettings, console: Console) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a client of the named server, or of a cluster that runs during the measurement."""
    if settings.url:
        base_url = settings.url.rstrip("/").removesuffix("/v1")
        async with new_session(base_url, settings.api_key) as client:
            yield client
        return
    model = resolve.ready(settings.model, "", console)
    serve = ServeSettings(port=0, prefill=settings.prefill, decode=settings.decode, ready_timeout_s=READY_TIMEOUT_S)
    async with running(serve, model, console) as up:
        if up.cluster.plan.control:
            # The client must not take time from the streams it measures.
            os.sched_setaffinity(0, up.cluster.plan.control)
        yield up.client


async def _model_id(client: aiohttp.ClientSession) -> str:
    async with client.get("/v1/models") as response:
        if response.status != 200:
            raise BenchFailed(f"GET /v1/models: HTTP {response.status}")
        return str((await response.json())["data"][0]["id"])


async def _measure(
    client: aiohttp.ClientSession, model: str, settings: IsolationSettings, console: Console
) -> dict[str, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    result: dict[str, Any] = {"model": model}
    source = random.Random(0)
    with Progress(*columns, console=console) as progress:
        await stream_completion(client, model, "Once upon a time", 8)
        result["prefill"] = await _prefill_alone(client, model, source, progress)
        result["throughput"] = {}
        for count in BATCHES:
            steady = SteadyStreams(client, model, count, STREAM_TOKENS)
            try:
                what = f"{count} stream{'s' if count > 1 else ''}"
                window = await _watch(steady, WARMUP_S, settings.seconds / 2, what, progress)
            finally:
                await steady.close()
            result["throughput"][str(count)] = window.tokens_per_s
        result |= await _isolation(client, model, settings, source, progress)
    return result


async def _isolation(
    client: aiohttp.ClientSession, model: str, settings: IsolationSettings, source: random.Random, progress: Progress
) -> dict[str, Any]:
    steady = SteadyStreams(client, model, settings.streams, STREAM_TOKENS)
    arriving = LongPrompts(client, model, source)
    try:
        what = f"{settings.streams} streams alone"
        alone = await _watch(steady, WARMUP_S, settings.seconds, what, progress)
        arriving.start()
        what = f"{settings.streams} streams and long prompts"
        loaded = await _watch(steady, WARMUP_S, settings.seconds, what, progress)
        arriving.check()
    finally:
        await arriving.close()
        await steady.close()
    if not alone.gaps_s or not loaded.gaps_s:
        raise BenchFailed("no gap was measured: --seconds is too short for this model")
    if not arriving.finished:
        raise BenchFailed("no long prompt was finished in time: take more --seconds or shorter prompts")
    return {
        "alone": window_figures(alone.gaps_s, alone.tokens_per_s),
        "loaded": window_figures(loaded.gaps_s, loaded.tokens_per_s),
        "long_prompts": prompt_figures(arriving.finished),
    }


async def _watch(steady: SteadyStreams, warmup_s: float, seconds: float, what: str, progress: Progress) -> Window:
    """Waits until all streams deliver and the warm-up has passed, then measures."""
    task = progress.add_task(f"{what}: warming up", total=None)
    async with asyncio.timeout(FIRST_TOKENS_TIMEOUT_S):
        while not all(stream.arrivals for stream in steady.streams):
            await steady.run_for(0.2)
    await steady.run_for(warmup_s)
    progress.update(task, description=what, total=seconds)
    start = clock.now()
    while (elapsed := clock.now() - start) < seconds:
        progress.update(task, completed=elapsed)
        await steady.run_for(min(1.0, seconds - elapsed))
    progress.update(task, completed=seconds)
    end = clock.now()
    streams = steady.streams
    tokens = sum(1 for stream in streams for at in stream.arrivals if start <= at <= end)
    return Window(gaps_between(streams, start, end), tokens / (end - start), end - start)


async def _prefill_alone(
    client: aiohttp.ClientSession, model: str, source: random.Random, progress: Progress
) -> dict[str, float]:
    """Long prompts one after the other on an idle server."""
    done: list[ClientStream] = []
    for _ in progress.track(range(PREFILL_ALONE_PROMPTS), description="long prompts alone"):
        prompt = long_prompt(source, *PROMPT_WORDS)
        done.append(await stream_completion(client, model, prompt, 1))
    seconds = sum(stream.ttft_s for stream in done)
    return {"tokens_per_s": sum(stream.prompt_tokens for stream in done) / seconds, "ttft_s": seconds / len(done)}


class LongPrompts:
    """Sends long prompts back to back, `PROMPTS_AT_ONCE` at a time; each follows the answer to the one before it."""

    def __init__(self, client: aiohttp.ClientSession, model: str, source: random.Random) -> None:
        self.finished: list[ClientStream] = []
        self._client, self._model, self._source = client, model, source
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()) for _ in range(PROMPTS_AT_ONCE)]

    def check(self) -> None:
        """Raises the error of a prompt that failed: figures without the load would look too good."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            prompt = long_prompt(self._source, *PROMPT_WORDS)
            self.finished.append(await stream_completion(self._client, self._model, prompt, LONG_PROMPT_TOKENS))


def window_figures(gaps_s: Sequence[float], tokens_per_s: float) -> dict[str, Any]:
    gaps_ms = [1000 * gap for gap in gaps_s]
    figures: dict[str, Any] = {f"p{rank}_ms": percentile(gaps_ms, rank / 100) for rank in (50, 95, 99)}
    return figures | {
        "max_ms": max(gaps_ms),
        "gaps": len(gaps_ms),
        "tokens_per_s": tokens_per_s,
        "gaps_ms": [round(gap, 3) for gap in gaps_ms],
    }


def prompt_figures(streams: Sequence[ClientStream]) -> dict[str, Any]:
    ttfts = [stream.ttft_s for stream in streams]
    return {
        "finished": len(streams),
        "prompt_tokens_mean": sum(stream.prompt_tokens for stream in streams) / len(streams),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_max_s": max(ttfts),
        "ttft_s": [round(ttft, 3) for ttft in ttfts],
    }


def show_isolation(result: dict[str, Any], console: Console) -> None:
    alone, loaded, prompts = result["alone"], result["loaded"], result["long_prompts"]
    headings = ("p50", "p95", "p99", "max", "gaps", "tokens/s")
    table = tables.Table("Gap between tokens of one stream, ms", "", *headings)
    for name, row in (("streams alone", alone), ("with long prompts", loaded)):
        figures = (f"{row[key]:.1f}" for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms"))
        table.row(name, *figures, str(row["gaps"]), f"{row['tokens_per_s']:.1f}")
    table.show(console)
    console.print(f"p99 with long prompts / p99 alone: [bold]{loaded['p99_ms'] / alone['p99_ms']:.2f}[/bold]")
    console.print(f"Longest gap with long prompts / p50 alone: {loaded['max_ms'] / alone['p50_ms']:.1f}")
    console.print(
        f"Long prompts: {prompts['finished']} finished, {prompts['prompt_tokens_mean']:.0f} tokens each on average,"
        f" TTFT p50 {prompts['ttft_p50_s']:.1f} s, longest {prompts['ttft_max_s']:.1f} s"
    )
    if "prefill" in result:
        prefill = result["prefill"]
        console.print(f"Prefill alone: {prefill['tokens_per_s']:.0f} tokens/s, TTFT {prefill['ttft_s']:.1f} s")
    for count, rate in result.get("throughput", {}).items():
        console.print(f"{count} stream{'s' if count != '1' else ''}: {rate:.1f} tokens/s")
