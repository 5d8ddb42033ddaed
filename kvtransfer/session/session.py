"""One hand-over of KV blocks as two pure state machines per (request, attempt): `SenderSession` on the sender,
`ReceiverSession` on the receiver.

    sender:    OFFERED ──Accept──▶ STREAMING ──digests known, commit asked──▶ COMMITTING ──Ack──▶ SENT
    receiver:  UNDECIDED ──accept──▶ RECEIVING ──Commit──▶ CHECKING ──all received, digests equal──▶ COMMITTED
                   └──────refuse──▶ DECLINED
    either:    any state before the last ──abort, loss, timeout, violation──▶ DRAINING ──nothing in flight──▶ FAILED
    sender:    COMMITTING ──Ack──▶ DRAINING ──nothing in flight──▶ SENT, where the Ack is faster than our own thread's word

Rules:
1. A session ends exactly once, with one `SessionEnded`. SENT, COMMITTED, DECLINED and FAILED are final.
2. The receiver gives its blocks out only from CHECKING, when every segment it was promised has arrived and every digest equals
   the sender's. The sender's SENT therefore implies the receiver's COMMITTED. The reverse does not hold: if an Ack is lost,
   the sender reports a failure, and the coordinator decides.
3. `SendSegment` and `Receive` are each answered by exactly one `SegmentDone` or `SegmentDropped`, and until then the
   transfer thread may touch the blocks. A session that fails with segments in flight waits in DRAINING, which has no
   deadline on purpose: only the answers prove the blocks untouched, and the thread's own timeouts bound them.
4. Frames that are late or repeated are ignored. A frame that no correct peer sends in this state is a violation: it is counted
   and fails only this session. A local event that cannot happen in this state fails an assertion.
5. The Commit follows the last announcement. If the digests were made with the KV, the Commit is sent while the segments are
   still in flight.
6. Accept says once how many blocks the receiver already has. Both ends count segments and bytes from there on.
7. Each machine opens with its table: state × event → HANDLE (in `_apply`), IGNORE, REFUSE (a violation) or BUG.

The segments of all sessions of one pair share its order. `AnnounceOrder` keeps it on the receiver.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proto.kv import Abort, Commit, FirstToken
from proto.messages import Message

HANDLE: Final = "handle"
IGNORE: Final = "ignore"
REFUSE: Final = "refuse"
BUG: Final = "bug"

Table = Mapping[str, Mapping[type, str]]


# --- events, besides the frames of proto/kv.py ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """These blocks of the local pool hold the prompt's blocks from `first_block` on, and change no more."""

    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitReady:
    """The whole prompt is computed and its first tokens are drawn. `prompt` is packed token ids, or empty."""

    first_tokens: tuple[FirstToken, ...]
    prompt_tokens: int
    prompt: bytes


@dataclass(frozen=True, slots=True)
class SegmentBegun:
    """A segment was announced, and its `digest` was already known."""

    segment: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A segment was sent, or received and copied to its blocks; `digest` is what this side has."""

    segment: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SegmentDropped:
    """A segment was not transferred, and never will be."""

    segment: int


@dataclass(frozen=True, slots=True)
class OfferAccepted:
    """The local side accepts the offer with these blocks of its pool. The first `cached_blocks` already hold their KV and are
    never written to. The caller must not change them until the session has ended."""

    block_ids: tuple[int, ...]
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str


@dataclass(frozen=True, slots=True)
class CommitArrived:
    commit: Commit
    blob: bytes


@dataclass(frozen=True, slots=True)
class LocalAbort:
    reason: str


@dataclass(frozen=True, slots=True)
class PairLost:
    """The pair that carries this session is gone, or the peer is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


# --- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    message: Message
    blob: bytes = b""


@dataclass(frozen=True, slots=True)
class SendSegment:
    """Announce and send these blocks of the local pool, after all that came before on the pair."""

    segment: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the segment just announced and copy it to these blocks of the local pool."""

    segment: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelSegments:
    """Segments in flight are no longer wanted. The driver answers each one as soon as its blocks are no longer touched."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The session has failed, and these blocks may still be written to until its result is reported."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    reason: str


@dataclass(frozen=True, slots=True)
class KvSent:
    """The receiver has verified and owns the KV; the sender's blocks are free to be reused.

    `transfer_ms` runs from `commit` to the acknowledgement: the part that was not hidden under prefill.
    """

    request_id: str
    attempt: int
    kv_bytes: int
    transfer_ms: float


