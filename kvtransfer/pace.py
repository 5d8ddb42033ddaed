"""How fast a decode worker takes KV in while streams run on it.

A copy at full speed takes so much of the memory's bandwidth that decode steps on other cores are a quarter longer. So what
arrives while streams run goes through a bucket (Turner 1986): a prompt that comes alone crosses at full speed, and only what
comes back to back is slowed down. It counts all pairs together.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class Bucket:
    """Pure. Holds up to `burst_bytes` and fills at `bytes_per_s`; one may overdraw it, and the next one waits for that."""

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        self._bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._level = float(burst_bytes)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Until the next one may begin."""
        self._level = min(self._burst_bytes, self._level + (now - self._at) * self._bytes_per_s)
        self._at = now
        return max(0.0, -self._level / self._bytes_per_s)

    def take(self, size: int) -> None:
        self._level -= size


class Pace:
    """Starts segments in the order they come, each when the bucket has room, while `is_needed` says so; but none later than
    `wait_max_s` after it came, since its sender waits for it. On one event loop."""

    def __init__(
        self, bucket: Bucket, wait_max_s: float, clock: Callable[[], float], is_needed: Callable[[], bool]
    ) -> None:
        self._bucket, self._wait_max_s = bucket, wait_max_s
        self._clock, self._is_needed = clock, is_needed
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, int, Callable[[], None]]] = deque()
        """(when it came, bytes, what starts it)"""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, size: int, begin: Callable[[], None]) -> None:
        """Call `begin` now, or when it is its turn."""
        self._held.append((self._clock(), size, begin))
        if self._timer is None:
            self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        while self._held:
            now = self._clock()
            came_at, size, begin = self._held[0]
            wait_s = min(self._bucket.wait_s(now), came_at + self._wait_max_s - now) if self._is_needed() else 0.0
            if wait_s > 0.0:
                self._timer = self._loop.call_later(wait_s, self._go_on)
                return
            self._held.popleft()
            self._bucket.take(size)
            begin()
