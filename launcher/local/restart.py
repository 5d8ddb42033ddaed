"""When a process that ended is started again. Pure: how long it was ready and a random number in, a delay or an end out."""

from dataclasses import dataclass

from runtime.process.exits import HOPELESS_EXITS

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 10.0  # well below the time for which requests wait for a worker
RESET_EVERY_S = 3.0  # of readiness, after which a failure is forgiven
FAILURES_MAX = 8.0  # counted: the delay is at its maximum, and half a minute of readiness forgives all
STARTUP_FAILURES_MAX = 2  # before the cluster was ever ready: a process that fails twice will fail again


@dataclass
class RestartPolicy:
    """Exponential backoff with jitter, upward only by half, for one process."""

    failures: float = 0.0

    def on_exit(self, *, ready_s: float, exit_code: int, started_up: bool, uniform: float) -> float | None:
        """Returns the seconds until the next start, or None to give up. It gives up only while the cluster has never been
        ready (`started_up`). `ready_s`: how long this incarnation was ready. `uniform`: a random number in [0, 1)."""
        if not started_up and exit_code in HOPELESS_EXITS:
            return None
        if exit_code == 0:
            return FIRST_DELAY_S  # it was asked to end with SIGTERM, and it did: no failure
        is_reset = ready_s / RESET_EVERY_S
        self.failures = min(max(self.failures - is_reset, 0.0) + 1.0, FAILURES_MAX)
        if not started_up and self.failures >= STARTUP_FAILURES_MAX:
            return None
        delay_s: float = FIRST_DELAY_S * 2 ** (self.failures - 1.0)
        return min(delay_s * (1.0 + uniform / 2), LAST_DELAY_S)
