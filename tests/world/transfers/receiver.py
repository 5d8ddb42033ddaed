"""The receiving end of simulated transfers; see `transfer`."""

from collections.abc import Callable

import msgspec

from kvtransfer.memory.layout import blocks_of, sub_blocks_of
from kvtransfer.session.receiver import DECLINED, FAILED, ReceiverSession
from kvtransfer.session.session import (
    Action,
    CommitArrived,
    KvCommitted,
    KvReceiveFailed,
    OfferAccepted,
    Quarantine,
    Receive,
    Refusal,
    SessionEnded,
)
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Announce, Commit, Decline, Offer, PairClosed, PairListen, PairOpen
from proto.messages import Message
from tests.world.toy_model import Toy
from tests.world.transfers.connections import PoolProcess, SimulatedPair, TransferJob
from tests.world.transfers.transfer import SETTINGS, TRANSPORT, SimulatedDriver, SimulatedLive, SimulatedRoute


class SimulatedReceiver(SimulatedDriver):
    """As `kvtransfer.receiver.KvReceiver`."""

    def __init__(
        self,
        process: PoolProcess,
        toy: Toy,
        send: Callable[[int, Message, bytes], None],
        *,
        accept: Callable[[int, Offer], OfferAccepted | str | None],
        on_committed: Callable[[int, Commit, list[int], list[int]], None],
        on_failed: Callable[[str, int, list[int]], None],
        on_quarantined: Callable[[str, int, list[int]], None],
    ) -> None:
        super().__init__(process, toy, send)
        self._accept, self._on_committed, self._on_failed = accept, on_committed, on_failed
        self._on_quarantined = on_quarantined

    def decide(self, request_id: str, attempt: int, answer: OfferAccepted | str) -> None:
        live = self._live.get((request_id, attempt))
        if live is not None:
            self._feed(live, _decision(live, answer))

    def handle(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        if isinstance(message, PairOpen):
            self._open(peer_incarnation, message)
        elif isinstance(message, PairClosed):
            route = self._routes.get(peer_incarnation)
            if route is not None and route.pair_id == message.pair_id:
                self._drop(route, f"closed by the sender: {message.reason}", tell_peer=False)
        elif isinstance(message, Offer):
            self._offered(peer_incarnation, message)
        elif isinstance(message, Announce):
            self._announced(peer_incarnation, message)
        elif isinstance(message, Commit | Abort):
            live = self._find(peer_incarnation, (message.request_id, message.attempt))
            if live is not None:
                self._feed(live, CommitArrived(message, blob) if isinstance(message, Commit) else message)
            elif isinstance(message, Commit):
                self._send(peer_incarnation, Abort(message.request_id, message.attempt, "not known here"), b"")
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a KV sender")

    def _open(self, peer_incarnation: int, message: PairOpen) -> None:
        current = self._routes.get(peer_incarnation)
        if current is not None and message.pair_id <= current.pair_id:
            if message.pair_id == current.pair_id and current.listening is not None:
                self._send(peer_incarnation, current.listening, b"")
            return
        if current is not None:
            self._drop(current, "the sender opened another pair", tell_peer=False)
        route = self._routes[peer_incarnation] = SimulatedRoute(
            peer_incarnation, message.pair_id, message.block_size, self.toy.block_size // message.block_size
        )
        route.pair = SimulatedPair(
            self.process,
            self.toy,
            sends=False,
            ratio=route.ratio,
            on_ready=lambda: setattr(route, "listening", None),
            on_segment=lambda job, digest: self._answered(route, job, digest),
            on_down=lambda reason: self._pair_down(route, reason),
        )
        self.process.after(0.001, self._listens, route)

    def _listens(self, route: SimulatedRoute) -> None:
        if not route.dropped:
            assert route.pair is not None
            secret = f"{self.process.incarnation}.{route.peer_incarnation}.{route.pair_id}"
            route.pair.meet(secret)
            route.listening = PairListen(route.pair_id, TRANSPORT, "host", 1, secret, "")
            self._send(route.peer_incarnation, route.listening, b"")

    def _offered(self, peer_incarnation: int, offer: Offer) -> None:
        key = (offer.request_id, offer.attempt)
        known = self._live.get(key) or self._ended.get(key)
        if known is not None and known.route.peer_incarnation == peer_incarnation:
            self._feed(known, offer)
            return
        if known is not None and known.session.state in (DECLINED, FAILED):
            del self._ended[key]
            known = None
        route = self._routes.get(peer_incarnation)
        if known is not None or route is None or route.pair_id != offer.pair_id:
            refusal = "this attempt is another sender's" if known else f"there is no pair {offer.pair_id}"
            self._send(peer_incarnation, Decline(*key, refusal), b"")
            return
        session = ReceiverSession(offer, block_bytes=route.block_bytes, settings=SETTINGS, now=self.process.now())
        live = self._begin(key, session, route)
        answer = self._accept(peer_incarnation, msgspec.structs.replace(offer, blocks=-(-offer.blocks // route.ratio)))
        if answer is None:
            self._arm(live)
        else:
            self._feed(live, _decision(live, answer))

    def _announced(self, peer_incarnation: int, announce: Announce) -> None:
        route = self._routes.get(peer_incarnation)
        if route is None or route.pair_id != announce.pair_id or route.order.is_repeated(announce.sequence):
            return
        assert route.pair is not None
        if not route.order.take(announce.sequence, len(announce.blocks)):
            self.violations += 1
            self._drop(route, f"segment {announce.sequence} of the pair was announced out of order", tell_peer=True)
            return
        jobs = [
            TransferJob(None, announce.segment + at, announce.sequence + at, blocks, None)
            for at, blocks in enumerate(announce.blocks)
        ]
        live = self._find(peer_incarnation, (announce.request_id, announce.attempt))
        if live is not None and live.route is route:
            self._wanted(live, announce, jobs)
        for job in jobs:
            route.pair.submit(job)

    def _wanted(self, live: SimulatedLive, announce: Announce, jobs: list[TransferJob]) -> None:
        for action in live.session.handle(announce, self.process.now()):
            if isinstance(action, Receive):
                job = jobs[action.segment - announce.segment]
                job.owner, job.block_ids = live, action.block_ids
            else:
                self._perform(live, [action])
        if live.key in self._live:
            self._arm(live)

    def _carry_out(self, live: SimulatedLive, action: Action) -> None:
        if isinstance(action, Quarantine):
            self._on_quarantined(*live.key, list(blocks_of(action.block_ids, live.route.ratio)))
            return
        assert live.route.pair is not None
        for job in live.route.pair.jobs_of(live):
            job.block_ids = None

    def _report(self, live: SimulatedLive, ended: SessionEnded) -> None:
        result, ratio = ended.result, live.route.ratio
        if isinstance(result, KvCommitted):
            blocks = list(blocks_of(result.block_ids, ratio))
            self._on_committed(live.route.peer_incarnation, result.commit, blocks, list(result.prompt))
        elif isinstance(result, KvReceiveFailed):
            self._on_failed(result.request_id, result.attempt, list(blocks_of(result.block_ids, ratio)))


def _decision(live: SimulatedLive, answer: OfferAccepted | str) -> OfferAccepted | Refusal:
    """Returns the decision, counted in the blocks that cross."""
    if isinstance(answer, str):
        return Refusal(answer)
    ratio, blocks = live.route.ratio, live.session.blocks
    return OfferAccepted(sub_blocks_of(answer.block_ids, ratio)[:blocks], min(answer.cached_blocks * ratio, blocks))
