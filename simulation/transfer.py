"""KV hand-over between simulated workers: the production sessions under a thin model of their drivers.

`kvtransfer.sender`, `receiver` and `driver` hold tensors, threads and an event loop, so what they do around the sessions is
said again here, in the same order of effects: pairs are opened, used, dropped and told of as there, ended sessions answer late
frames, what is announced is sent and received, a job's blocks are read when the thread gets to it. `pairs.Pair` stands for
the process group and its thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.receiver_session import DECLINED, FAILED, ReceiverSession
from kvtransfer.sender_session import SenderSession
from kvtransfer.session import (
    Accepted,
    Action,
    AnnounceOrder,
    BlocksReady,
    CommitArrived,
    CommitReady,
    Ended,
    KvCommitted,
    KvFailed,
    KvReceiveFailed,
    KvSent,
    LocalAbort,
    PairLost,
    Receive,
    Refusal,
    SegmentDone,
    SegmentDropped,
    Send,
    SendSegment,
    Tick,
    Violation,
)
from kvtransfer.settings import KvSettings
from proto.codec import pack_tokens
from proto.errors import RemoteProtocolError
from proto.kv import (
    Abort,
    Accept,
    Ack,
    Announce,
    Commit,
    Decline,
    FirstToken,
    Offer,
    PairClosed,
    PairListen,
    PairOpen,
)
from proto.messages import Message
from simulation.pairs import Job, Pair
from simulation.toy import Toy
from simulation.world import Process, Timer

BLOCK_BYTES = 1024
SETTINGS = KvSettings(segment_bytes=3 * BLOCK_BYTES)
Key = tuple[str, int]


@dataclass(eq=False)
class Route:
    peer_epoch: int
    pair_id: int
    pair: Pair | None = None
    sessions: "dict[Key, Live]" = field(default_factory=dict)
    timer: Timer | None = None
    dropped: bool = False
    # of a sender's
    waiting: "deque[tuple[Live, SendSegment]]" = field(default_factory=deque)
    ready: bool = False
    announced: int = 0
    # of a receiver's
    order: AnnounceOrder = field(default_factory=AnnounceOrder)
    listening: PairListen | None = None


@dataclass(eq=False)
class Live:
    key: Key
    session: Any
    """A `SenderSession` or a `ReceiverSession`."""
    route: Route
    timer_at: float = 1e18


class Driver:
    """What both ends share; as `kvtransfer.driver.Driver`."""

    def __init__(self, process: Process, toy: Toy, send: Callable[[int, Message, bytes], None]) -> None:
        self.process = process
        self.toy = toy
        self.violations = 0
        self._send = send
        self._live: dict[Key, Live] = {}
        self._ended: dict[Key, Live] = {}
        self._routes: dict[int, Route] = {}

    @property
    def idle(self) -> bool:
        return not self._live

    def peer_lost(self, peer_epoch: int, reason: str) -> None:
        route = self._routes.get(peer_epoch)
        if route is not None:
            self._drop(route, f"peer lost: {reason}", tell_peer=False)

    def abort(self, request_id: str, attempt: int, reason: str) -> None:
        self._feed_known((request_id, attempt), LocalAbort(reason))

    def break_pair(self) -> bool:
        """A fault: the group of one pair fails."""
        for route in self._routes.values():
            if route.pair is not None and not route.pair.is_down:
                route.pair.fail("connection reset")
                return True
        return False

    def _begin(self, key: Key, session: Any, route: Route) -> Live:
        assert key not in self._live and key not in self._ended
        live = self._live[key] = route.sessions[key] = Live(key, session, route)
        return live

    def _find(self, peer_epoch: int, key: Key) -> Live | None:
        live = self._live.get(key) or self._ended.get(key)
        return live if live is not None and live.route.peer_epoch == peer_epoch else None

    def _feed_known(self, key: Key, event: object) -> None:
        live = self._live.get(key)
        if live is not None:
            self._feed(live, event)

    def _feed(self, live: Live, event: object) -> None:
        self._perform(live, live.session.handle(event, self.process.now()))

    def _perform(self, live: Live, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(live.route.peer_epoch, action.message, action.blob)
            elif isinstance(action, Violation):
                self.violations += 1
            elif isinstance(action, Ended):
                self._end(live, action)
            else:
                self._carry_out(live, action)
        if live.key in self._live:
            self._arm(live)

    def _end(self, live: Live, ended: Ended) -> None:
        del self._live[live.key]
        del live.route.sessions[live.key]
        self._ended[live.key] = live
        self._report(live, ended)
        live.session.forget_payload()

    def _arm(self, live: Live) -> None:
        deadline = live.session.next_deadline()
        if deadline is None or live.timer_at <= deadline:
            return
        live.timer_at = deadline
        self.process.after(deadline - self.process.now(), self._ticked, live, deadline)

    def _ticked(self, live: Live, deadline: float) -> None:
        if live.timer_at == deadline and live.key in self._live:
            live.timer_at = 1e18
            self._feed(live, Tick())

    def _answered(self, route: Route, job: Job, digest: bytes | None) -> None:
        if isinstance(job.owner, Live):
            done = SegmentDropped(job.segment) if not digest else SegmentDone(job.segment, digest)
            self._feed(job.owner, done)
        self._segment_freed(route)

    def _pair_down(self, route: Route, reason: str) -> None:
        self._drop(route, f"pair {route.pair_id}: {reason}", tell_peer=True)

    def _drop(self, route: Route, reason: str, tell_peer: bool) -> None:
        if route.dropped:
            return
        route.dropped = True
        if self._routes.get(route.peer_epoch) is route:
            del self._routes[route.peer_epoch]
        if route.timer is not None:
            route.timer.cancel()
        if route.pair is not None:
            route.pair.close()
        if tell_peer:
            self._send(route.peer_epoch, PairClosed(route.pair_id, reason[:512]), b"")
        for live in list(route.sessions.values()):
            self._feed(live, PairLost(reason))

    def _carry_out(self, live: Live, action: Action) -> None:
        raise NotImplementedError

    def _report(self, live: Live, ended: Ended) -> None:
        raise NotImplementedError

    def _segment_freed(self, route: Route) -> None:
        """There is room for another segment on this pair."""


class Sender(Driver):
    """As `kvtransfer.sender.KvSender`."""

    def __init__(
        self,
        process: Process,
        toy: Toy,
        send: Callable[[int, Message, bytes], None],
        on_result: Callable[[KvSent | KvFailed], None],
    ) -> None:
        super().__init__(process, toy, send)
        self._on_result = on_result
        self._last_pair_id = 0

    def open(self, request_id: str, attempt: int, peer_epoch: int, blocks: int) -> None:
        key, route = (request_id, attempt), self._routes.get(peer_epoch)
        if key in self._ended:
            self.process.after(0.0, self._on_result, KvFailed(request_id, attempt, "this attempt was offered before"))
            return
        if route is None:
            self._last_pair_id += 1
            route = self._routes[peer_epoch] = Route(peer_epoch, self._last_pair_id)
            timeout_s = SETTINGS.rendezvous_timeout_ms / 1e3
            route.timer = self.process.after(timeout_s, self._drop, route, "no answer to PairOpen", True)
            self._send(peer_epoch, PairOpen(route.pair_id, SETTINGS.transport), b"")
        session = SenderSession(*key, pair_id=route.pair_id, blocks=blocks, block_bytes=BLOCK_BYTES, settings=SETTINGS)
        live = self._begin(key, session, route)
        self._perform(live, session.start(self.process.now()))

    def blocks_ready(self, request_id: str, attempt: int, first_block: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._feed_known((request_id, attempt), BlocksReady(first_block, tuple(block_ids)))

    def commit(
        self, request_id: str, attempt: int, first_tokens: Sequence[FirstToken], prompt_tokens: Sequence[int]
    ) -> None:
        event = CommitReady(tuple(first_tokens), len(prompt_tokens), pack_tokens(prompt_tokens))
        self._feed_known((request_id, attempt), event)

    def handle(self, peer_epoch: int, message: Message, blob: bytes) -> None:
        if isinstance(message, PairListen):
            self._connect(peer_epoch, message)
        elif isinstance(message, PairClosed):
            route = self._routes.get(peer_epoch)
            if route is not None and route.pair_id == message.pair_id:
                self._drop(route, f"closed by the receiver: {message.reason}", tell_peer=False)
        elif isinstance(message, Accept | Decline | Ack | Abort):
            live = self._find(peer_epoch, (message.request_id, message.attempt))
            if live is not None:
                self._feed(live, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV receiver")

    def _connect(self, peer_epoch: int, message: PairListen) -> None:
        route = self._routes.get(peer_epoch)
        if route is None or route.pair_id != message.pair_id or route.pair is not None:
            return
        if route.timer is not None:
            route.timer.cancel()
        route.pair = Pair(
            self.process,
            self.toy,
            sends=True,
            on_ready=lambda: self._pair_ready(route),
            on_segment=lambda job, digest: self._answered(route, job, digest),
            on_down=lambda reason: self._pair_down(route, reason),
        )
        route.pair.meet(message.secret)

    def _pair_ready(self, route: Route) -> None:
        route.ready = True
        self._pump(route)

    def _segment_freed(self, route: Route) -> None:
        self._pump(route)

    def _pump(self, route: Route) -> None:
        if route.dropped or not route.ready:
            return
        assert route.pair is not None
        while route.waiting and route.pair.queued < SETTINGS.window_segments:
            live, part = route.waiting.popleft()
            sequence, blocks = route.announced, len(part.block_ids)
            route.announced += 1
            announce = Announce(*live.key, route.pair_id, sequence, part.segment, part.first_block, blocks)
            self._send(route.peer_epoch, announce, b"")
            route.pair.submit(Job(live, part.segment, sequence, blocks, part.block_ids))

    def _carry_out(self, live: Live, action: Action) -> None:
        if isinstance(action, SendSegment):
            live.route.waiting.append((live, action))
            self._pump(live.route)
            return
        cancelled = [part for owner, part in live.route.waiting if owner is live]
        live.route.waiting = deque(item for item in live.route.waiting if item[0] is not live)
        for part in cancelled:
            self._feed(live, SegmentDropped(part.segment))

    def _report(self, live: Live, ended: Ended) -> None:
        assert isinstance(ended.result, KvSent | KvFailed)
        self._on_result(ended.result)


class Receiver(Driver):
    """As `kvtransfer.receiver.KvReceiver`."""

    def __init__(
        self,
        process: Process,
        toy: Toy,
        send: Callable[[int, Message, bytes], None],
        *,
        accept: Callable[[int, Offer], Accepted | str | None],
        on_committed: Callable[[int, Commit, list[int], list[int]], None],
        on_failed: Callable[[str, int, list[int]], None],
    ) -> None:
        super().__init__(process, toy, send)
        self._accept, self._on_committed, self._on_failed = accept, on_committed, on_failed

    def decide(self, request_id: str, attempt: int, answer: Accepted | str) -> None:
        self._feed_known((request_id, attempt), Refusal(answer) if isinstance(answer, str) else answer)

    def handle(self, peer_epoch: int, message: Message, blob: bytes) -> None:
        if isinstance(message, PairOpen):
            self._open(peer_epoch, message)
        elif isinstance(message, PairClosed):
            route = self._routes.get(peer_epoch)
            if route is not None and route.pair_id == message.pair_id:
                self._drop(route, f"closed by the sender: {message.reason}", tell_peer=False)
        elif isinstance(message, Offer):
            self._offered(peer_epoch, message)
        elif isinstance(message, Announce):
            self._announced(peer_epoch, message)
        elif isinstance(message, Commit | Abort):
            live = self._find(peer_epoch, (message.request_id, message.attempt))
            if live is not None:
                self._feed(live, CommitArrived(message, blob) if isinstance(message, Commit) else message)
            elif isinstance(message, Commit):
                self._send(peer_epoch, Abort(message.request_id, message.attempt, "not known here"), b"")
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV sender")

    def _open(self, peer_epoch: int, message: PairOpen) -> None:
        current = self._routes.get(peer_epoch)
        if current is not None and message.pair_id <= current.pair_id:
            if message.pair_id == current.pair_id and current.listening is not None:
                self._send(peer_epoch, current.listening, b"")
            return
        if current is not None:
            self._drop(current, "the sender opened another pair", tell_peer=False)
        route = self._routes[peer_epoch] = Route(peer_epoch, message.pair_id)
        route.pair = Pair(
            self.process,
            self.toy,
            sends=False,
            on_ready=lambda: setattr(route, "listening", None),
            on_segment=lambda job, digest: self._answered(route, job, digest),
            on_down=lambda reason: self._pair_down(route, reason),
        )
        self.process.after(0.001, self._listens, route)

    def _listens(self, route: Route) -> None:
        if not route.dropped:
            assert route.pair is not None
            secret = f"{self.process.epoch}.{route.peer_epoch}.{route.pair_id}"
            route.pair.meet(secret)
            route.listening = PairListen(route.pair_id, "host", 1, secret)
            self._send(route.peer_epoch, route.listening, b"")

    def _offered(self, peer_epoch: int, offer: Offer) -> None:
        key = (offer.request_id, offer.attempt)
        known = self._live.get(key) or self._ended.get(key)
        if known is not None and known.route.peer_epoch == peer_epoch:
            self._feed(known, offer)
            return
        if known is not None and known.session.state in (DECLINED, FAILED):
            del self._ended[key]
            known = None
        route = self._routes.get(peer_epoch)
        if known is not None or route is None or route.pair_id != offer.pair_id:
            refusal = "this attempt is another sender's" if known else f"there is no pair {offer.pair_id}"
            self._send(peer_epoch, Decline(*key, refusal), b"")
            return
        session = ReceiverSession(offer, block_bytes=BLOCK_BYTES, settings=SETTINGS, now=self.process.now())
        live = self._begin(key, session, route)
        answer = self._accept(peer_epoch, offer)
        if answer is None:
            self._arm(live)
        else:
            self._feed(live, Refusal(answer) if isinstance(answer, str) else answer)

    def _announced(self, peer_epoch: int, announce: Announce) -> None:
        route = self._routes.get(peer_epoch)
        if route is None or route.pair_id != announce.pair_id or route.order.is_repeated(announce.sequence):
            return
        assert route.pair is not None
        if not route.order.take(announce.sequence):
            self.violations += 1
            self._drop(route, f"segment {announce.sequence} of the pair was announced out of order", tell_peer=True)
            return
        job = Job(None, announce.segment, announce.sequence, announce.blocks, None)
        live = self._find(peer_epoch, (announce.request_id, announce.attempt))
        if live is not None and live.route is route:
            self._wanted(live, announce, job)
        route.pair.submit(job)

    def _wanted(self, live: Live, announce: Announce, job: Job) -> None:
        for action in live.session.handle(announce, self.process.now()):
            if isinstance(action, Receive):
                job.owner, job.block_ids = live, action.block_ids
            else:
                self._perform(live, [action])
        if live.key in self._live:
            self._arm(live)

    def _carry_out(self, live: Live, action: Action) -> None:
        assert live.route.pair is not None
        for job in live.route.pair.jobs_of(live):
            job.block_ids = None

    def _report(self, live: Live, ended: Ended) -> None:
        result = ended.result
        if isinstance(result, KvCommitted):
            self._on_committed(live.route.peer_epoch, result.commit, list(result.block_ids), list(result.prompt))
        elif isinstance(result, KvReceiveFailed):
            self._on_failed(result.request_id, result.attempt, list(result.block_ids))
