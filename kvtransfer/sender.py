"""The sender's end: offers finished KV to decode workers and sends it while the next chunk computes."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from kvtransfer.driver import TransferDriver
from kvtransfer.memory.digests import BlockDigests
from kvtransfer.memory.layout import KvLayout, sub_blocks_of
from kvtransfer.peer import KvPeer
from kvtransfer.ports import SenderOwner
from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX, KvSettings
from kvtransfer.session.sender import SenderSession, announcement, next_parts
from kvtransfer.session.session import (
    Action,
    BlocksReady,
    CancelSegments,
    CommitReady,
    KvFailed,
    KvSent,
    SegmentBegun,
    SegmentDropped,
    SendSegment,
    SessionEnded,
)
from kvtransfer.transport_choice import TransportChoice
from kvtransfer.transports.registry import TRANSPORTS, suited, within_process
from kvtransfer.transports.transport import Rendezvous, SegmentJob
from proto.codec import pack_tokens
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Accept, Ack, Decline, FirstToken, PairClosed, PairListen, PairOpen
from proto.messages import Message

_FIRST_SEGMENTS = 4  # announced to an idle pair, before any others


@dataclass(frozen=True, slots=True)
class PairState:
    """The transport that a pair uses, and the reason against better ones (empty: none)."""

    peer_incarnation: int
    transport: str
    why: str


class KvSender(TransferDriver[SenderSession]):
    """One per worker. All methods run on the event loop; every `open` ends in exactly one `SenderOwner.sent`."""

    def __init__(
        self,
        *,
        layout: KvLayout,
        pool: torch.Tensor | Sequence[torch.Tensor],
        incarnation: int,
        clock: Callable[[], float],
        owner: SenderOwner,
        settings: KvSettings,
        own_peers: Container[int] = (),
    ) -> None:
        """`pool` is [blocks, *layout.block_shape], or the pools of ranks (`RankRows`); `ValueError` if not. `own_peers` are
        receivers in this process."""
        super().__init__(layout, pool, incarnation, clock, owner, settings)
        self._digests = BlockDigests(self._rows) if self._rows.is_flat and settings.remembers_digests else None
        self._owner = owner
        self._own_peers = own_peers
        self._last_pair_id = 0
        self._choice = TransportChoice(
            suited(settings.transports, self._rows.device.type), settings.demote_ms, settings.demote_max_ms
        )

    # --- from the worker ---

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int = 0) -> None:
        """Offer `blocks` blocks of KV, which need not be ready yet. Opens a pair with the receiver if there is none.

        `blocks` counts blocks of `block_size` tokens: the smaller of the two ends' sizes, which must divide our own (0: our
        own size). So the prompt's last block, if it is partly filled, may count as fewer of these.

        Called when the request is placed, so that the rendezvous and the receiver's decision overlap the prefill. If there is
        no room for another transfer, `SenderOwner.sent` soon reports the failure. The same happens for a (request_id, attempt)
        that was opened before: an attempt is offered only once.
        """
        peer = self._current_peer(peer_incarnation)
        repeated = (request_id, attempt) in self._ended
        block_size = block_size or self.layout.block_size
        reason = ""
        if repeated:
            reason = "this attempt was offered before"
        elif self._closed:
            reason = "shutting down"
        elif not self._has_room(new_pair=peer is None):
            reason = "too many transfers at once"
        elif self.layout.block_size % block_size:
            reason = f"block size differs: {self.layout.block_size} here is no multiple of {block_size}"
        elif peer is not None and peer.rows.layout.block_size != block_size:
            reason = f"blocks of {block_size} tokens on a pair for those of {peer.rows.layout.block_size}"
        if reason:
            # Reported in a later callback: a caller that opens again on failure would otherwise recurse without end.
            self._loop.call_soon(self._owner.sent, KvFailed(request_id, attempt, reason))
            return
        if peer is None:
            peer = self._open_pair(peer_incarnation, block_size)
        session = SenderSession(
            request_id,
            attempt,
            pair_id=peer.pair_id,
            blocks=blocks,
            block_bytes=peer.rows.layout.block_bytes,
            settings=self._settings,
        )
        self._begin(session, peer)
        self._perform(session, session.start(self._clock()))

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Report that the prompt's blocks from `first_block` on are final and lie in these blocks of the pool. Each call
        continues where the one before ended. Block ids refer to blocks of our own size.

        Calls after the session's result are ignored, as are those of `commit` and `abort`.
        """
        session = self._live.get((request_id, attempt))
        if block_ids and session is not None:
            self._rows.check(block_ids)
            ratio = session.peer.rows.ratio
            first = first_block * ratio
            sub_blocks = sub_blocks_of(block_ids, ratio)[: session.blocks - first] if ratio > 1 else tuple(block_ids)
            self._feed(session, BlocksReady(first, sub_blocks))

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None:
        """Report that all blocks are ready. `prompt_tokens` are the prompt's token ids if decode needs them, else empty."""
        event = CommitReady(tuple(first_tokens), len(prompt_tokens), pack_tokens(prompt_tokens))
        self._feed_known((request_id, attempt), event)

    def digest(self, block_ids: Sequence[int]) -> None:
        """Make digests of these blocks, which were computed and are final. The thread that computed them must call this before
        they can be sent: the receiver then commits only the KV that was computed. Does nothing on a GPU (`digests`)."""
        if self._digests is not None:
            self._digests.make(block_ids)

    def received(self, block_ids: Sequence[int]) -> None:
        """Forget the digests of these blocks: they now hold KV that another worker computed."""
        if self._digests is not None:
            self._digests.forget(block_ids)

    def transports(self) -> list[PairState]:
        return [
            PairState(incarnation, peer.transport, peer.why) for incarnation, peer in self._peers.items() if peer.ready
        ]

    # --- from the receiver ---

    def handle(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Handle a frame from this receiver. Raises `RemoteProtocolError` for a type of frame that receivers do not send."""
        if isinstance(message, PairListen):
            self._connect(peer_incarnation, message)
        elif isinstance(message, PairClosed):
            peer = self._peers.get(peer_incarnation)
            if peer is not None and peer.pair_id == message.pair_id:
                if peer.transport and (peer.sessions or not peer.ready):  # an idle one may be given up for its memory
                    self._choice.broke(peer_incarnation, peer.transport, message.reason, self._clock())
                self._drop(peer, f"closed by the receiver: {message.reason}", tell_peer=False)
        elif isinstance(message, Accept | Decline | Ack | Abort):
            session = self._find(peer_incarnation, (message.request_id, message.attempt))
            if session is not None:
                self._feed(session, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV receiver")

    # --- pairs ---

    def _current_peer(self, peer_incarnation: int) -> KvPeer | None:
        """Returns the current peer, if any. If it is idle and a better transport may be tried again, drops it and returns
        None."""
        peer = self._peers.get(peer_incarnation)
        if peer is None or not peer.ready or peer.sessions:
            return peer
        if not self._choice.better_is_due(peer_incarnation, peer.transport, self._clock()):
            return peer
        self._drop(peer, "a better transport is tried again", tell_peer=True)
        return None

    def _open_pair(self, peer_incarnation: int, block_size: int) -> KvPeer:
        self._last_pair_id += 1
        transports = self._choice.proposal(peer_incarnation, self._clock())
        if peer_incarnation in self._own_peers:
            transports = within_process(transports) or within_process(self._settings.transports)
        self._make_room(transports)
        peer = KvPeer(peer_incarnation, self._last_pair_id, self._rows_of(block_size), transports)
        self._peers[peer_incarnation] = peer
        self._propose(peer)
        return peer

    def _propose(self, peer: KvPeer) -> None:
        self._give_time_to_meet(peer, "no answer to PairOpen")
        message = PairOpen(
            peer.pair_id, peer.offered, peer.rows.layout.block_size, self._host_id, self._settings.encrypt
        )
        self._send(peer.incarnation, message, b"")

    def _drop(self, peer: KvPeer, reason: str, tell_peer: bool) -> None:
        was_ready = peer.ready and not peer.dropped
        super()._drop(peer, reason, tell_peer)
        if was_ready:
            self._owner.pairs_changed()

    def _connect(self, peer_incarnation: int, message: PairListen) -> None:
        peer = self._peers.get(peer_incarnation)
        if peer is None or peer.pair_id != message.pair_id or peer.pair is not None:
            self.counters["stale_frames"] += 1
        elif message.transport not in peer.offered:
            self.counters["stale_frames"] += 1  # tried already, and the receiver does not know yet
        else:
            self._stop_timer(peer)
            peer.transport = message.transport
            demoted = self._choice.why_not_better(peer_incarnation, message.transport, self._clock())
            peer.why = "; ".join(filter(None, (message.why, demoted)))
            peer.encrypt = self._settings.encrypt
            meeting = Rendezvous(
                message.transport,
                message.host,
                message.port,
                message.secret,
                token=message.token,
                key=message.key,
                encrypted=message.encrypted,
            )
            self._start_pair(peer, meeting)

    def _pair_ready(self, peer: KvPeer) -> None:
        super()._pair_ready(peer)
        self._owner.pairs_changed()
        self._pump(peer)

    def _pair_broke(self, peer: KvPeer, reason: str) -> None:
        self._choice.broke(peer.incarnation, peer.transport, reason, self._clock())
        peer.offered = tuple(name for name in peer.offered if name != peer.transport)
        if peer.ready or not peer.offered:
            super()._pair_broke(peer, reason)
            return
        # No segment was announced yet, so the ends can meet by another transport without any effect on the sessions.
        assert peer.pair is not None
        self.counters[f"broken_{peer.transport}"] += 1
        peer.pair.close()
        peer.pair, peer.transport = None, ""
        self._propose(peer)

    def _segments_freed(self, peer: KvPeer) -> None:
        self._pump(peer)

    def _window(self, peer: KvPeer) -> int:
        if TRANSPORTS[peer.transport].skips_unwanted:
            return WINDOW_SEGMENTS_MAX
        segment_bytes = self._segment_blocks(peer) * peer.rows.layout.block_bytes
        small = min(WINDOW_SEGMENTS_MAX, self._settings.window_bytes // segment_bytes)
        return max(self._settings.window_segments, small)

    def _pump(self, peer: KvPeer) -> None:
        """Announce and send waiting segments until the pair's window is full. Several are announced together, because a
        message about one segment costs both event loops as much as one about ten."""
        if peer.dropped or not peer.ready or not peer.waiting:
            return
        assert peer.pair is not None
        window = self._window(peer)
        if peer.pair.queued > window // 2:
            return
        if not peer.pair.queued:
            # Send the first few at once, while the others are prepared.
            self._announce(*next_parts(peer.waiting, min(window, _FIRST_SEGMENTS)))
            self._loop.call_soon(self._pump, peer)
            return
        while peer.waiting and (room := window - peer.pair.queued) > 0:
            self._announce(*next_parts(peer.waiting, room))

    def _announce(self, session: SenderSession, parts: list[SendSegment]) -> None:
        """Announce and submit consecutive segments. The session is told only after all are submitted, because it may then send
        more."""
        peer = session.peer
        assert peer.pair is not None
        self._send(peer.incarnation, announcement(session.key, peer.pair_id, peer.announced, parts), b"")
        digests = self._digests_of(peer)
        known = [b"" if digests is None else digests.known(part.block_ids) for part in parts]
        peer.pair.submit(
            *(
                SegmentJob(session, part.segment, sequence, len(part.block_ids), part.block_ids, digest)
                for sequence, (part, digest) in enumerate(zip(parts, known, strict=True), peer.announced)
            )
        )
        peer.announced += len(parts)
        self._feed(session, *(SegmentBegun(part.segment, d) for part, d in zip(parts, known, strict=True) if d))

    # --- actions ---

    def _perform(self, session: SenderSession, actions: list[Action]) -> None:
        super()._perform(session, actions)
        if any(isinstance(action, SendSegment) for action in actions):
            self._pump(session.peer)

    def _carry_out(self, session: SenderSession, action: Action) -> None:
        if isinstance(action, SendSegment):
            session.peer.waiting.append((session, action))
        else:
            assert isinstance(action, CancelSegments)
            self._cancel_waiting(session)

    def _cancel_waiting(self, session: SenderSession) -> None:
        """Drop the session's segments that are not announced yet. Announced segments must be sent, because the receiver waits
        for them."""
        cancelled = [part for owner, part in session.peer.waiting if owner is session]
        session.peer.waiting = deque(item for item in session.peer.waiting if item[0] is not session)
        for part in cancelled:
            self._feed(session, SegmentDropped(part.segment))

    def _report(self, session: SenderSession, ended: SessionEnded) -> None:
        result = ended.result
        assert isinstance(result, KvSent | KvFailed)
        if isinstance(result, KvFailed):
            self.counters["sessions_failed"] += 1
        else:
            self._choice.worked(session.peer.incarnation, session.peer.transport, self._clock())
        self._owner.sent(result)
