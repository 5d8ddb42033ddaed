"""How fast a decode worker takes KV in while streams run on it.

A copy at full speed takes so much of the memory's bandwidth that decode steps on other cores are a quarter longer. So what
arrives while streams run goes through a bucket (Turner 1986): a prompt that comes alone crosses at full speed, and only what
comes back to back is slowed down. It counts all pairs together.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


class ByteBucket:
    """Pure. Holds up to `burst_bytes` and fills at `bytes_per_s`; one may overdraw it, and the next one waits for that.

    A piece that begins before its time, since it has waited long enough, adds to the debt; but the debt never exceeds
    `burst_bytes` and the last piece, so nothing waits for longer than those take.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        self._bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._level = float(burst_bytes)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until the next one may begin."""
        self._level = min(self._burst_bytes, self._level + (now - self._at) * self._bytes_per_s)
        self._at = now
        return max(0.0, -self._level / self._bytes_per_s)

    def take(self, size: int) -> None:
        self._level = max(self._level - size, -float(self._burst_bytes + size))


@dataclass(slots=True, eq=False)
class Lane:
    """The segments of one pair that are held back, in order: their bytes, 0 if nobody wants them any more, and what begins
    each."""

    held: deque[tuple[Callable[[], int], Callable[[], None]]] = field(default_factory=deque)
    waiting_since: float = 0.0
    """The first of them."""


class RateLimiter:
    """Begins segments when the bucket has room, while `is_needed` says so; otherwise they begin at once and cost the bucket
    nothing. Pairs take turns, and none waits for longer than `wait_max_s`, from when it came or from when the one before it
    began: its sender waits too. On one event loop."""

    def __init__(
        self, bucket: ByteBucket, wait_max_s: float, clock: Callable[[], float], is_needed: Callable[[], bool]
    ) -> None:
        self._bucket, self._wait_max_s = bucket, wait_max_s
        self._clock, self._is_needed = clock, is_needed
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Lane] = deque()
        """Those that hold something."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, lane: Lane, wanted_bytes: Callable[[], int], begin: Callable[[], None]) -> None:
        """Call `begin` now, or when it is its turn."""
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
