"""The one clock: monotonic seconds for deadlines and durations, and the incarnations drawn at a process's start."""

import math
import secrets
import time
from typing import Final

SETTLE_S: Final = 900.0  # after a start, or a jump of the wall clock, in which nothing is deleted by its time
_TOLERANCE_S: Final = 2.0


def now() -> float:
    """Monotonic seconds; comparable within one process only."""
    return time.monotonic()


def unix_time() -> float:
    """Seconds since 1970, for what people and other systems read. Never used for deadlines."""
    return time.time()


def new_incarnation() -> int:
    """A number for one incarnation of one process, never drawn twice in practice: 62 random bits."""
    return secrets.randbits(62) + 1


class SettledTime:
    """The wall clock for deleting what is old. If it is wrong for a while, as after a boot, nothing is lost by that. Pure."""

    def __init__(self) -> None:
        self._offset_s = -math.inf
        self._since_s = 0.0

    def at(self, unix_s: float, now_s: float) -> float | None:
        """Returns `unix_s`; None: since the first call or since a jump forward, less than `SETTLE_S` have passed. `now_s` is
        the monotonic time."""
        offset_s = unix_s - now_s
        if offset_s > self._offset_s + _TOLERANCE_S:
            self._since_s = now_s
        self._offset_s = offset_s
        return unix_s if now_s - self._since_s >= SETTLE_S else None
