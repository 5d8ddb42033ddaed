"""`python -m benchmarks fairness`: the time to first token of a small tenant, alone and beside one that floods the service.

Processes and HTTP are real, and each tenant has a key of its own. The small tenant sends requests at random times without
waiting for earlier ones (open loop), each with a new prompt. The flood keeps a number of long prompts in the server at all
times.
"""

import asyncio
import hashlib
import random
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.settings import FairnessSettings
from launcher import reports, tables
from launcher.http.client import new_session
from launcher.http.streams import BenchFailed, ClientStream, long_prompt, percentile, stream_completion
from launcher.local.lifetime import running, until_interrupted
from launcher.models import resolve
from runtime.process import clock
from runtime.settings.serve import ServeSettings

_TOKENS = 2  # tokens asked of each request: decode computes the second one, so that the KV moves too


def run(settings: FairnessSettings) -> int:
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: FairnessSettings, console: Console) -> int:
    model = resolve.ready(settings.model, "", console)
    keys = {name: secrets.token_hex(32) for name in ("small", "flood")}
    with tempfile.TemporaryDirectory(prefix="crossdock-") as folder:
        tenants, usage = Path(folder) / "tenants.toml", Path(folder) / "usage.db"
        tenants.write_text("".join(_tenant(name, key) for name, key in keys.items()))
        serve = ServeSettings(
            port=0, prefill=settings.prefill, decode=settings.decode, tenants=str(tenants), usage_db=str(usage)
        )
        try:
            async with running(serve, model, console) as up:
                result = await _measure(up.cluster.base_url, model.model_id, keys, settings, console)
        except aiohttp.ClientError as error:
            raise BenchFailed(f"the server cannot be reached: {error or type(error).__name__}") from None
    _show(result, console)
    reports.write_json(settings, result | {"settings": settings.model_dump()})
    return 0


def _tenant(name: str, key: str) -> str:
    return f'[tenants.{name}]\nkeys = ["{hashlib.sha256(key.encode()).hexdigest()}"]\n'


async def _measure(
    base_url: str, model: str, keys: dict[str, str], settings: FairnessSettings, console: Console
) -> dict[str, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        async with new_session(base_url, keys["small"]) as small, new_session(base_url, keys["flood"]) as flood:
            await stream_completion(small, model, "Once upon a time", _TOKENS)
            alone = await _arrivals(small, model, settings, progress, "small tenant alone")
            begun: list[ClientStream] = []
            source = random.Random(settings.seed + 1)

            def flooding() -> str:
                return long_prompt(source, settings.flood_words, settings.flood_words)

            loop = asyncio.get_running_loop()
            tasks = [
                loop.create_task(_keep_asking(flood, model, flooding, begun)) for _ in range(settings.flood_at_once)
            ]
            try:
                await asyncio.sleep(settings.warmup_s)
                beside = await _arrivals(small, model, settings, progress, "beside the flood")
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return {"model": model, "alone": _figures(alone), "beside": _figures(beside), "flood_prompts": len(begun)}


async def _arrivals(
    client: aiohttp.ClientSession, model: str, settings: FairnessSettings, progress: Progress, what: str
) -> list[ClientStream]:
    """Sends the small tenant's requests of one phase, at the same times in each phase. Raises `BenchFailed` if one is
    refused."""
    source = random.Random(settings.seed)
    words = random.Random(f"{settings.seed} {what}")
    bar = progress.add_task(what, total=settings.requests)
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[ClientStream]] = []
    due = clock.now()
    for _ in range(settings.requests):
        due += source.expovariate(1 / settings.every_s)
        await asyncio.sleep(max(due - clock.now(), 0.0))
        prompt = long_prompt(words, settings.prompt_words, settings.prompt_words)
        tasks.append(loop.create_task(stream_completion(client, model, prompt, _TOKENS)))
        progress.advance(bar)
    return await asyncio.gather(*tasks)


async def _keep_asking(
    client: aiohttp.ClientSession, model: str, prompt: Callable[[], str], begun: list[ClientStream]
) -> None:
    while True:
        begun.append(ClientStream(0.0))
        await stream_completion(client, model, prompt(), _TOKENS, into=begun[-1])


def _figures(streams: list[ClientStream]) -> dict[str, Any]:
    ttfts = [stream.ttft_s for stream in streams]
    return {
        "requests": len(ttfts),
        "prompt_tokens_mean": sum(stream.prompt_tokens for stream in streams) / len(streams),
        **{f"ttft_p{rank}_s": percentile(ttfts, rank / 100) for rank in (50, 90, 99)},
        "ttft_s": [round(ttft, 3) for ttft in ttfts],
    }


def _show(result: dict[str, Any], console: Console) -> None:
    headings = ("p50", "p90", "p99", "requests", "tokens each")
    table = tables.Table("Time to first token of the small tenant, seconds", "", *headings)
    for name in ("alone", "beside"):
        row = result[name]
        figures = (f"{row[f'ttft_p{rank}_s']:.2f}" for rank in (50, 90, 99))
        table.row(name, *figures, str(row["requests"]), f"{row['prompt_tokens_mean']:.0f}")
    table.show(console)
    ratios = {rank: result["beside"][f"ttft_p{rank}_s"] / result["alone"][f"ttft_p{rank}_s"] for rank in (50, 99)}
    console.print(f"Beside / alone: p50 {ratios[50]:.2f}, p99 [bold]{ratios[99]:.2f}[/bold]")
