"""How long an overload has to last before a priority class's default target for the first token refuses requests. Pure.

A burst that is over within the grace is queued, as an operator who set no target expects. A standing queue makes every request
late, so behind the grace only requests that are expected in time are admitted. The idea is CoDel's (Nichols and Jacobson 2012).
"""


class Grace:
    def __init__(self) -> None:
        self._late: dict[str, tuple[float, float]] = {}
        """When the first request of each class's overload was expected late, and when the last one was."""

    def covers(self, priority_class: str, grace_s: float, now: float) -> bool:
        """Whether a request that is expected late is admitted all the same. An overload ends when none was late for
        `grace_s`."""
        since, last = self._late.get(priority_class, (now, now))
        if now - last > grace_s:
            since = now
        self._late[priority_class] = since, now
        return now - since < grace_s
