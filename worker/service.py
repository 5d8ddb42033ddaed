"""Keeps what the coordinator is told about whether a worker takes work, and decides when a worker may end or change its role.
Pure.

A worker that is to end says `Draining`. It goes when the coordinator has answered that nothing is placed on it any more
(`Drained`), or, while the coordinator is away, when it holds nothing. Its driver bounds this wait: `GO_AFTER_S` seconds after
the grace period the worker ends anyway, and its streams are resumed elsewhere.

A worker that is to change its role (`Flip`) does so only after the coordinator that ordered it has sent `Drained`, since only
the coordinator knows whether other workers still serve in this role. The order is void if the link is lost, or `FLIP_AFTER_S`
seconds after the hand-over.
"""

from proto.drain import Drained, Draining, Flip
from proto.fields import HandOverMs
from proto.messages import Role

GO_AFTER_S = 5.0
IN_DOUBT_S = 5.0  # longer than a coordinator is silent before it counts as lost, or its ledger writes a row
FLIP_AFTER_S = 10.0  # less than the coordinator waits, since it cannot see the worker's progress


class Service:
    def __init__(self) -> None:
        self.leaving = False  # this process is to end
        self._hand_over_at: float | None = None  # None: not drained, or without a time
        self._dismissed = False
        self.flips_to: Role | None = None  # the role to take, while it is drained for that
        self.is_ready = False  # all that the new role needs is there

    def hand_over_ms(self, now: float) -> HandOverMs:
        """The time of a hand-over for the next `Hello`."""
        return None if self._hand_over_at is None else max(0.0, 1000 * (self._hand_over_at - now))

    def leave(self, grace_s: float, now: float) -> Draining:
        """Marks the process as about to end; returns the message to the coordinator."""
        self.leaving = True
        self.flips_to = None
        self._hand_over_at = now + grace_s
        return self.draining(now)

    def draining(self, now: float) -> Draining:
        return Draining(self.hand_over_ms(now))

    def ordered(self, order: Draining | Drained | Flip, now: float) -> None:
        self._dismissed = isinstance(order, Drained)  # after any other order it is said anew, if it is so
        if not isinstance(order, Drained):
            self.flips_to = order.role if isinstance(order, Flip) and not self.leaving else None
            self.is_ready = False
        if isinstance(order, Flip) and not self.leaving:
            self._hand_over_at = now + order.hand_over_ms / 1000
        if isinstance(order, Draining) and not self.leaving:
            self._hand_over_at = None if order.hand_over_ms is None else now + order.hand_over_ms / 1000

    def link_lost(self) -> None:
        """Forget the coordinator's earlier orders, since a new coordinator may not know them."""
        self._dismissed = False
        self.keep_role()

    def keep_role(self) -> None:
        """Keeps the present role after all, and takes work again."""
        if self.flips_to is not None:
            self.flips_to, self._hand_over_at = None, None

    def flip_overdue_s(self, now: float) -> float:
        """Returns how many seconds the role change is overdue. A negative value is the time that is left."""
        return now - FLIP_AFTER_S - (self._hand_over_at or now)

    def may_flip(self, *, empty: bool) -> bool:
        """`empty`: as below, and no transfer can touch a block."""
        return self.flips_to is not None and self.is_ready and empty and self._dismissed

    def may_go(self, *, up: bool, empty: bool) -> bool:
        """`up`: the coordinator is there; `empty`: nothing is held, and nothing waits to be sent."""
        return self.leaving and empty and (self._dismissed or not up)
