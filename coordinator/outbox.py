"""The order between the usage ledger and the wire. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.events import Send


@dataclass
class Outbox:
    """Nothing about a request leaves before the ledger has the request: its messages wait, and those to the same peer behind
    them, so that a link's order is kept. Other peers are not held up."""

    uncommitted: set[str] = field(default_factory=set)
    held: dict[int, deque[Send]] = field(default_factory=dict)
    """Messages that are held back, by peer; it has no empty queues."""

    def opened(self, request_id: str) -> None:
        self.uncommitted.add(request_id)

    def pass_or_hold(self, send: Send) -> bool:
        """True: send it now."""
        if not self.uncommitted:
            return True
        waiting = self.held.get(send.incarnation)
        if waiting is None and not self._names_uncommitted(send):
            return True
        self.held.setdefault(send.incarnation, deque()).append(send)
        return False

    def forget(self, incarnation: int) -> None:
        """Its link is gone: what waits is of no use to its next one, and would be taken for orders of that."""
        self.held.pop(incarnation, None)

    def committed(self, request_ids: Iterable[str]) -> list[Send]:
        """The actions that may go out now, each peer's in order."""
        self.uncommitted.difference_update(request_ids)
        free: list[Send] = []
        for incarnation, waiting in list(self.held.items()):
            while waiting and not self._names_uncommitted(waiting[0]):
                free.append(waiting.popleft())
            if not waiting:
                del self.held[incarnation]
        return free

    def _names_uncommitted(self, send: Send) -> bool:
        return getattr(send.message, "request_id", None) in self.uncommitted
