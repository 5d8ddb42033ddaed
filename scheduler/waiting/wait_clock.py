"""Why requests of one model wait, in seconds by reason. Pure.

A wait is taken apart by clocks that are read at its beginning and at its end, so its cost does not depend on how many wait:

- `cold_start`: no worker of one role was up, or all drained;
- `no_room`: another request of its class of KV demand had found no room in decode, or no prefill worker had a sequence free;
- the rest by whose prompt tokens were computed meanwhile: those of its own tenant are `own_queue`, others `other_tenants`.
"""

from collections import Counter, defaultdict
from collections.abc import Collection

from proto.parts import Waits
from scheduler.fairness.fair_node import Path
from scheduler.request import WaitMark


class WaitClock:
    def __init__(self) -> None:
        self.warm_since = 0.0  # when the last cold start seen here was over
        self._at = 0.0
        self._cold = self._full = False
        self._closed: Collection[int] = ()  # classes without room since the last event
        self._cold_s = self._full_s = 0.0
        self._closed_s: defaultdict[int, float] = defaultdict(float)
        self._tokens: Counter[Path] = Counter()  # prompt tokens computed, by tenant
        self._all_tokens = 0

    @property
    def lacks_room(self) -> bool:
        return self._full or bool(self._closed)

    def computed(self, path: Path, tokens: int) -> None:
        self._tokens[path] += tokens
        self._all_tokens += tokens

    def forget(self, path: Path) -> None:
        self._tokens.pop(path, None)

    def advance(self, now: float, *, cold: bool, full: bool, closed: Collection[int]) -> None:
        """Count the time since the last call, and note what holds from now on. `full`: no prefill worker has room."""
        passed_s, self._at = now - self._at, now
        if self._cold:
            self._cold_s += passed_s
            self.warm_since = now
        elif self._full:
            self._full_s += passed_s
        else:
            for key in self._closed:
                self._closed_s[key] += passed_s
        self._cold, self._full, self._closed = cold, full, tuple(closed)

    def mark(self, path: Path, key: int, now: float) -> WaitMark:
        return WaitMark(now, key, *self._seconds(key, now), self._tokens[path], self._all_tokens)

    def since(self, mark: WaitMark, path: Path, now: float) -> Waits:
        """Returns what a request of this tenant has waited for since then."""
        cold_s, no_room_s = self._seconds(mark.key, now)
        # Sums of the same times in another order differ by their rounding.
        cold_s, no_room_s = max(cold_s - mark.cold_s, 0.0), max(no_room_s - mark.no_room_s, 0.0)
        own, every = self._tokens[path] - mark.own_tokens, self._all_tokens - mark.all_tokens
        if not every:  # it waited for a step in flight, or for one worker: take who has been served so far
            own, every = self._tokens[path], self._all_tokens
        left_ms = max(1000 * (now - mark.at - cold_s - no_room_s), 0.0)
        own_ms = left_ms * (own / every) if every else left_ms  # the quotient first: the product is at most `left_ms`
        return Waits(own_ms, left_ms - own_ms, 1000 * no_room_s, 1000 * cold_s)

    def _seconds(self, key: int, now: float) -> tuple[float, float]:
        """The clocks of cold starts and of no room for this class."""
        passed_s = now - self._at
        is_full = not self._cold and (self._full or key in self._closed)
        no_room_s = self._full_s + self._closed_s[key] + (passed_s if is_full else 0.0)
        return self._cold_s + (passed_s if self._cold else 0.0), no_room_s
