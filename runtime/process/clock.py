"""The one clock: monotonic seconds for deadlines and durations, and the incarnations drawn at a process's start."""

import secrets
import time


def now() -> float:
    """Monotonic seconds; comparable within one process only."""
    return time.monotonic()


def unix_time() -> float:
    """Seconds since 1970, for what people and other systems read. Never used for deadlines."""
    return time.time()


def new_incarnation() -> int:
    """A number for one incarnation of one process, never drawn twice in practice: 62 random bits."""
    return secrets.randbits(62) + 1
