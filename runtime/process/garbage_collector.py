"""The interpreter's garbage collector. A process loads a million objects that stay alive. The collector by default scans them
repeatedly during loading, which takes a seventh of the CPU time of a worker's start. Later it scans them again, for a tenth of
a second, whenever a quarter as many new objects have been made.
"""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Exclude all objects that are made inside from garbage collection, now and later. This applies to all threads, since the
    collector belongs to the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# --- a process whose events may not wait for a full collection --------------------------------------------------------

IDLE_S: Final = 0.25  # without an event: a full collection delays no request
FULL_EVERY_S: Final = 60.0  # between full collections, at least
FEW_REQUESTS: Final = 1000  # with no more requests, a full collection takes a few milliseconds
NEVER: Final = 1_000_000_000  # threshold of the oldest generation: the interpreter begins no full collection
_LOOK_S: Final = 0.1


class FullCollections:
    """Decides when a process that handles events runs a full collection. Pure.

    A full collection takes longer the more objects live, tens of milliseconds with tens of thousands of requests. So one runs
    only while few requests live, or when no event has come for a moment; and only if something has happened since the last
    one. Meanwhile the young generations are collected as usual, and reference counts free the objects that are not in cycles.
    Garbage in cycles that has reached the oldest generation waits until the backlog is short again.
    """

    def __init__(self, now: float, idle_s: float = IDLE_S, every_s: float = FULL_EVERY_S) -> None:
        self._idle_s, self._every_s = idle_s, every_s
        self._events = self._seen = self._collected = 0
        self._quiet_since = self._last = now

    def due(self, events: int, requests: int, now: float) -> bool:
        """Whether to collect now, with so many events handled so far and so many requests alive. Asked several times within
        `idle_s`."""
        if events != self._seen:
            self._seen, self._quiet_since = events, now
        at_rest = now >= self._quiet_since + self._idle_s
        if not (at_rest or requests <= FEW_REQUESTS) or events == self._collected or now < self._last + self._every_s:
            return False
        self._collected, self._last = events, now
        return True


async def collect_seldom(load: Callable[[], tuple[int, int]], now: Callable[[], float]) -> None:
    """Run until cancelled: full collections come only as `FullCollections` says; young generations are collected as always.
    `load`: as for `FullCollections.due`."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    policy = FullCollections(now())
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            if policy.due(*load(), now()):
                gc.collect()
    finally:
        gc.set_threshold(young, middle, old)
