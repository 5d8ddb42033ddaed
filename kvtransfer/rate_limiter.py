"""Limits the rate at which a decode worker receives KV while streams run on it.

A copy at full speed takes so much memory bandwidth that decode steps on other cores take a quarter longer. So KV that arrives
while streams run goes through a leaky bucket (Turner 1986). A single prompt crosses at full speed; only prompts that arrive
back to back are slowed down. The bucket counts all pairs together.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


class ByteBucket:
    """Pure. Holds up to `burst_bytes` and fills at `bytes_per_s`. A piece may overdraw the bucket; the next piece then waits
    until it has refilled.

    A piece that has reached its maximum wait begins early and adds to the debt. The debt never exceeds `burst_bytes` plus the
    last piece, so no piece waits longer than those bytes take.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        self._bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._level = float(burst_bytes)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Returns the seconds until the next piece may begin."""
        self._level = min(self._burst_bytes, self._level + (now - self._at) * self._bytes_per_s)
        self._at = now
        return max(0.0, -self._level / self._bytes_per_s)

    def take(self, size: int) -> None:
        self._level = max(self._level - size, -float(self._burst_bytes + size))


@dataclass(slots=True, eq=False)
class Lane:
    """The segments of one pair that are held back, in order. Each has a function that returns its bytes (0 if it is no longer
    wanted) and a function that begins it."""

    held: deque[tuple[Callable[[], int], Callable[[], None]]] = field(default_factory=deque)
    waiting_since: float = 0.0


class RateLimiter:
    """While `is_needed` returns true, segments begin when the bucket has room. Otherwise they begin at once and take nothing
    from the bucket. Pairs take turns. A segment waits at most `wait_max_s`, counted from its arrival or from the start of the
    pair's previous segment, because its sender waits too. On one event loop."""

    def __init__(
        self, bucket: ByteBucket, wait_max_s: float, clock: Callable[[], float], is_needed: Callable[[], bool]
    ) -> None:
        self._bucket, self._wait_max_s = bucket, wait_max_s
        self._clock, self._is_needed = clock, is_needed
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Lane] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, lane: Lane, wanted_bytes: Callable[[], int], begin: Callable[[], None]) -> None:
        """Call `begin` now, or when the segment's turn comes."""
        lane.held.append((wanted_bytes, begin))
        if len(lane.held) == 1:
            lane.waiting_since = self._clock()
            self._turns.append(lane)
        if self._timer is None:
            self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        while self._turns:
            lane, now = self._turns[0], self._clock()
            wanted_bytes, begin = lane.held[0]
            size = wanted_bytes()
            is_limited = bool(size) and self._is_needed()
            if is_limited:
                wait_s = min(self._bucket.wait_s(now), lane.waiting_since + self._wait_max_s - now)
                if wait_s > 0.0:
                    self._timer = self._loop.call_later(wait_s, self._go_on)
                    return
            lane.held.popleft()
            lane.waiting_since = now
            if not lane.held:
                self._turns.popleft()
            elif size:
                self._turns.rotate(-1)
            if is_limited:
                self._bucket.take(size)
            begin()