@dataclass(frozen=True, slots=True)
class KvFailed:
    """The hand-over did not happen (or was not acknowledged), and nothing reads the sender's blocks any more."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class KvCommitted:
    """The KV in `block_ids` is whole and verified. `prompt` is the prompt's token ids, or empty."""

    commit: Commit
    block_ids: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvReceiveFailed:
    """The hand-over failed, and nothing writes to `block_ids` any more. They are empty if the offer was never accepted."""

    request_id: str
    attempt: int
    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class KvDeclined:
    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The one result of this session. Always the last action of its list."""

    result: KvSent | KvFailed | KvCommitted | KvReceiveFailed | KvDeclined


Action = SendMessage | SendSegment | Receive | CancelSegments | Quarantine | Violation | SessionEnded


@dataclass(frozen=True, slots=True)
class Receiving:
    """A session that has target blocks, as it stands."""

    request_id: str
    attempt: int
    peer_incarnation: int
    state: str
    block_ids: tuple[int, ...]


# --- what both machines share ---------------------------------------------------------------------------------------


class TransferSession:
    """Dispatch by table, the deadline, and the set of segments in flight.

    Its driver keeps its connection and timer here. Block ids are those of the connection: sub-blocks, if the peer's blocks
    are smaller than ours.
    """

    table: Table
    other_end: str  # its name in reasons
    state: str
    blocks: int
    peer: Any
    timer: Any = None
    timer_at = 0.0
    ended_at = 0.0

    def __init__(self, request_id: str, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.in_flight: set[int] = set()
        self._deadline: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    def handle(self, event: object, now: float) -> list[Action]:
        """Handle one event and return the actions to carry out, in order. `now` is in seconds and never goes back."""
        rule = self.table[self.state].get(type(event), BUG)
        assert rule != BUG, f"{type(event).__name__} cannot happen to a session that is {self.state}"
        if rule == IGNORE:
            return []
        if rule == REFUSE:
            return self._violation(f"{type(event).__name__} to a session that is {self.state}")
        return self._apply(event, now)

    def forget_payload(self) -> None:
        """Drop blocks, prompt and digests. Called once the session's result is reported: the ended session is kept only to
        answer late frames."""

    def next_deadline(self) -> float | None:
        """When a `Tick` is due, in seconds of the `now` given to `handle`; None if nothing is waited for."""
        return self._deadline

    def _apply(self, event: object, now: float) -> list[Action]:
        """Handle an event that the table allows. This base method handles the events that both machines treat alike."""
        match event:
            case SegmentDone() | SegmentDropped():  # of a session that is draining
                self.in_flight.remove(event.segment)
                return [] if self.in_flight else self._over()
            case Abort():
                return self._fail(f"aborted by the {self.other_end}: {event.reason}", tell_peer=False)
            case LocalAbort():
                return self._fail(event.reason, tell_peer=True)
            case PairLost():
                return self._fail(event.reason, tell_peer=False)
            case Tick():
                return self._tick(now)
        raise AssertionError(f"nothing handles a {type(event).__name__}")

    def _over(self) -> list[Action]:
        """Nothing is in flight any more: report the result."""
        raise NotImplementedError

    def _tick(self, now: float) -> list[Action]:
        raise NotImplementedError

    def _violation(self, reason: str) -> list[Action]:
        return [Violation(reason), *self._fail(f"the peer broke the protocol: {reason}", tell_peer=True)]

    def _fail(self, reason: str, tell_peer: bool) -> list[Action]:
        raise NotImplementedError

    def _expired(self, now: float) -> bool:
        return self._deadline is not None and now >= self._deadline


class AnnounceOrder:
    """Decides whether an announcement is the pair's next one, a repeated one, or one after a gap."""

    def __init__(self) -> None:
        self._next = 0

    @property
    def is_fresh(self) -> bool:
        """Nothing was announced yet."""
        return self._next == 0

    def is_repeated(self, sequence: int) -> bool:
        return sequence < self._next

    def take(self, sequence: int, count: int) -> bool:
        """Accept the next announcement and count its `count` segments. Returns False if `sequence` is not the next one."""
        if sequence != self._next:
            return False
        self._next += count
        return True
