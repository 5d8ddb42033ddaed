"""The receiving end of one hand-over. The rules are in `session`."""

from typing import Final

from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import (
    BUG,
    HANDLE,
    IGNORE,
    REFUSE,
    Action,
    CancelSegments,
    CommitArrived,
    KvCommitted,
    KvDeclined,
    KvReceiveFailed,
    LocalAbort,
    OfferAccepted,
    PairLost,
    Quarantine,
    Receive,
    Refusal,
    SegmentDone,
    SegmentDropped,
    SendMessage,
    SessionEnded,
    Table,
    Tick,
    TransferSession,
)
from proto.codec import unpack_tokens
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Accept, Ack, Announce, Decline, Offer
from proto.limits import MAX_SEGMENTS

UNDECIDED: Final = "undecided"
RECEIVING: Final = "receiving"
CHECKING: Final = "checking"
DRAINING: Final = "draining"
COMMITTED: Final = "committed"
DECLINED: Final = "declined"
FAILED: Final = "failed"

_OVER = {
    **dict.fromkeys(
        (Offer, Announce, CommitArrived, Abort, OfferAccepted, Refusal, LocalAbort, PairLost, Tick), IGNORE
    ),
    **dict.fromkeys((SegmentDone, SegmentDropped), BUG),
}
_ENDING = dict.fromkeys((Abort, LocalAbort, PairLost, Tick), HANDLE)
_DECIDED = {OfferAccepted: BUG, Refusal: BUG}

RECEIVER_TABLE: Table = {
    UNDECIDED: {
        Offer: IGNORE,
        Announce: REFUSE,
        CommitArrived: REFUSE,
        OfferAccepted: HANDLE,
        Refusal: HANDLE,
        SegmentDone: BUG,
        SegmentDropped: BUG,
        **_ENDING,
    },
    RECEIVING: {
        Offer: IGNORE,
        Announce: HANDLE,
        CommitArrived: HANDLE,
        SegmentDone: HANDLE,
        SegmentDropped: BUG,
        **_DECIDED,
        **_ENDING,
    },
    CHECKING: {
        Offer: IGNORE,
        Announce: REFUSE,
        CommitArrived: IGNORE,
        SegmentDone: HANDLE,
        SegmentDropped: BUG,
        **_DECIDED,
        **_ENDING,
    },
    DRAINING: {**_OVER, SegmentDone: HANDLE, SegmentDropped: HANDLE},
    COMMITTED: {**_OVER, CommitArrived: HANDLE},
    DECLINED: _OVER,
    FAILED: _OVER,
}


