"""The sending end of one hand-over. The rules are in `session`."""

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeVar

from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import (
    BUG,
    HANDLE,
    IGNORE,
    REFUSE,
    Action,
    BlocksReady,
    CancelSegments,
    CommitReady,
    KvFailed,
    KvSent,
    LocalAbort,
    PairLost,
    SegmentBegun,
    SegmentDone,
    SegmentDropped,
    SendMessage,
    SendSegment,
    SessionEnded,
    Table,
    Tick,
    TransferSession,
)
from proto.kv import Abort, Accept, Ack, Announce, Commit, Decline, Offer
from proto.limits import MAX_SEGMENTS

OFFERED: Final = "offered"
STREAMING: Final = "streaming"
COMMITTING: Final = "committing"
DRAINING: Final = "draining"
SENT: Final = "sent"
FAILED: Final = "failed"

Owner = TypeVar("Owner")


def next_parts(waiting: deque[tuple[Owner, SendSegment]], room: int) -> tuple[Owner, list[SendSegment]]:
    """Remove from `waiting` the first session's next segments, at most `room`, and return the session and the segments. They
    are consecutive, so that one announcement can name them all."""
    owner, parts = waiting[0][0], [waiting.popleft()[1]]
    while waiting and waiting[0][0] is owner and len(parts) < room:
        parts.append(waiting.popleft()[1])
    return owner, parts


def announcement(key: tuple[str, int], pair_id: int, sequence: int, parts: Sequence[SendSegment]) -> Announce:
    """The announcement of segments that follow each other, the first being segment `sequence` of the pair."""
    counts = tuple(len(part.block_ids) for part in parts)
    return Announce(*key, pair_id, sequence, parts[0].segment, parts[0].first_block, counts)


_OVER = {
    **dict.fromkeys((Accept, Decline, Ack, Abort, BlocksReady, CommitReady, LocalAbort, PairLost, Tick), IGNORE),
    **dict.fromkeys((SegmentBegun, SegmentDone, SegmentDropped), BUG),
}
_ENDING = dict.fromkeys((Abort, LocalAbort, PairLost, Tick), HANDLE)

SENDER_TABLE: Table = {
    OFFERED: {
        Accept: HANDLE,
        Decline: HANDLE,
        Ack: REFUSE,
        BlocksReady: HANDLE,
        CommitReady: HANDLE,
        SegmentBegun: BUG,
        SegmentDone: BUG,
        SegmentDropped: BUG,
        **_ENDING,
    },
    STREAMING: {
        Accept: IGNORE,
        Decline: REFUSE,
        Ack: REFUSE,
        BlocksReady: HANDLE,
        CommitReady: HANDLE,
        SegmentBegun: HANDLE,
        SegmentDone: HANDLE,
        SegmentDropped: BUG,
        **_ENDING,
    },
    COMMITTING: {
        Accept: IGNORE,
        Decline: REFUSE,
        Ack: HANDLE,
        BlocksReady: BUG,
        CommitReady: BUG,
        SegmentBegun: BUG,
        SegmentDone: HANDLE,
        SegmentDropped: BUG,
        **_ENDING,
    },
    DRAINING: {**_OVER, SegmentBegun: IGNORE, SegmentDone: HANDLE, SegmentDropped: HANDLE},
    SENT: _OVER,
    FAILED: _OVER,
}


