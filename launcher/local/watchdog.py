"""Decides whether a supervisor must kill a child process because it hangs. Pure.

The event loop of a child says `WATCHDOG=1` a few times per `timeout_s` (`runtime.process.notify`), so a loop that hangs, or a
process that was stopped, says nothing. Silence counts only between `READY=1` and `STOPPING=1`, since loading a model and an
orderly end may take any time. It does not count while this process itself did not run.
"""

from dataclasses import dataclass

WATCHDOG_S = {"coordinator": 10.0, "gateway": 10.0, "prefill": 30.0, "decode": 30.0, "mixed": 30.0}
"""The watchdog's time by role. The coordinator fences a worker that stands still within seconds, and its streams go on
elsewhere, so killing it is not urgent. No other process replaces a coordinator or a gateway that hangs."""
_LOOKS = 8
_LOOK_S_MAX = 1.0
_LATE_LOOKS = 3  # a look so many pauses late shows that this process itself did not run


@dataclass
class Watchdog:
    timeout_s: float  # 0: never
    ready_at: float | None = None  # this incarnation of the child
    _stopping: bool = False
    _heard_at: float = 0.0
    _looked_at: float = 0.0

    @property
    def look_every_s(self) -> float:
        return min(self.timeout_s / _LOOKS, _LOOK_S_MAX)

    def started(self, now: float) -> None:
        """Begins a new incarnation, from which nothing has been heard."""
        self.ready_at, self._stopping = None, False
        self._heard_at = self._looked_at = now

    def heard(self, line: str, now: float) -> None:
        self._heard_at = now
        if line == "READY=1" and self.ready_at is None:
            self.ready_at = now
        elif line == "STOPPING=1":
            self._stopping = True

    def ready_for_s(self, now: float) -> float:
        """How long it has been ready; 0 if it is not."""
        return 0.0 if self.ready_at is None else now - self.ready_at

    def silent_s(self, now: float) -> float | None:
        """Returns the silence in seconds of a child that must be killed for it, or None. The caller asks every
        `look_every_s`."""
        was_away = now - self._looked_at > _LATE_LOOKS * self.look_every_s
        self._looked_at = now
        if was_away:
            self._heard_at = now
        if not self.timeout_s or self.ready_at is None or self._stopping:
            return None
        silent_s = now - self._heard_at
        return silent_s if silent_s > self.timeout_s else None
