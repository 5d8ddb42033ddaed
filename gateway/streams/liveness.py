"""Whether one attempt at a stream still lives, by what has come of it and which connections have ended. Pure."""

from dataclasses import dataclass, field
from math import inf

from gateway.streams.types import StreamLimits
from proto.messages import TokenItem


class EarlyTokens:
    """Tokens that arrived before the first of their attempt, for each choice, in the order in which they came. The first comes
    from a prefill worker and the others from a decode worker, over another connection, so that a busy gateway may read the
    second one first. It is kept until the first has come, for a bounded time."""

    def __init__(self) -> None:
        self._items: dict[int, list[tuple[TokenItem, int]]] = {}
        self._since: float | None = None

    def keep(self, item: TokenItem, decoder: int, now: float) -> None:
        """`decoder`: the incarnation of the decode worker that sent it."""
        self._items.setdefault(item.choice, []).append((item, decoder))
        self._since = now if self._since is None else self._since

    def take(self, choice: int) -> list[tuple[TokenItem, int]]:
        """The tokens that were kept for this choice, whose first token has come, with its decode worker."""
        items = self._items.pop(choice, [])
        if not self._items:
            self._since = None
        return items

    def late_at(self, first_token_wait_s: float) -> float:
        """Returns when the missing first token counts as lost."""
        return inf if self._since is None else self._since + first_token_wait_s


@dataclass(eq=False)
class Liveness:
    coordinator: int = 0  # Incarnation of the coordinator that the attempt was sent to
    heard_at: float = 0.0  # when it was sent, last brought tokens, or was last asked about
    got_tokens: bool = False
    decoder: int = 0  # incarnation of the decode worker that its tokens come from; 0: not known yet
    cut_at: float | None = None  # when that worker's connection ended, or any while `decoder` is 0
    stall_at: float | None = None  # When the attempt counts as lost; None: it is not in doubt
    ask_at: float | None = None  # When to ask the coordinator about a stream in doubt; None: not planned
    early: EarlyTokens = field(default_factory=EarlyTokens)

    def doubt(self, now: float, limits: StreamLimits, *, known: bool) -> None:
        """Note that the stream may be lost. `known`: the coordinator that has it is connected. The coordinator reports a lost
        worker, but the stream's end may have been sent on a dead connection, so the coordinator is asked. The time at which the
        stream counts as lost is never put off, or repeated losses could make a silent stream wait for ever."""
        until, self.ask_at = now + limits.stall_s, None
        if self.cut_at is not None and not known:
            until = min(until, self.cut_at + limits.gone_s)
        elif self.cut_at is not None and self.got_tokens:
            self.ask_at = self.cut_at + limits.gone_s
        self.stall_at = until if self.stall_at is None else min(self.stall_at, until)

    def cut(self, worker: int, now: float) -> None:
        """The connection of this worker, by its incarnation, has ended."""
        if self.decoder in (0, worker) and self.cut_at is None:
            self.cut_at = now

    def silent_at(self, limits: StreamLimits, coordinator: int) -> float:
        """Returns when the attempt has been silent for too long. The keeper then asks the coordinator about it or, if it
        counts as lost, resumes it."""
        if self.stall_at is not None:
            return self.stall_at if self.ask_at is None else min(self.stall_at, self.ask_at)
        if not self.got_tokens:
            return self.heard_at + limits.idle_s / 4 if self.coordinator == coordinator else inf
        return self.heard_at + limits.stall_s

    def heard(self, decoder: int, now: float) -> bool:
        """Note that tokens have come. Returns whether they are the attempt's first: from then on, less silence is allowed."""
        first, self.heard_at = not self.got_tokens, now
        self.got_tokens = True
        self.decoder = decoder or self.decoder
        self.cut_at = self.stall_at = self.ask_at = None
        return first

    def may_live(self, now: float, coordinator: int) -> bool:
        """Returns whether to ask the coordinator about a silent attempt, which may wait for a turn or be over."""
        if self.stall_at is None:
            return self.coordinator == coordinator
        return not self.got_tokens or now < self.stall_at

    def asked(self, now: float, limits: StreamLimits) -> None:
        """Note that the coordinator is now asked about the attempt."""
        self.heard_at, self.ask_at = now, None
        if self.stall_at is not None and now >= self.stall_at:
            self.stall_at = now + limits.stall_s
