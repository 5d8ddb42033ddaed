"""Whether the step that a worker's compute thread runs has hung. Pure.

The event loop answers heartbeats even while the model hangs. So a step that never ends (a driver that waits for ever, a
deadlock in a library) is detected by its run time. A step on a slow machine must not count as stuck:

- A step of more tokens than any before may compile, allocate, or just take longer: it has `FIRST_OF_ITS_SIZE` times as long.
- No other has less than `TIMES_THE_LONGEST` times what the longest one took so far.
- While the process itself was stopped, so was the step: that time does not count.

`begin` and `end` are called on the compute thread, so that a step does not count while it waits there for another one.
`hung_for` may be called from other threads.
"""

import math
from dataclasses import dataclass, field

FIRST_OF_ITS_SIZE = 10
TIMES_THE_LONGEST = 10
_LOOKS = 4
_LOOK_S_MAX = 1.0


@dataclass
class StepWatch:
    timeout_s: float  # 0: never
    _tokens: int = 0  # of the step that runs; 0: none does
    _began_at: float = 0.0
    _most_tokens: int = 0  # of the steps that ended
    _longest_s: float = 0.0
    _looked_at: float = field(default=float("-inf"))

    @property
    def look_every_s(self) -> float:
        return min(self.timeout_s / _LOOKS, _LOOK_S_MAX)

    @property
    def longest_s(self) -> float:
        """The longest time that any step may take now."""
        if not self.timeout_s:
            return math.inf
        return max(FIRST_OF_ITS_SIZE * self.timeout_s, TIMES_THE_LONGEST * self._longest_s)

    def begin(self, tokens: int, now: float) -> None:
        assert tokens > 0 and not self._tokens
        self._began_at = now  # before the tokens, which say to other threads that it counts
        self._tokens = tokens

    def end(self, now: float) -> None:
        """Notes that the step has ended, well or not."""
        self._longest_s = max(self._longest_s, now - self._began_at)
        self._most_tokens, self._tokens = max(self._most_tokens, self._tokens), 0

    def hung_for(self, now: float) -> float | None:
        """Returns for how many seconds a hung step has run, or None if no step hangs. The caller asks every `look_every_s`
        seconds."""
        stopped_s = _stopped_s(now - self._looked_at, self.look_every_s)
        self._looked_at = now
        if not self._tokens:
            return None
        self._began_at = min(self._began_at + stopped_s, now)
        ran_s = now - self._began_at
        return ran_s if ran_s > self._limit_s() else None

    def _limit_s(self) -> float:
        if self._tokens > self._most_tokens:
            return self.longest_s
        return max(self.timeout_s, TIMES_THE_LONGEST * self._longest_s)


def _stopped_s(passed_s: float, look_every_s: float) -> float:
    """How long the process itself was stopped, or as good as, between two checks."""
    return max(passed_s - look_every_s, 0.0)
