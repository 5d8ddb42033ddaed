"""Which classes of requests have room on some decode worker, and for which one room is kept. Pure.

Requests that are not placed wait under a queue key for their class of KV demand (`demand`). A class is *closed* once its first
request found no room on any decode worker that was looked at. It costs nothing then, until a decode worker lets go of
something and that request would fit there.

**Reservation.** A large request could wait for ever while small ones take whatever comes free. So each time somebody else is
placed although its turn came before, it counts as bypassed. After `bypasses_max` times, one decode worker is closed to all
other requests until this one fits there; all other workers go on as before. Should it fit there while no prefill worker has
room for its prompt, one prefill worker is closed in the same way. Room is kept for one request of a pool at a time. Its tenant
pays for what others could have done with the room: while it was kept, and while the request has it, less what it pays for its
tokens. It pays when it lets go, as its own chunks may be all that can run until then.
"""

from coordinator.request import Request


class RoomClasses:
    def __init__(self) -> None:
        self.reservation: Request | None = None
        self.kept_on = self.kept_prefill = 0
        """Incarnations of the workers that are closed to others."""
        self.lone: dict[str, Request] = {}
        """Requests that wait for a decode worker of their own, longest first, ..."""
        self.lone_on = 0
        """... the worker that is closed to others for one of them, ..."""
        self.lone_runs: Request | None = None
        """... and the one that has it."""
        self.rents: dict[tuple[str, int], tuple[float, float, float]] = {}
        """Attempts that have got such room: the cost of keeping it, since when they have it, and its cost per second."""
        self.gives_way = ("", 0)
        """The attempt that was interrupted last so that another tenant gets its share."""
        self._kept_since = 0.0
        self._kept_cost_per_s = 0.0

    def keep(self, request: Request, incarnation: int, cost_per_s: float, now: float) -> None:
        """`cost_per_s`: what tenants are served on such a worker."""
        self.reservation, self.kept_on = request, incarnation
        self._kept_since, self._kept_cost_per_s = now, cost_per_s

    def stop_keeping(self, now: float) -> float:
        """Returns the cost of what might have been placed meanwhile."""
        self.reservation, self.kept_on, self.kept_prefill = None, 0, 0
        return self._kept_cost_per_s * (now - self._kept_since)

    def reservation_charge(self, key: tuple[str, int], share: float, now: float) -> None:
        """The attempt has got the room, `share` of the worker."""
        per_s = share * self._kept_cost_per_s
        self.rents[key] = (self.stop_keeping(now), now, per_s)

    def reservation_charge_due(self, key: tuple[str, int], now: float) -> float:
        """It has let go of it."""
        kept, since, per_s = self.rents.pop(key, (0.0, now, 0.0))
        return kept + per_s * (now - since)
