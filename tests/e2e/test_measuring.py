"""What the attacks measure with: a probe sees stalls of a loop, a seed makes one case, a large body is as large as asked."""

import asyncio
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tools.attacks import cases
from tools.attacks.bodies import SHAPES, body
from tools.attacks.cluster import Target
from tools.attacks.probe import Record, watch

BURNT_S = 0.3


def probed(tmp_path: Path, work: Any) -> float:
    """The longest stall in seconds that a probe sees beside `work()` on its loop."""
    record = Record(tmp_path / "probe")

    async def both() -> None:
        watching = asyncio.create_task(watch(record))
        await asyncio.sleep(0.05)
        await work()
        await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(both())
    seen = Record(tmp_path / "probe")
    assert seen.stall_s(os.getpid()) >= seen.read()[0]
    return seen.read()[0]


def test_computing_loop_counts_as_stalled(tmp_path: Path) -> None:
    """An event loop that computes is measured as stalled for that time."""

    async def burn() -> None:
        until = time.thread_time() + BURNT_S
        while time.thread_time() < until:
            pass

    assert BURNT_S <= probed(tmp_path, burn) < 2 * BURNT_S


def test_loop_without_the_lock_is_stalled(tmp_path: Path) -> None:
    """An event loop that waits for the interpreter's lock of another thread is measured as stalled."""

    async def match() -> None:
        # `re` keeps the interpreter's lock all the time.
        thread = threading.Thread(target=re.fullmatch, args=("(a|aa)*b", "a" * 31))
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 (a thread has no event)
            await asyncio.sleep(0.01)

    began = time.process_time()
    stall_s = probed(tmp_path, match)
    assert stall_s > (time.process_time() - began) / 2


def test_idle_loop_is_not_stalled(tmp_path: Path) -> None:
    assert probed(tmp_path, lambda: asyncio.sleep(BURNT_S)) < BURNT_S / 3


def test_body_has_nearly_the_asked_size() -> None:
    """Bodies of each shape have nearly the size that was asked for, and hardly more."""
    sizes = {name: len(body(name, "m", 1_000_000)[1]) for name in SHAPES}
    assert all(750_000 < size <= 1_000_100 for size in sizes.values()), sizes


def test_one_seed_makes_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed always sends the same bytes, and different seeds mostly send different ones."""
    sent: list[bytes] = []
    monkeypatch.setattr(cases, "_post", lambda _world, _case, _path, content: sent.append(content))
    world = cases.World(Target("", "m", {}, "", 0), [])
    for seed in (4, 5, 8, 9, 4, 5, 8, 9):
        random.seed(time.monotonic_ns())
        cases.run_case(world, seed)
    half = len(sent) // 2
    assert sent[:half] == sent[half:] and len(set(sent)) > half / 2
