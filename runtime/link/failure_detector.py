"""Detects that a peer has been silent for too long. Pure.

A peer sends at least once per beat, and a beat is half a heartbeat. A peer counts as lost after a silence of three heartbeats
and a beat, so a slow process may be late by nearly three heartbeats. Checks are made when a peer's time is up. A fixed
interval would delay the detection of each loss by up to a beat.
"""

from collections.abc import Iterable

HEARTBEATS_MISSED_MAX = 3
SILENT = "no heartbeat"
STILL_OPEN = (SILENT, "send failed: Resource temporarily unavailable")
"""The reasons for a link's end that do not show that the other process has ended. It was silent, or did not read."""


class FailureDetector:
    """The failure detector of one end of links. `look` and `pause_s` take turns: look, then sleep so long."""

    def __init__(self, heartbeat_ms: int, now: float, theirs_ms: int | None = None) -> None:
        """`theirs_ms` is the other end's heartbeat. If it is shorter than ours, we send as often as that end expects."""
        self.beat_s = min(heartbeat_ms, theirs_ms or heartbeat_ms) / 2000
        self.limit_s = (HEARTBEATS_MISSED_MAX + 0.5) * heartbeat_ms / 1000
        self._due = now
        self._excuse_s = 0.0

    def look(self, now: float) -> bool:
        """Returns whether silence counts now. After a pause of this process, messages of its peers are still unread. Reading
        them gets as much time as the pause took, at most a beat. If this process is late twice in a row, a short delay does
        not postpone the check again."""
        late_s = now - self._due
        allowed_s = self.beat_s if self._excuse_s else self.beat_s / 10
        self._excuse_s = min(late_s, self.beat_s) if late_s > allowed_s else 0.0
        return not self._excuse_s

    def is_lost(self, heard_at: float, now: float) -> bool:
        return now - heard_at > self.limit_s

    def pause_s(self, heard_at: Iterable[float], now: float) -> float:
        """Returns the seconds until the next check, at most a beat. `heard_at`: when each peer was last heard; the earliest
        may count as lost at that check."""
        left_s = min(heard_at, default=now) + self.limit_s - now
        pause_s = min(max(left_s, self._excuse_s) + self.beat_s / 100, self.beat_s)
        self._due = now + pause_s
        return pause_s
