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


def test_a_loop_that_computes_is_seen_to_stand_still(tmp_path: Path) -> None:
    async def burn() -> None:
        until = time.thread_time() + BURNT_S
        while time.thread_time() < until:
            pass

    assert BURNT_S <= probed(tmp_path, burn) < 2 * BURNT_S


def test_a_loop_that_waits_for_the_lock_of_another_thread_is_seen_to_stand_still(tmp_path: Path) -> None:
    async def match() -> None:
        # `re` keeps the interpreter's lock all the time.
        thread = threading.Thread(target=re.fullmatch, args=("(a|aa)*b", "a" * 31))
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 (a thread has no event)
            await asyncio.sleep(0.01)

    began = time.process_time()
    stall_s = probed(tmp_path, match)
    assert stall_s > (time.process_time() - began) / 2


def test_a_loop_that_is_idle_does_not_stand_still(tmp_path: Path) -> None:
    assert probed(tmp_path, lambda: asyncio.sleep(BURNT_S)) < BURNT_S / 3


def test_a_body_has_nearly_the_size_that_was_asked_for() -> None:
    sizes = {name: len(body(name, "m", 1_000_000)[1]) for name in SHAPES}
    assert all(750_000 < size <= 1_000_100 for size in sizes.values()), sizes


def test_a_seed_makes_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(cases, "_post", lambda _world, _case, _path, content: sent.append(content))
    world = cases.World(Target("", "m", {}, "", 0), [])
    for seed in (4, 5, 8, 9, 4, 5, 8, 9):
        random.seed(time.monotonic_ns())
        cases.run_case(world, seed)
    half = len(sent) // 2
    assert sent[:half] == sent[half:] and len(set(sent)) > half / 2
