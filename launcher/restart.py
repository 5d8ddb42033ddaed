"""When a role that died is started again. Pure: how long it lived and a random number in, a delay or an end out."""

from dataclasses import dataclass

from runtime.exits import HOPELESS_EXITS

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 30.0
STABLE_AFTER_S = 30.0
"""A process that lived this long did work: its death starts a new count."""
QUICK_FAILURES_MAX = 7
STARTUP_FAILURES_MAX = 2
"""While the cluster has never been ready, what fails twice will fail again: say so soon."""


@dataclass
class RestartPolicy:
    """Exponential backoff with jitter, upward only by half, for one role."""

    quick_failures: int = 0

    def on_exit(self, *, lived_s: float, exit_code: int, started_up: bool, uniform: float) -> float | None:
        """Seconds until the next start, or None to give up. `uniform` is a random number in [0, 1)."""
        if exit_code in HOPELESS_EXITS:
            return None
        if exit_code == 0:
            return FIRST_DELAY_S  # somebody asked it to end, with SIGTERM, and it did: no failure
        if lived_s >= STABLE_AFTER_S:
            self.quick_failures = 0
        self.quick_failures += 1
        if self.quick_failures >= (QUICK_FAILURES_MAX if started_up else STARTUP_FAILURES_MAX):
            return None
        delay_s: float = min(FIRST_DELAY_S * 2 ** (self.quick_failures - 1), LAST_DELAY_S)
        return delay_s * (1.0 + uniform / 2)
