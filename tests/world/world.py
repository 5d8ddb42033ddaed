"""Virtual time, the heap of what is to come, the processes, and the log of what happened. Nothing here knows the product.

A run depends only on its seed: all random numbers come from `World.random`, and calls that are due at the same time run in the
order in which they were planned. `World.digest` is a digest of everything that happened.
"""

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from struct import Struct
from typing import Any

from proto.codec import encode
from proto.messages import Message

_STAMP = Struct("<dI")


class SimulationViolation(AssertionError):
    """A promise was broken. `request_id` is the request concerned, where there is one."""

    def __init__(self, promise: str, why: str, request_id: str = "") -> None:
        super().__init__(f"{promise}: {why}")
        self.promise = promise
        self.request_id = request_id


class Timer:
    """A planned call; `cancel` may be called at any time."""

    __slots__ = ("_cancelled",)

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled


class SimulatedProcess:
    """One incarnation of one process. A dead process does nothing; a paused one does everything later, in order."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.number = world.new_number()
        self.incarnation = 1000 * self.number + world.random.randrange(1000) + 1
        self.alive = True
        self.paused = False
        self.resumed_at = -1e9
        self._clock_offset_s = world.random.uniform(0.0, 1e5)
        self._clock_rate = 1.0 + world.random.uniform(-5e-4, 5e-4)
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def now(self) -> float:
        """Returns the time of its own clock: seconds since an arbitrary moment, a little fast or slow."""
        return self._clock_offset_s + self.world.now * self._clock_rate

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Something reaches it now."""
        if self.alive:
            if self.paused:
                self._backlog.append((function, arguments))
            else:
                function(*arguments)

    def after(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> Timer:
        """A timer of its own, by its own clock."""
        timer = Timer()
        self.world.at(self.world.now + max(delay_s, 0.0) / self._clock_rate, self._fire, timer, function, arguments)
        return timer

    def _fire(self, timer: Timer, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if timer.cancelled or not self.alive:
            return
        if self.paused:
            self._backlog.append((self._fire, (timer, function, arguments)))
        else:
            function(*arguments)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.resumed_at = self.world.now
        while self._backlog and self.alive and not self.paused:
            function, arguments = self._backlog.pop(0)
            function(*arguments)

    def log(self, what: str, message: Message | str = "") -> None:
        self.world.log(self.name, what, message)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Kills the process; the network does what its kernel does afterwards."""
        self.alive = False
        self._backlog.clear()


class Alarm:
    """The timer of a core, moved to its next deadline after each event, as `runtime.process.driver.CoreDriver` does."""

    def __init__(self, process: SimulatedProcess, ring: Callable[[], None]) -> None:
        self._process, self._ring = process, ring
        self._set: tuple[float, Timer] | None = None

    def set(self, at: float | None) -> None:
        """Set it, by the clock of the process."""
        if self._set is not None:
            if at == self._set[0]:
                return
            self._set[1].cancel()
            self._set = None
        if at is not None:
            self._set = at, self._process.after(at - self._process.now(), self._due)

    def _due(self) -> None:
        self._set = None
        self._ring()


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, str, str, Message | str]] = []
        """(when, where, what, about what), for the story of a failure."""
        self.injected: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._processes = 0
        self._hash = blake2b(digest_size=16)

    def new_number(self) -> int:
        self._processes += 1
        return self._processes

    def at(self, when: float, function: Callable[..., None], *arguments: Any) -> None:
        self._planned += 1
        heappush(self._heap, (when, self._planned, function, arguments))

    def after(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, function, *arguments)

    def step(self, until: float) -> bool:
        """Runs the next call that is due. If none is due by `until`, sets the time to `until` and returns False."""
        if not self._heap or self._heap[0][0] > until:
            self.now = until
            return False
        self.now, _, function, arguments = heappop(self._heap)
        function(*arguments)
        return True

    def log(self, where: str, what: str, about: Message | str = "") -> None:
        self.events.append((self.now, where, what, about))
        self._hash.update(_STAMP.pack(self.now, len(self.events)))
        self._hash.update(about.encode() if isinstance(about, str) else encode(about))
        self._hash.update((where + what).encode())

    @property
    def digest(self) -> str:
        return self._hash.copy().hexdigest()
