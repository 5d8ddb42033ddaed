"""What the journal of usage is told and what it tells after a restart, and the order between it and the wire. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.events import Send
from coordinator.quota import Ask


@dataclass(frozen=True)
class Opened:
    """A request is accepted: charged at its estimate until it ends."""

    request_id: str
    day: int
    """On which it counts: days since 1970, UTC."""
    tenant: str
    model: str
    band: str
    borrowed: bool
    ask: Ask


@dataclass(frozen=True)
class Closed:
    """A request has ended, with what was really computed and emitted. Times are over all attempts."""

    request_id: str
    outcome: str
    charged_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float


Entry = Opened | Closed


@dataclass(frozen=True)
class Past:
    """What the journal knew when the coordinator started."""

    open: tuple[Opened, ...] = ()
    """Accepted by an earlier coordinator and not ended, as far as it could write."""
    charged: tuple[tuple[str, int, int], ...] = ()
    """(tenant, day, tokens) of the day of the start, the open ones included."""


@dataclass
class Outbox:
    """Nothing about a request leaves before the journal has the request: its messages wait, and those to the same peer behind
    them, so that a link's order is kept. Other peers are not held up."""

    uncommitted: set[str] = field(default_factory=set)
    held: dict[int, deque[Send]] = field(default_factory=dict)
    """By peer; no empty queues."""

    def opened(self, request_id: str) -> None:
        self.uncommitted.add(request_id)

    def pass_or_hold(self, send: Send) -> bool:
        """True: send it now."""
        if not self.uncommitted:
            return True
        waiting = self.held.get(send.epoch)
        if waiting is None and not self._names_uncommitted(send):
            return True
        self.held.setdefault(send.epoch, deque()).append(send)
        return False

    def committed(self, request_ids: Iterable[str]) -> list[Send]:
        """What may go out now, each peer's in order."""
        self.uncommitted.difference_update(request_ids)
        free: list[Send] = []
        for epoch, waiting in list(self.held.items()):
            while waiting and not self._names_uncommitted(waiting[0]):
                free.append(waiting.popleft())
            if not waiting:
                del self.held[epoch]
        return free

    def _names_uncommitted(self, send: Send) -> bool:
        return getattr(send.message, "request_id", None) in self.uncommitted
