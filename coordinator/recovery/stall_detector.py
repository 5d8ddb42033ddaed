"""Detects that this process was away (stopped, or on a machine that stood still) for so long that its peers have left it.
Pure.

A coordinator that comes back after that would treat all peers as lost, although they and the streams went on. So it acts on no
further event and begins anew, like the next coordinator after a kill: workers and gateways register with what they have.
"""


class StallDetector:
    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.away_s = 0.0  # how long it was away, once it was for too long
        self._looked_at: float | None = None

    def begin(self, now: float) -> None:
        """Peers may come and leave from this moment on."""
        self._looked_at = now

    def was_away(self, now: float) -> bool:
        """Returns whether the process was away for too long; once true, it stays true. The caller must call it more often than
        every `limit_s`."""
        if self._looked_at is None:
            return False
        if now - self._looked_at > self.limit_s and not self.away_s:
            self.away_s = now - self._looked_at
        self._looked_at = now
        return self.away_s > 0.0
