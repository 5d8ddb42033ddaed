"""Limits the rate of log lines that other processes can cause: a burst at first, then one line per interval, with the number
of lines left out."""

from collections.abc import Callable
from typing import Any, Final

from runtime.process import clock

BURST: Final = 10
EVERY_S: Final = 5.0


class RateLimitedLog:
    """Passes on `BURST` lines, and then one in `EVERY_S` seconds; `left_out` says how many were not."""

    def __init__(self, emit: Callable[..., Any]) -> None:
        self._emit = emit
        self._tokens = float(BURST)
        self._at = clock.now()
        self._left_out = 0

    def __call__(self, event: str, **values: Any) -> None:
        now = clock.now()
        self._tokens = min(BURST, self._tokens + (now - self._at) / EVERY_S)
        self._at = now
        if self._tokens < 1:
            self._left_out += 1
            return
        self._tokens -= 1
        left_out, self._left_out = self._left_out, 0
        self._emit(event, **values, **({"left_out": left_out} if left_out else {}))
