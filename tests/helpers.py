"""What tests of all packages share."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_LOOKS, _PAUSE_S = 10_000, 0.005


async def until(condition: Callable[[], bool]) -> None:
    """For what makes no event to wait for: looks again and again. Raises `AssertionError` after most of a minute."""
    for _ in range(_LOOKS):
        if condition():
            return
        await asyncio.sleep(_PAUSE_S)
    raise AssertionError(f"not in {_LOOKS * _PAUSE_S:.0f} s")


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    """What this process has written to standard output and standard error since the last look. A thread writes its log lines,
    straight to the descriptor: hence the flush, and no `capsys`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    return "".join(capfd.readouterr())


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`, tuples for several names, of which all but the first `count` are left to `-m long`."""
    rest = [pytest.mark.long, pytest.mark.timeout(600)]
    return [
        pytest.param(*(value if type(value) is tuple else (value,)), marks=rest if at >= count else [])
        for at, value in enumerate(values)
    ]
