"""Log lines that others can cause."""

from typing import Any

import pytest

from runtime.process import clock
from runtime.process.rate_limited_log import BURST, EVERY_S, RateLimitedLog


def test_log_flood_is_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of log lines is cut to a few, and a later line says how many were left out."""
    now = 100.0
    monkeypatch.setattr(clock, "now", lambda: now)
    lines: list[dict[str, Any]] = []
    say = RateLimitedLog(lambda event, **values: lines.append(values))
    for _ in range(10_000):
        say("turned away", reason="x")
    assert len(lines) == BURST and not any("left_out" in line for line in lines)
    now += EVERY_S
    say("turned away", reason="y")
    assert lines[-1] == {"reason": "y", "left_out": 10_000 - BURST} and len(lines) == BURST + 1
    say("turned away", reason="z")
    assert len(lines) == BURST + 1
