"""Orders messages behind the usage ledger's commits. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.events import Send
from proto.messages import Accepted, ClusterState, Interrupted, Rejected
from proto.status import StatusReport

_APART = Accepted | ClusterState | Interrupted | Rejected | StatusReport
"""Messages that do not depend on those about other requests."""


@dataclass
class Outbox:
    """Holds back messages about a request until the ledger has committed it. Later messages to the same worker wait too, so
    that the link's order is kept. Other peers, and what gateways hear of other requests, are not delayed."""

    uncommitted: set[str] = field(default_factory=set)
    held: dict[int, deque[Send]] = field(default_factory=dict)
    """Messages that are held back, by peer; it has no empty queues."""

    def opened(self, request_id: str) -> None:
        self.uncommitted.add(request_id)

    def pass_or_hold(self, send: Send) -> bool:
        """Returns True if it may be sent now; else holds it back."""
        if not self.uncommitted:
            return True
        waiting = self.held.get(send.incarnation)
        if not self._names_uncommitted(send) and (waiting is None or _may_overtake(send, waiting)):
            return True
        self.held.setdefault(send.incarnation, deque()).append(send)
        return False

    def forget(self, incarnation: int) -> None:
        """Drop the messages held back for a peer whose link is gone. On a new link the peer would take them for new orders."""
        self.held.pop(incarnation, None)

    def committed(self, request_ids: Iterable[str]) -> list[Send]:
        """Returns the messages that may go out now, in each peer's order."""
        self.uncommitted.difference_update(request_ids)
        free: list[Send] = []
        for incarnation, waiting in list(self.held.items()):
            while waiting and not self._names_uncommitted(waiting[0]):
                free.append(waiting.popleft())
            if not waiting:
                del self.held[incarnation]
        return free

    def _names_uncommitted(self, send: Send) -> bool:
        return _request_id(send) in self.uncommitted


def _may_overtake(send: Send, waiting: Iterable[Send]) -> bool:
    request_id = _request_id(send)
    if not isinstance(send.message, _APART):
        return False
    return request_id is None or all(_request_id(other) != request_id for other in waiting)


def _request_id(send: Send) -> str | None:
    return getattr(send.message, "request_id", None)
