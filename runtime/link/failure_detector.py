"""When a peer has been silent for too long. Pure.

A peer is heard from at least once a beat, and a beat is half a heartbeat: so the silence at which it is taken for lost, three
heartbeats and a beat, leaves a process that was only slow nearly all of the three. Looks are taken when somebody's time is up,
not by a clock of their own, which would add up to a beat to every loss.
"""

from collections.abc import Iterable

HEARTBEATS_MISSED_MAX = 3


class FailureDetector:
    """The failure detector of one end of links. `look` and `pause_s` take turns: look, then sleep so long."""

    def __init__(self, heartbeat_ms: int, now: float, theirs_ms: int | None = None) -> None:
        """`theirs_ms` is the other end's heartbeat: where it is the shorter one, that end wants to hear from us as often."""
        self.beat_s = min(heartbeat_ms, theirs_ms or heartbeat_ms) / 2000
        self.limit_s = (HEARTBEATS_MISSED_MAX + 0.5) * heartbeat_ms / 1000
        self._due = now
        self._excuse_s = 0.0

    def look(self, now: float) -> bool:
        """Whether silence counts now. After a pause of our own the peers' words are still unread: they get as long again to be
        read, at most a beat. Being a little late twice in a row is no excuse."""
        late_s = now - self._due
        allowed_s = self.beat_s if self._excuse_s else self.beat_s / 10
        self._excuse_s = min(late_s, self.beat_s) if late_s > allowed_s else 0.0
        return not self._excuse_s

    def is_lost(self, heard_at: float, now: float) -> bool:
        return now - heard_at > self.limit_s

    def pause_s(self, heard_at: Iterable[float], now: float) -> float:
        """Seconds until the next look, in which one may be lost of those that were last heard from then; at most a beat."""
        left_s = min(heard_at, default=now) + self.limit_s - now
        pause_s = min(max(left_s, self._excuse_s) + self.beat_s / 100, self.beat_s)
        self._due = now + pause_s
        return pause_s