class SenderSession(TransferSession):
    """Made when a request is placed; its offer goes out with `start`. Blocks are handed in as prefill finishes them."""

    table, other_end = SENDER_TABLE, "receiver"

    def __init__(
        self, request_id: str, attempt: int, *, pair_id: int, blocks: int, block_bytes: int, settings: KvSettings
    ) -> None:
        super().__init__(request_id, attempt)
        self.state = OFFERED
        self.pair_id = pair_id
        self.blocks = blocks
        self._block_bytes = block_bytes
        self._settings = settings
        self._segment_blocks = max(1, settings.segment_bytes // block_bytes)
        self._block_ids: list[int] = []
        self._cached_blocks = 0
        self._cut = 0  # blocks already cut into segments, or not to be sent
        self._digests: list[bytes] = []  # of each segment; empty: not known yet
        self._unknown = 0
        self._commit: CommitReady | None = None
        self._commit_at = 0.0
        self._result: KvSent | KvFailed | None = None  # reported when nothing is in flight any more

    def forget_payload(self) -> None:
        self._block_ids, self._commit, self._digests = [], None, []

    def start(self, now: float) -> list[Action]:
        self._deadline = now + self._settings.accept_timeout_ms / 1e3
        return [SendMessage(Offer(self.request_id, self.attempt, self.pair_id, self.blocks))]

    def _apply(self, event: object, now: float) -> list[Action]:
        match event:
            case Accept():
                return self._accept(event, now)
            case Decline():
                return self._fail(f"declined: {event.reason}", tell_peer=False)
            case Ack():
                return self._ack(event, now)
            case BlocksReady():
                return self._blocks_ready(event, now)
            case CommitReady():
                return self._commit_ready(event, now)
            case SegmentDone() if self.state == COMMITTING:
                self.in_flight.remove(event.segment)
                self._wait_for_ack(now)
                return []
            case SegmentBegun() | SegmentDone() if self.state == STREAMING:
                return self._segment(event, now)
            case _:
                return super()._apply(event, now)

    # --- from the peer ---

    def _accept(self, event: Accept, now: float) -> list[Action]:
        if event.cached_blocks > self.blocks:
            return self._violation(f"{event.cached_blocks} blocks cached of {self.blocks} offered")
        self.state = STREAMING
        self._cached_blocks = self._cut = event.cached_blocks
        self._segment_blocks = min(self._segment_blocks, event.segment_blocks)
        return self._advance(now)

    def _ack(self, event: Ack, now: float) -> list[Action]:
        kv_bytes = (self.blocks - self._cached_blocks) * self._block_bytes
        if event.kv_bytes != kv_bytes:
            return self._violation(f"an Ack for {event.kv_bytes} bytes where {kv_bytes} were sent")
        self._result = KvSent(self.request_id, self.attempt, kv_bytes, (now - self._commit_at) * 1e3)
        self._deadline = None
        if self.in_flight:
            self.state = DRAINING
            return []
        return self._over()

    # --- from prefill ---

    def _blocks_ready(self, event: BlocksReady, now: float) -> list[Action]:
        assert event.first_block == len(self._block_ids), f"block {event.first_block} after {len(self._block_ids)}"
        assert len(self._block_ids) + len(event.block_ids) <= self.blocks, "more blocks than were offered"
        self._block_ids += event.block_ids
        return self._advance(now) if self.state == STREAMING else []

    def _commit_ready(self, event: CommitReady, now: float) -> list[Action]:
        assert len(self._block_ids) == self.blocks, f"commit with {len(self._block_ids)} of {self.blocks} blocks"
        assert self._commit is None, "committed twice"
        self._commit = event
        self._commit_at = now
        return self._advance(now) if self.state == STREAMING else []

    # --- from the pair, and time ---

    def _segment(self, event: SegmentBegun | SegmentDone, now: float) -> list[Action]:
        if isinstance(event, SegmentDone):
            self.in_flight.remove(event.segment)
        if not self._digests[event.segment]:
            self._digests[event.segment] = event.digest
            self._unknown -= 1
        return self._advance(now)

    def _tick(self, now: float) -> list[Action]:
        if not self._expired(now):
            return []
        waited_for = {OFFERED: "an answer to the offer", STREAMING: "progress", COMMITTING: "the acknowledgement"}
        return self._fail(f"timed out waiting for {waited_for[self.state]}", tell_peer=True)

    # --- inside ---

    def _advance(self, now: float) -> list[Action]:
        """Cut ready blocks into segments. Commit when the digests of all segments are known."""
        self._deadline = now + self._settings.idle_timeout_ms / 1e3
        actions: list[Action] = []
        while self._cut < len(self._block_ids):
            segment = len(self._digests)
            if segment == MAX_SEGMENTS:
                return actions + self._fail(f"more than {MAX_SEGMENTS} segments", tell_peer=True)
            block_ids = tuple(self._block_ids[self._cut : self._cut + self._segment_blocks])
            actions.append(SendSegment(segment, self._cut, block_ids))
            self._cut += len(block_ids)
            self._digests.append(b"")
            self._unknown += 1
            self.in_flight.add(segment)
        if self._commit is not None and not self._unknown:
            actions.append(self._commit_message(self._commit))
            self.state = COMMITTING
            self._wait_for_ack(now)
        return actions

    def _wait_for_ack(self, now: float) -> None:
        settings = self._settings
        self._deadline = now + (settings.idle_timeout_ms if self.in_flight else settings.ack_timeout_ms) / 1e3

    def _commit_message(self, commit: CommitReady) -> SendMessage:
        assert all(self._digests) and self._cut == self.blocks
        message = Commit(self.request_id, self.attempt, tuple(self._digests), commit.prompt_tokens, commit.first_tokens)
        return SendMessage(message, commit.prompt)

    def _fail(self, reason: str, tell_peer: bool) -> list[Action]:
        self._result = KvFailed(self.request_id, self.attempt, reason)
        self._deadline = None
        actions: list[Action] = [SendMessage(Abort(self.request_id, self.attempt, reason[:512]))] if tell_peer else []
        if self.in_flight:
            self.state = DRAINING
            return [*actions, CancelSegments()]
        return actions + self._over()

    def _over(self) -> list[Action]:
        assert self._result is not None
        self.state = SENT if isinstance(self._result, KvSent) else FAILED
        return [SessionEnded(self._result)]
