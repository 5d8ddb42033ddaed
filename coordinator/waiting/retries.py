"""How many interrupted requests may come back at once. Pure.

While workers die one after the other, each takes its requests with it, and all of them come back: what is left of the cluster
would do little but work that is lost again. So within any `WINDOW_S` no more are let in again than a fixed number, and a share
of the requests that live ("retry budgets": Beyer et al., Site Reliability Engineering, chapter 21). One above that is not
lost: its gateway is told when to try again, and does, with jitter, for a bounded time.
"""

from collections import deque

WINDOW_S = 10.0


class RetryBudget:
    def __init__(self, floor: int, share: float) -> None:
        """Allow `floor` retries within a window, and `share` times the number of live requests."""
        self._floor, self._share = floor, share
        self._let_in: deque[float] = deque()
        """When, within the last window."""

    def allows(self, alive: int, now: float) -> bool:
        while self._let_in and self._let_in[0] + WINDOW_S <= now:
            self._let_in.popleft()
        return len(self._let_in) < self._floor + self._share * alive

    def spend(self, now: float) -> None:
        """One was let in; the caller has asked."""
        self._let_in.append(now)

    def wait_s(self, now: float) -> float:
        """Seconds until more are allowed again."""
        return max(self._let_in[0] + WINDOW_S - now, 0.0) if self._let_in else 0.0
