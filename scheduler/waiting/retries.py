"""How many interrupted requests may come back at once. Pure.

If workers die one after the other, the requests of each come back, and the rest of the cluster would do little but work that
is lost again. So within any `WINDOW_S`, only a fixed number of requests may come back, plus a share of the live requests
("retry budgets": Beyer et al., Site Reliability Engineering, chapter 21). A request beyond that is not lost: its gateway is
told when to try again, and retries with jitter for a bounded time.
"""

from collections import deque

WINDOW_S = 10.0


class RetryBudget:
    def __init__(self, floor: int, share: float) -> None:
        """Allow `floor` retries within a window, and `share` times the number of live requests."""
        self._floor, self._share = floor, share
        self._let_in: deque[float] = deque()  # the times at which requests were let in, within the last window

    def allows(self, alive: int, now: float) -> bool:
        while self._let_in and self._let_in[0] + WINDOW_S <= now:
            self._let_in.popleft()
        return len(self._let_in) < self._floor + self._share * alive

    def spend(self, now: float) -> None:
        """Count a request that was let in after `allows`."""
        self._let_in.append(now)

    def wait_s(self, now: float) -> float:
        """Seconds until more are allowed again."""
        return max(self._let_in[0] + WINDOW_S - now, 0.0) if self._let_in else 0.0
