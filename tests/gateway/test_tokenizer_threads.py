"""The threads that tokenize."""

import asyncio

import psutil
import pytest

from gateway.text import tokenizer_threads
from gateway.text.tokenizer_threads import TokenizerThreads
from tests.helpers import until

MIB = 1 << 20


def fragments(kept: list[bytes]) -> None:
    """Takes 200 MiB in small pieces, and keeps one in fifty of them."""
    pieces = [bytes(2000) for _ in range(100_000)]
    kept += pieces[::50]


def test_memory_of_large_texts_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after a large text, the process no longer holds the memory that reading it took."""
    monkeypatch.setattr(tokenizer_threads, "_TRIM_AFTER_S", 0.01)
    asyncio.run(read_large_texts())


async def read_large_texts() -> None:
    threads, kept, process = TokenizerThreads(), list[bytes](), psutil.Process()
    before = process.memory_info().rss
    for _ in range(3):
        await threads.run("tenant", MIB, lambda: fragments(kept))
    await until(lambda: process.memory_info().rss - before < 60 * MIB)
    threads.shutdown()
