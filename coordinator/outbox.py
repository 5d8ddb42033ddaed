"""Orders messages behind the usage ledger's commits. Pure."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.events import Send
from proto.messages import Accepted, ClusterState, Interrupted, Rejected, WaitReport
from proto.status import StatusReport

_APART = Accepted | ClusterState | Interrupted | WaitReport | Rejected | StatusReport
"""Messages that do not depend on those about other requests."""


@dataclass
class Outbox:
    """Holds back messages about a request until the ledger has committed it. Later messages to the same worker wait too, so
    that the link's order is kept. Other peers, and what gateways hear of other requests, are not delayed."""

    uncommitted: set[str] = field(default_factory=set)
    held: dict[int, deque[Send]] = field(default_factory=dict)
    """Messages that are held back, by peer; it has no empty queues."""
    _held_about: dict[int, Counter[str | None]] = field(default_factory=dict)
    """How many of them are about each request, by peer."""

    def opened(self, request_id: str) -> None:
        self.uncommitted.add(request_id)

    def pass_or_hold(self, send: Send) -> bool:
        """Returns True if it may be sent now; else holds it back."""
        if not self.uncommitted:
            return True
        if not self._names_uncommitted(send) and (send.incarnation not in self.held or self._may_overtake(send)):
            return True
        self.held.setdefault(send.incarnation, deque()).append(send)
        self._held_about.setdefault(send.incarnation, Counter())[_request_id(send)] += 1
        return False

    def forget(self, incarnation: int) -> None:
        """Drop the messages held back for a peer whose link is gone. On a new link the peer would take them for new orders."""
        self.held.pop(incarnation, None)
        self._held_about.pop(incarnation, None)

    def committed(self, request_ids: Iterable[str]) -> list[Send]:
        """Returns the messages that may go out now, in each peer's order."""
        self.uncommitted.difference_update(request_ids)
        free: list[Send] = []
        for incarnation, waiting in list(self.held.items()):
            while waiting and not self._names_uncommitted(waiting[0]):
                self._held_about[incarnation][_request_id(waiting[0])] -= 1
                free.append(waiting.popleft())
            if not waiting:
                self.forget(incarnation)
        return free

    def _names_uncommitted(self, send: Send) -> bool:
        return _request_id(send) in self.uncommitted

    def _may_overtake(self, send: Send) -> bool:
        """Whether a message may go out before those that are held back for its peer, of which there are some."""
        request_id = _request_id(send)
        return isinstance(send.message, _APART) and (
            request_id is None or not self._held_about[send.incarnation][request_id]
        )


def _request_id(send: Send) -> str | None:
    return getattr(send.message, "request_id", None)
