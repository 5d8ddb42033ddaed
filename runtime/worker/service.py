"""Whether a worker takes work, as the coordinator is told, and when one that is to end may go. Pure.

A worker that is to end says `Draining`. It goes when the coordinator has answered that nothing is placed on it any more
(`Drained`), or, while the coordinator is away, when it holds nothing. Its driver bounds all that: `GO_AFTER_S` after the end of
its grace it goes with what it has, which is then resumed elsewhere.
"""

from proto.drain import Drained, Draining
from proto.fields import HandOverMs

GO_AFTER_S = 5.0


class Service:
    def __init__(self) -> None:
        self.leaving = False
        """This process is to end."""
        self._hand_over_at: float | None = None
        """While it is drained, for whatever reason."""
        self._dismissed = False

    def hand_over_ms(self, now: float) -> HandOverMs:
        """For the next `Hello`."""
        return None if self._hand_over_at is None else max(0.0, 1000 * (self._hand_over_at - now))

    def leave(self, grace_s: float, now: float) -> Draining:
        """This process is to end; to be said to the coordinator."""
        self.leaving = True
        self._hand_over_at = now + grace_s
        return self.draining(now)

    def draining(self, now: float) -> Draining:
        return Draining(self.hand_over_ms(now))

    def ordered(self, order: Draining | Drained, now: float) -> None:
        """By the coordinator."""
        self._dismissed = isinstance(order, Drained)  # after any other order it is said anew, if it is so
        if isinstance(order, Draining) and not self.leaving:
            self._hand_over_at = None if order.hand_over_ms is None else now + order.hand_over_ms / 1000

    def link_lost(self) -> None:
        """What the coordinator has said holds no longer: there may be another one, which does not know of it."""
        self._dismissed = False

    def may_go(self, *, up: bool, empty: bool) -> bool:
        """`up`: the coordinator is there; `empty`: nothing is held, and nothing waits to be sent."""
        return self.leaving and empty and (self._dismissed or not up)
