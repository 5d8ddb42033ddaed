"""The receiver's end: accepts offers, receives KV into blocks of its pool, and hands the blocks to the worker once the KV is
verified."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from kvtransfer.driver import TransferDriver
from kvtransfer.memory.layout import KvLayout, blocks_of, sub_blocks_of
from kvtransfer.peer import KvPeer
from kvtransfer.ports import ReceiverOwner
from kvtransfer.rate_limiter import ByteBucket, RateLimiter
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.receiver import DECLINED, FAILED, ReceiverSession
from kvtransfer.session.session import (
    Action,
    CancelSegments,
    CommitArrived,
    KvCommitted,
    KvDeclined,
    KvReceiveFailed,
    OfferAccepted,
    Quarantine,
    Receive,
    Receiving,
    Refusal,
    SessionEnded,
)
from kvtransfer.transports.pair import Listen
from kvtransfer.transports.registry import usable
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.transport import MAX_QUEUED_SEGMENTS, PoolMemory, Rendezvous, SegmentJob
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Announce, Commit, Decline, Offer, PairClosed, PairListen, PairOpen
from proto.messages import Message


class KvReceiver(TransferDriver[ReceiverSession]):
    """One per worker. All methods run on the event loop. `ReceiverOwner` says how offers end."""

    def __init__(
        self,
        *,
        layout: KvLayout,
        pool: torch.Tensor | Sequence[torch.Tensor],
        incarnation: int,
        clock: Callable[[], float],
        listen_host: str,
        owner: ReceiverOwner,
        settings: KvSettings,
        memory: PoolMemory | None = None,
    ) -> None:
        """`pool` is [blocks, *layout.block_shape]; `ValueError` if not, or if `listen_host` is not one address of
        this host. `memory` is the memory that holds the pool from its first byte on, if other processes may map it."""
        if listen_host in ("", "*", "0.0.0.0", "::"):
            raise ValueError(
                f"KV must be received on one address, not on {listen_host!r}: the rendezvous knows no passwords"
            )
        super().__init__(layout, pool, incarnation, clock, owner, settings, listen_host, memory)
        self.counters["strangers"] = 0
        self._owner = owner
        self._tcp_listener = TcpListener(listen_host, self._turned_away)
        if settings.bytes_per_s:
            bucket = ByteBucket(settings.bytes_per_s, settings.burst_bytes)
            self._rate_limiter = RateLimiter(bucket, settings.segment_timeout_ms / 4e3, clock, owner.is_busy)

    def _turned_away(self, reason: str) -> None:
        """Runs in the listener's thread, the only one that changes this counter."""
        self.counters["strangers"] += 1
        self._owner.turned_away(reason)

    # --- from the worker ---

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None:
        """Answer an offer that was left undecided. Ignored if the offer has failed in the meantime."""
        session = self._live.get((request_id, attempt))
        if session is not None:
            self._feed(session, self._decision(session, answer))

    def receiving(self) -> list[Receiving]:
        return [
            Receiving(*key, session.peer.incarnation, session.state, blocks_of(sub_blocks, session.peer.rows.ratio))
            for key, session in self._live.items()
            if (sub_blocks := session.block_ids)
        ]

    # --- from the sender ---

    def handle(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Handle a frame from this sender. Raises `RemoteProtocolError` for a type of frame that senders do not send."""
        if isinstance(message, PairOpen):
            self._open(peer_incarnation, message)
        elif isinstance(message, PairClosed):
            peer = self._peers.get(peer_incarnation)
            if peer is not None and peer.pair_id == message.pair_id:
                self._drop(peer, f"closed by the sender: {message.reason}", tell_peer=False)
        elif isinstance(message, Offer):
            self._offered(peer_incarnation, message)
        elif isinstance(message, Announce):
            self._announced(peer_incarnation, message)
        elif isinstance(message, Commit):
            session = self._find(peer_incarnation, (message.request_id, message.attempt))
            if session is not None:
                self._feed(session, CommitArrived(message, blob))
            else:
                self._send(
                    peer_incarnation, Abort(message.request_id, message.attempt, "this transfer is not known here"), b""
                )
        elif isinstance(message, Abort):
            session = self._find(peer_incarnation, (message.request_id, message.attempt))
            if session is not None:
                self._feed(session, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV sender")

    # --- pairs ---

    def _open(self, peer_incarnation: int, message: PairOpen) -> None:
        current = self._peers.get(peer_incarnation)
        if current is not None and message.pair_id < current.pair_id:
            return
        if current is not None and message.pair_id == current.pair_id:
            self._meet_again(current, message)
            return
        if current is not None:
            self._drop(current, "the sender opened another pair", tell_peer=False)
        refusal = ""
        if self._closed:
            refusal = "shutting down"
        elif not self._has_room(new_pair=True):
            refusal = "too many pairs"
        elif self.layout.block_size % message.block_size:
            refusal = f"block size differs: {self.layout.block_size} here is no multiple of {message.block_size}"
        if refusal:
            self._send(peer_incarnation, PairClosed(message.pair_id, refusal[:512]), b"")
            return
        self._make_room(message.transports)
        self._peers[peer_incarnation] = KvPeer(peer_incarnation, message.pair_id, self._rows_of(message.block_size), ())
        self._meet(self._peers[peer_incarnation], message)

    def _meet_again(self, peer: KvPeer, message: PairOpen) -> None:
        """Handle a repeated `PairOpen`. The sender repeats its proposal, or it could not meet by the chosen transport and
        proposes the remaining ones."""
        if message.transports == peer.offered:
            if peer.listening is not None:
                self._send(peer.incarnation, peer.listening, b"")
        elif peer.order.is_fresh and self._has_room(new_pair=False) and len(self._pairs) < self._settings.pairs_max:
            assert peer.pair is not None
            peer.pair.close()
            self._meet(peer, message)

    def _meet(self, peer: KvPeer, message: PairOpen) -> None:
        same_host = message.host_id == self._host_id
        peer.encrypt = self._settings.encrypt or message.encrypt
        names, why = usable(self._local_of(peer), message.transports, self._settings.transports, same_host)
        peer.offered, peer.listening, peer.ready = message.transports, None, False
        if not names:
            self._drop(peer, f"no transport that both can use: {why}", tell_peer=True)
            return
        self._give_time_to_meet(peer, "the sender did not come to the rendezvous")
        peer.transport = names[0]
        self._start_pair(peer, Listen(tuple(names), why, lambda meeting: self._listens(peer, meeting)))

    def _listens(self, peer: KvPeer, meeting: Rendezvous) -> None:
        if not peer.dropped and meeting.transport in peer.offered:
            peer.transport, peer.why = meeting.transport, meeting.why
            peer.listening = PairListen(
                peer.pair_id,
                meeting.transport,
                meeting.host,
                meeting.port,
                meeting.secret,
                meeting.why,
                meeting.token,
                meeting.key,
                meeting.encrypted,
            )
            self._send(peer.incarnation, peer.listening, b"")

    def _pair_broke(self, peer: KvPeer, reason: str) -> None:
        if peer.ready or not peer.order.is_fresh or peer.listening is None:
            # The sender must be told if no transport could listen; otherwise it would wait for an answer that never comes.
            super()._pair_broke(peer, reason)
        else:
            # The sender notices the failure too and proposes other transports. Until then the timer runs.
            peer.listening = None

    def _pair_ready(self, peer: KvPeer) -> None:
        super()._pair_ready(peer)
        peer.listening = None

    # --- offers and segments ---

    def _offered(self, peer_incarnation: int, offer: Offer) -> None:
        key = (offer.request_id, offer.attempt)
        known = self._live.get(key) or self._ended.get(key)
        if known is not None and known.peer.incarnation == peer_incarnation:
            self._feed(known, offer)
            return
        if known is not None and known.state in (DECLINED, FAILED):
            del self._ended[
                key
            ]  # another sender tries the same attempt again; later frames of the first sender are stale
            known = None
        peer = self._peers.get(peer_incarnation)
        refusal = ""
        if known is not None:
            refusal = "this attempt is another sender's"
        elif peer is None or peer.pair_id != offer.pair_id:
            refusal = f"there is no pair {offer.pair_id}"
        elif not self._has_room(new_pair=False):
            refusal = "too many transfers at once"
        if refusal or peer is None:
            self._send(peer_incarnation, Decline(*key, refusal), b"")
            return
        session = ReceiverSession(
            offer, block_bytes=peer.rows.layout.block_bytes, settings=self._settings, now=self._clock()
        )
        self._begin(session, peer)
        answer = self._owner.offered(
            peer_incarnation, msgspec.structs.replace(offer, blocks=-(-offer.blocks // peer.rows.ratio))
        )
        if answer is None:
            self._arm(session)
        else:
            self._feed(session, self._decision(session, answer))

    def _decision(self, session: ReceiverSession, answer: OfferAccepted | str) -> OfferAccepted | Refusal:
        if isinstance(answer, str):
            return Refusal(answer)
        self._rows.check(answer.block_ids)
        ratio, blocks = session.peer.rows.ratio, session.blocks
        assert len(answer.block_ids) == -(-blocks // ratio), (
            f"{len(answer.block_ids)} blocks for {blocks} parts of them"
        )
        return OfferAccepted(sub_blocks_of(answer.block_ids, ratio)[:blocks], min(answer.cached_blocks * ratio, blocks))

    def _announced(self, peer_incarnation: int, announce: Announce) -> None:
        """Submit the announced segments to the pair. Unwanted segments are submitted too, because the data plane has no other
        way to skip them."""
        peer = self._peers.get(peer_incarnation)
        if peer is None or peer.pair_id != announce.pair_id or peer.order.is_repeated(announce.sequence):
            self.counters["stale_frames"] += 1
            return
        assert peer.pair is not None
        fault, most = "", max(announce.blocks)
        if most > self._segment_blocks(peer):
            fault = f"a segment of {most} blocks where {self._segment_blocks(peer)} fit"
        elif peer.pair.is_down or not (peer.ready or peer.listening):
            fault = f"segment {announce.sequence} was announced before the two had met"
        elif peer.pair.queued + len(announce.blocks) > MAX_QUEUED_SEGMENTS:
            fault = f"more than {MAX_QUEUED_SEGMENTS} segments announced at once"
        elif not peer.order.take(announce.sequence, len(announce.blocks)):
            fault = f"segment {announce.sequence} of the pair was announced out of order"
        if fault:
            self.counters["violations"] += 1
            self._drop(peer, f"the sender broke the protocol: {fault}", tell_peer=True)
            return
        jobs = [
            SegmentJob(None, announce.segment + at, announce.sequence + at, blocks, None)
            for at, blocks in enumerate(announce.blocks)
        ]
        session = self._find(peer_incarnation, (announce.request_id, announce.attempt))
        if session is not None and session.peer is peer:
            self._wanted(session, announce, jobs)
        peer.pair.submit(*jobs)

    def _wanted(self, session: ReceiverSession, announce: Announce, jobs: list[SegmentJob]) -> None:
        """Ask the session for the target blocks of the segments. A session that has ended, or ends now, names none."""
        for action in session.handle(announce, self._clock()):
            if isinstance(action, Receive):
                job = jobs[action.segment - announce.segment]
                job.owner, job.block_ids = session, action.block_ids
            else:
                self._perform(session, [action])
        if session.key in self._live:
            self._arm(session)

    def _carry_out(self, session: ReceiverSession, action: Action) -> None:
        if isinstance(action, Quarantine):
            self._owner.in_doubt(*session.key, list(blocks_of(action.block_ids, session.peer.rows.ratio)))
            return
        assert isinstance(action, CancelSegments)
        assert session.peer.pair is not None
        session.peer.pair.cancel(session)

    def _report(self, session: ReceiverSession, ended: SessionEnded) -> None:
        result, ratio = ended.result, session.peer.rows.ratio
        if isinstance(result, KvCommitted):
            block_ids = list(blocks_of(result.block_ids, ratio))
            self._owner.committed(session.peer.incarnation, result.commit, block_ids, list(result.prompt))
        elif isinstance(result, KvReceiveFailed):
            self.counters["sessions_failed"] += 1
            block_ids = list(blocks_of(result.block_ids, ratio))
            self._owner.not_received(result.request_id, result.attempt, block_ids, result.reason)
        else:
            assert isinstance(result, KvDeclined)
            self.counters["sessions_declined"] += 1
