"""The sender's end: offers finished KV to decode workers and sends it while the next chunk computes."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch

from kvtransfer.driver import TransferDriver
from kvtransfer.memory.digests import BlockDigests
from kvtransfer.memory.layout import KvLayout, sub_blocks_of
from kvtransfer.owners import SenderOwner
from kvtransfer.route import Live, Route
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


@dataclass(slots=True, eq=False)
class _Outgoing(Route):
    """The route to one receiver. Segments of all its sessions are sent in the order in which they became ready."""

    waiting: "deque[tuple[_Live, SendSegment]]" = field(default_factory=deque)
    announced: int = 0


_Live = Live[SenderSession, _Outgoing]


class KvSender(TransferDriver[SenderSession, _Outgoing]):
    """One per worker. All methods run on the event loop; every `open` ends in exactly one `SenderOwner.sent`."""

    def __init__(
        self,
        *,
        layout: KvLayout,
        pool: torch.Tensor,
        incarnation: int,
        clock: Callable[[], float],
        owner: SenderOwner,
        settings: KvSettings,
        own_peers: Container[int] = (),
    ) -> None:
        """`pool` is [blocks, *layout.block_shape]; `ValueError` if not. `own_peers` are receivers in this process."""
        super().__init__(layout, pool, incarnation, clock, owner, settings)
        self._digests = BlockDigests(self._rows) if self._rows.is_flat and settings.remembers_digests else None
        self._owner = owner
        self._own_peers = own_peers
        self._last_pair_id = 0
        self._choice = TransportChoice(
            suited(settings.transports, pool.device.type), settings.demote_ms, settings.demote_max_ms
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
        route = self._current_route(peer_incarnation)
        repeated = (request_id, attempt) in self._ended
        block_size = block_size or self.layout.block_size
        reason = ""
        if repeated:
            reason = "this attempt was offered before"
        elif self._closed:
            reason = "shutting down"
        elif not self._has_room(new_pair=route is None):
            reason = "too many transfers at once"
        elif self.layout.block_size % block_size:
            reason = f"block size differs: {self.layout.block_size} here is no multiple of {block_size}"
        elif route is not None and route.rows.layout.block_size != block_size:
            reason = f"blocks of {block_size} tokens on a pair for those of {route.rows.layout.block_size}"
        if reason:
            # Reported in a later callback: a caller that opens again on failure would otherwise recurse without end.
            self._loop.call_soon(self._owner.sent, KvFailed(request_id, attempt, reason))
            return
        if route is None:
            route = self._open_route(peer_incarnation, block_size)
        session = SenderSession(
            request_id,
            attempt,
            pair_id=route.pair_id,
            blocks=blocks,
            block_bytes=route.rows.layout.block_bytes,
            settings=self._settings,
        )
        live = self._begin((request_id, attempt), session, route)
        self._perform(live, session.start(self._clock()))

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Report that the prompt's blocks from `first_block` on are final and lie in these blocks of the pool. Each call
        continues where the one before ended. Block ids refer to blocks of our own size.

        Calls after the session's result are ignored, as are those of `commit` and `abort`.
        """
        live = self._live.get((request_id, attempt))
        if block_ids and live is not None:
            self._rows.check(block_ids)
            ratio = live.route.rows.ratio
            first = first_block * ratio
            sub_blocks = (
                sub_blocks_of(block_ids, ratio)[: live.session.blocks - first] if ratio > 1 else tuple(block_ids)
            )
            self._feed(live, BlocksReady(first, sub_blocks))

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
        """Returns the transport of each pair that is ready."""
        return [
            PairState(incarnation, route.transport, route.why)
            for incarnation, route in self._routes.items()
            if route.ready
        ]

    # --- from the receiver ---

    def handle(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        """Handle a frame from this receiver. Raises `RemoteProtocolError` for a type of frame that receivers do not send."""
        if isinstance(message, PairListen):
            self._connect(peer_incarnation, message)
        elif isinstance(message, PairClosed):
            route = self._routes.get(peer_incarnation)
            if route is not None and route.pair_id == message.pair_id:
                if route.transport and (
                    route.sessions or not route.ready
                ):  # an idle one may be given up for its memory
                    self._choice.broke(peer_incarnation, route.transport, message.reason, self._clock())
                self._drop(route, f"closed by the receiver: {message.reason}", tell_peer=False)
        elif isinstance(message, Accept | Decline | Ack | Abort):
            live = self._find(peer_incarnation, (message.request_id, message.attempt))
            if live is not None:
                self._feed(live, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV receiver")

    # --- pairs ---

    def _current_route(self, peer_incarnation: int) -> _Outgoing | None:
        """Returns the current route, if any. If it is idle and a better transport may be tried again, drops it and returns
        None."""
        route = self._routes.get(peer_incarnation)
        if route is None or not route.ready or route.sessions:
            return route
        if not self._choice.better_is_due(peer_incarnation, route.transport, self._clock()):
            return route
        self._drop(route, "a better transport is tried again", tell_peer=True)
        return None

    def _open_route(self, peer_incarnation: int, block_size: int) -> _Outgoing:
        self._last_pair_id += 1
        transports = self._choice.proposal(peer_incarnation, self._clock())
        if peer_incarnation in self._own_peers:
            transports = within_process(transports) or within_process(self._settings.transports)
        self._make_room(transports)
        route = _Outgoing(peer_incarnation, self._last_pair_id, self._rows_of(block_size), transports)
        self._routes[peer_incarnation] = route
        self._propose(route)
        return route

    def _propose(self, route: _Outgoing) -> None:
        self._give_time_to_meet(route, "no answer to PairOpen")
        message = PairOpen(
            route.pair_id, route.offered, route.rows.layout.block_size, self._host_id, self._settings.encrypt
        )
        self._send(route.peer_incarnation, message, b"")

    def _drop(self, route: _Outgoing, reason: str, tell_peer: bool) -> None:
        was_ready = route.ready and not route.dropped
        super()._drop(route, reason, tell_peer)
        if was_ready:
            self._owner.pairs_changed()

    def _connect(self, peer_incarnation: int, message: PairListen) -> None:
        route = self._routes.get(peer_incarnation)
        if route is None or route.pair_id != message.pair_id or route.pair is not None:
            self.counters["stale_frames"] += 1
        elif message.transport not in route.offered:
            self.counters["stale_frames"] += 1  # tried already, and the receiver does not know yet
        else:
            self._stop_timer(route)
            route.transport = message.transport
            demoted = self._choice.why_not_better(peer_incarnation, message.transport, self._clock())
            route.why = "; ".join(filter(None, (message.why, demoted)))
            route.encrypt = self._settings.encrypt
            meeting = Rendezvous(
                message.transport,
                message.host,
                message.port,
                message.secret,
                token=message.token,
                key=message.key,
                encrypted=message.encrypted,
            )
            self._start_pair(route, meeting)

    def _pair_ready(self, route: _Outgoing) -> None:
        super()._pair_ready(route)
        self._owner.pairs_changed()
        self._pump(route)

    def _pair_broke(self, route: _Outgoing, reason: str) -> None:
        self._choice.broke(route.peer_incarnation, route.transport, reason, self._clock())
        route.offered = tuple(name for name in route.offered if name != route.transport)
        if route.ready or not route.offered:
            super()._pair_broke(route, reason)
            return
        # No segment was announced yet, so the ends can meet by another transport without any effect on the sessions.
        assert route.pair is not None
        self.counters[f"broken_{route.transport}"] += 1
        route.pair.close()
        route.pair, route.transport = None, ""
        self._propose(route)

    def _segments_freed(self, route: _Outgoing) -> None:
        self._pump(route)

    def _window(self, route: _Outgoing) -> int:
        """Returns how many segments may be in flight at once."""
        if TRANSPORTS[route.transport].skips_unwanted:
            return WINDOW_SEGMENTS_MAX
        segment_bytes = self._segment_blocks(route) * route.rows.layout.block_bytes
        small = min(WINDOW_SEGMENTS_MAX, self._settings.window_bytes // segment_bytes)
        return max(self._settings.window_segments, small)

    def _pump(self, route: _Outgoing) -> None:
        """Announce and send waiting segments until the pair's window is full. Several are announced together, because a
        message about one segment costs both event loops as much as one about ten."""
        if route.dropped or not route.ready or not route.waiting:
            return
        assert route.pair is not None
        window = self._window(route)
        if route.pair.queued > window // 2:
            return
        if not route.pair.queued:
            # Send the first few at once, while the others are prepared.
            self._announce(*next_parts(route.waiting, min(window, _FIRST_SEGMENTS)))
            self._loop.call_soon(self._pump, route)
            return
        while route.waiting and (room := window - route.pair.queued) > 0:
            self._announce(*next_parts(route.waiting, room))

    def _announce(self, live: _Live, parts: list[SendSegment]) -> None:
        """Announce and submit consecutive segments. The session is told only after all are submitted, because it may then send
        more."""
        route = live.route
        assert route.pair is not None
        self._send(route.peer_incarnation, announcement(live.key, route.pair_id, route.announced, parts), b"")
        digests = self._digests_of(route)
        known = [b"" if digests is None else digests.known(part.block_ids) for part in parts]
        route.pair.submit(
            *(
                SegmentJob(live, part.segment, sequence, len(part.block_ids), part.block_ids, digest)
                for sequence, (part, digest) in enumerate(zip(parts, known, strict=True), route.announced)
            )
        )
        route.announced += len(parts)
        self._feed(live, *(SegmentBegun(part.segment, d) for part, d in zip(parts, known, strict=True) if d))

    # --- actions ---

    def _perform(self, live: _Live, actions: list[Action]) -> None:
        super()._perform(live, actions)
        if any(isinstance(action, SendSegment) for action in actions):
            self._pump(live.route)

    def _carry_out(self, live: _Live, action: Action) -> None:
        if isinstance(action, SendSegment):
            live.route.waiting.append((live, action))
        else:
            assert isinstance(action, CancelSegments)
            self._cancel_waiting(live)

    def _cancel_waiting(self, live: _Live) -> None:
        """Drop the session's segments that are not announced yet. Announced segments must be sent, because the receiver waits
        for them."""
        cancelled = [part for owner, part in live.route.waiting if owner is live]
        live.route.waiting = deque(item for item in live.route.waiting if item[0] is not live)
        for part in cancelled:
            self._feed(live, SegmentDropped(part.segment))

    def _report(self, live: _Live, ended: SessionEnded) -> None:
        result = ended.result
        assert isinstance(result, KvSent | KvFailed)
        if isinstance(result, KvFailed):
            self.counters["sessions_failed"] += 1
        else:
            self._choice.worked(live.route.peer_incarnation, live.route.transport, self._clock())
        self._owner.sent(result)