class ReceiverSession(TransferSession):
    """Made by an offer; the local side answers it with `OfferAccepted` or `Refusal`, at once or later."""

    table, other_end = RECEIVER_TABLE, "sender"

    def __init__(self, offer: Offer, *, block_bytes: int, settings: KvSettings, now: float) -> None:
        super().__init__(offer.request_id, offer.attempt)
        self.state = UNDECIDED
        self.pair_id = offer.pair_id
        self.blocks = offer.blocks
        self._block_bytes = block_bytes
        self._settings = settings
        self._block_ids: tuple[int, ...] = ()
        self._cached_blocks = 0
        self._next_block = 0
        self._digests: list[bytes | None] = []
        self._targets: dict[int, tuple[int, ...]] = {}
        self._commit: CommitArrived | None = None
        self._prompt: tuple[int, ...] = ()
        self._reason = ""
        self._deadline = now + settings.decide_timeout_ms / 1e3

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The session's target blocks; empty before the offer is accepted."""
        return self._block_ids

    def forget_payload(self) -> None:
        self._block_ids, self._prompt, self._commit, self._digests = (), (), None, []
        self._targets.clear()

    def _apply(self, event: object, now: float) -> list[Action]:
        match event:
            case OfferAccepted():
                return self._accepted(event, now)
            case Refusal():
                return self._refusal(event)
            case Announce():
                return self._announce(event, now)
            case CommitArrived() if self.state == COMMITTED:
                return [self._ack()]
            case CommitArrived():
                return self._commit_arrived(event, now)
            case SegmentDone() if self.state != DRAINING:
                return self._received(event, now)
            case _:
                return super()._apply(event, now)

    # --- from the local side ---

    def _accepted(self, event: OfferAccepted, now: float) -> list[Action]:
        assert len(event.block_ids) == self.blocks, (
            f"{len(event.block_ids)} target blocks for an offer of {self.blocks}"
        )
        assert len(set(event.block_ids)) == self.blocks, "a target block is named twice"
        assert 0 <= event.cached_blocks <= self.blocks, f"{event.cached_blocks} of {self.blocks} blocks are cached"
        self.state = RECEIVING
        self._block_ids = event.block_ids
        self._cached_blocks = self._next_block = event.cached_blocks
        self._progress(now)
        segment_blocks = max(1, self._settings.segment_bytes // self._block_bytes)
        return [SendMessage(Accept(self.request_id, self.attempt, segment_blocks, event.cached_blocks))]

    def _refusal(self, event: Refusal) -> list[Action]:
        self.state = DECLINED
        self._deadline = None
        message = Decline(self.request_id, self.attempt, event.reason[:512])
        return [SendMessage(message), SessionEnded(KvDeclined(self.request_id, self.attempt, event.reason))]

    # --- from the peer ---

    def _announce(self, event: Announce, now: float) -> list[Action]:
        if event.segment != len(self._digests) or event.first_block != self._next_block:
            return self._violation(f"segment {event.segment} from block {event.first_block} is not the next one")
        end, segments = event.first_block + sum(event.blocks), event.segment + len(event.blocks)
        if end > self.blocks or segments > MAX_SEGMENTS:
            return self._violation(f"{segments} segments up to block {end} of {self.blocks}")
        actions: list[Action] = []
        for segment, blocks in enumerate(event.blocks, event.segment):
            target_ids = self._block_ids[self._next_block : self._next_block + blocks]
            self._next_block += blocks
            self._digests.append(None)
            self.in_flight.add(segment)
            self._targets[segment] = target_ids
            actions.append(Receive(segment, target_ids))
        self._progress(now)
        return actions

    def _commit_arrived(self, event: CommitArrived, now: float) -> list[Action]:
        digests = event.commit.digests
        if self._next_block != self.blocks or len(digests) != len(self._digests):
            got = f"{len(self._digests)} with {self._next_block} of {self.blocks} blocks"
            return self._violation(f"a Commit of {len(digests)} segments after {got}")
        try:
            self._prompt = tuple(unpack_tokens(event.blob, event.commit.prompt_tokens))
        except RemoteProtocolError as error:
            return self._violation(str(error))
        self.state = CHECKING
        self._commit = event
        self._progress(now)
        return self._check()

    # --- from the pair, and time ---

    def _received(self, event: SegmentDone, now: float) -> list[Action]:
        self.in_flight.remove(event.segment)
        del self._targets[event.segment]
        self._digests[event.segment] = event.digest
        self._progress(now)
        return self._check() if self.state == CHECKING else []

    def _tick(self, now: float) -> list[Action]:
        if not self._expired(now):
            return []
        if self.state == UNDECIDED:
            reason = "nobody decided on the offer in time"
            return [SendMessage(Decline(self.request_id, self.attempt, reason)), *self._fail(reason, tell_peer=False)]
        return self._fail("timed out waiting for segments or their commit", tell_peer=True)

    # --- inside ---

    def _progress(self, now: float) -> None:
        self._deadline = now + self._settings.idle_timeout_ms / 1e3

    def _check(self) -> list[Action]:
        """Once everything has arrived, commit if all digests equal the sender's, else fail."""
        assert self._commit is not None
        if self.in_flight:
            return []
        promised = self._commit.commit.digests
        for segment, (ours, theirs) in enumerate(zip(self._digests, promised, strict=True)):
            if ours != theirs:
                return self._fail(f"the digest of segment {segment} differs from the sender's", tell_peer=True)
        self.state = COMMITTED
        self._deadline = None
        return [self._ack(), SessionEnded(KvCommitted(self._commit.commit, self._block_ids, self._prompt))]

    def _ack(self) -> SendMessage:
        kv_bytes = (self.blocks - self._cached_blocks) * self._block_bytes
        return SendMessage(Ack(self.request_id, self.attempt, kv_bytes))

    def _fail(self, reason: str, tell_peer: bool) -> list[Action]:
        self._reason = reason
        self._deadline = None
        actions: list[Action] = [SendMessage(Abort(self.request_id, self.attempt, reason[:512]))] if tell_peer else []
        if self.in_flight:
            self.state = DRAINING
            touched = tuple(block for segment in sorted(self._targets) for block in self._targets[segment])
            return [*actions, Quarantine(touched), CancelSegments()]
        return actions + self._over()

    def _over(self) -> list[Action]:
        self.state = FAILED
        return [SessionEnded(KvReceiveFailed(self.request_id, self.attempt, self._block_ids, self._reason))]
