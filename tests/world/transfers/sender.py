"""The sending end of simulated transfers; see `transfer`."""

from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.memory.layout import sub_blocks_of
from kvtransfer.session.sender import SenderSession, announcement, next_parts
from kvtransfer.session.session import (
    Action,
    BlocksReady,
    CommitReady,
    KvFailed,
    KvSent,
    SegmentBegun,
    SegmentDropped,
    SendSegment,
    SessionEnded,
)
from proto.codec import pack_tokens
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Accept, Ack, Decline, FirstToken, PairClosed, PairListen, PairOpen
from proto.messages import Message
from tests.world.toy_model import Toy
from tests.world.transfers.connections import PoolProcess, SimulatedPair, TransferJob, digest
from tests.world.transfers.transfer import SETTINGS, SimulatedDriver, SimulatedLive, SimulatedRoute


class SimulatedSender(SimulatedDriver):
    """As `kvtransfer.sender.KvSender`."""

    def __init__(
        self,
        process: PoolProcess,
        toy: Toy,
        send: Callable[[int, Message, bytes], None],
        on_result: Callable[[KvSent | KvFailed], None],
    ) -> None:
        super().__init__(process, toy, send)
        self._on_result = on_result
        self._last_pair_id = 0
        self._digests_early = process.world.random.random() < 0.5
        """True as for KV in host memory; otherwise digests are made in sending."""

    def open(self, request_id: str, attempt: int, peer_incarnation: int, blocks: int, block_size: int) -> None:
        key, route = (request_id, attempt), self._routes.get(peer_incarnation)
        if key in self._ended:
            self.process.after(0.0, self._on_result, KvFailed(request_id, attempt, "this attempt was offered before"))
            return
        if route is None:
            self._last_pair_id += 1
            ratio = self.toy.block_size // block_size
            route = self._routes[peer_incarnation] = SimulatedRoute(
                peer_incarnation, self._last_pair_id, block_size, ratio
            )
            timeout_s = SETTINGS.rendezvous_timeout_ms / 1e3
            route.timer = self.process.after(timeout_s, self._drop, route, "no answer to PairOpen", True)
            self._send(peer_incarnation, PairOpen(route.pair_id, SETTINGS.transports, block_size, ""), b"")
        session = SenderSession(
            *key, pair_id=route.pair_id, blocks=blocks, block_bytes=route.block_bytes, settings=SETTINGS
        )
        live = self._begin(key, session, route)
        self._perform(live, session.start(self.process.now()))

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        live = self._live.get((request_id, attempt))
        if block_ids and live is not None:
            first = first_block * live.route.ratio
            sub_blocks = sub_blocks_of(block_ids, live.route.ratio)[: live.session.blocks - first]
            self._feed(live, BlocksReady(first, sub_blocks))

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None:
        event = CommitReady(tuple(first_tokens), len(prompt_tokens), pack_tokens(prompt_tokens))
        self._feed_known((request_id, attempt), event)

    def handle(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        if isinstance(message, PairListen):
            self._connect(peer_incarnation, message)
        elif isinstance(message, PairClosed):
            route = self._routes.get(peer_incarnation)
            if route is not None and route.pair_id == message.pair_id:
                self._drop(route, f"closed by the receiver: {message.reason}", tell_peer=False)
        elif isinstance(message, Accept | Decline | Ack | Abort):
            live = self._find(peer_incarnation, (message.request_id, message.attempt))
            if live is not None:
                self._feed(live, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV receiver")

    def _connect(self, peer_incarnation: int, message: PairListen) -> None:
        route = self._routes.get(peer_incarnation)
        if route is None or route.pair_id != message.pair_id or route.pair is not None:
            return
        if route.timer is not None:
            route.timer.cancel()
        route.pair = SimulatedPair(
            self.process,
            self.toy,
            sends=True,
            ratio=route.ratio,
            on_ready=lambda: self._pair_ready(route),
            on_segment=lambda job, made: self._answered(route, job, made),
            on_down=lambda reason: self._pair_down(route, reason),
        )
        route.pair.meet(message.secret)

    def _pair_ready(self, route: SimulatedRoute) -> None:
        route.ready = True
        self._pump(route)

    def _segment_freed(self, route: SimulatedRoute) -> None:
        self._pump(route)

    def _pump(self, route: SimulatedRoute) -> None:
        if route.dropped or not route.ready:
            return
        assert route.pair is not None
        while route.waiting and (room := SETTINGS.window_segments - route.pair.queued) > 0:
            self._announce(*next_parts(route.waiting, room))

    def _announce(self, live: SimulatedLive, parts: list[SendSegment]) -> None:
        route = live.route
        assert route.pair is not None
        self._send(route.peer_incarnation, announcement(live.key, route.pair_id, route.announced, parts), b"")
        for sequence, part in enumerate(parts, route.announced):
            route.pair.submit(TransferJob(live, part.segment, sequence, len(part.block_ids), part.block_ids))
        route.announced += len(parts)
        for part in parts:
            if self._digests_early and route.ratio == 1:
                self._feed(live, SegmentBegun(part.segment, digest(self.toy.packed(part.block_ids, 1))))

    def _perform(self, live: SimulatedLive, actions: list[Action]) -> None:
        super()._perform(live, actions)
        if any(isinstance(action, SendSegment) for action in actions):
            self._pump(live.route)

    def _carry_out(self, live: SimulatedLive, action: Action) -> None:
        if isinstance(action, SendSegment):
            live.route.waiting.append((live, action))
            return
        cancelled = [part for owner, part in live.route.waiting if owner is live]
        live.route.waiting = deque(item for item in live.route.waiting if item[0] is not live)
        for part in cancelled:
            self._feed(live, SegmentDropped(part.segment))

    def _report(self, live: SimulatedLive, ended: SessionEnded) -> None:
        assert isinstance(ended.result, KvSent | KvFailed)
        self._on_result(ended.result)
