"""What reads or keeps the logs stands still: the cluster serves on."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import aiohttp
import httpx
import pytest
import uvloop

from tests import tiny_models
from tests.e2e.live import Live, live

STOPPED_S = 20.0
STREAM_TOKENS = 1_500


@pytest.mark.long
def test_stopped_supervisor_stops_no_stream(tmp_path: Path) -> None:
    """While `crossdock serve` itself is stopped and the pipes of the logs are full, streams and new requests go on."""
    model = tiny_models.make("llama", tmp_path / "tiny", max_position_embeddings=2048)
    with live(model, tmp_path) as up:
        up.process.send_signal(signal.SIGSTOP)
        try:
            gap_s, answered = uvloop.run(_load(up))
        finally:
            up.process.send_signal(signal.SIGCONT)
        sys.stderr.write(f"\nsupervisor stopped {STOPPED_S:.0f} s: {answered} requests, longest gap {gap_s:.2f} s\n")
        assert answered > 1_000, "too few to fill a pipe"
        assert gap_s < STOPPED_S / 4
        up.wait_idle()
        assert len(up.status().workers) == 2


async def _load(up: Live) -> tuple[float, int]:
    """Returns the longest gap of a stream, and how many small requests were answered."""
    until, gaps, answered = time.monotonic() + STOPPED_S, [0.0], 0

    async def stream(session: aiohttp.ClientSession) -> None:
        body = {
            "model": up.model_id,
            "prompt": [20, 21],
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        while time.monotonic() < until:
            last = time.monotonic()
            async with session.post(f"{up.base_url}/v1/completions", json=body) as answer:
                async for _ in answer.content:
                    last, before = time.monotonic(), last
                    gaps.append(last - before)

    async def requests(session: aiohttp.ClientSession) -> None:
        nonlocal answered
        while time.monotonic() < until:
            async with session.get(f"{up.base_url}/v1/models") as answer:
                answered += answer.status == httpx.codes.OK

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STOPPED_S * 3)) as session:
        await asyncio.gather(stream(session), requests(session))
    return max(gaps), answered
