"""A seeded world for one hand-over: both machines, a faulty control link, a data plane in announced order, time."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtransfer.session.limits import KvSettings
from kvtransfer.session.receiver import ReceiverSession
from kvtransfer.session.sender import SenderSession
from kvtransfer.session.session import (
    Action,
    AnnounceOrder,
    BlocksReady,
    CancelSegments,
    CommitArrived,
    CommitReady,
    KvCommitted,
    KvFailed,
    KvReceiveFailed,
    KvSent,
    LocalAbort,
    OfferAccepted,
    PairLost,
    Receive,
    Refusal,
    SegmentBegun,
    SegmentDone,
    SegmentDropped,
    SendMessage,
    SendSegment,
    SessionEnded,
    Tick,
    TransferSession,
)
from proto.kv import Announce, Commit, FirstToken, Offer
from proto.messages import Message

BLOCK_BYTES = 1_000
SETTINGS = KvSettings(segment_bytes=3 * BLOCK_BYTES)
JUNK = -1


@dataclass
class Faults:
    """Chances, per frame or per step."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    abort: float = 0.0
    lose_pair: float = 0.0
    refuse: float = 0.0
    skip_time: float = 0.0


@dataclass
class World:
    seed: int
    faults: Faults
    now: float = 0.0
    to_receiver: list[tuple[Message, bytes]] = field(default_factory=list)
    to_sender: list[tuple[Message, bytes]] = field(default_factory=list)
    waiting: list[SendSegment] = field(default_factory=list)  # not announced yet
    sending: list[SendSegment] = field(default_factory=list)
    receiving: list[tuple[int, tuple[int, ...] | None]] = field(default_factory=list)
    """Segments announced, each with where it goes."""
    answers: list[SegmentDone] = field(default_factory=list)
    """What the sender's thread has said and its loop has not heard."""
    sender_results: list[KvSent | KvFailed] = field(default_factory=list)
    receiver_results: list[object] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)  # target block → the source block it holds
    pair_is_up: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.blocks = self.random.randint(1, 12)
        self.source = self.random.sample(range(100), self.blocks)
        self.target = self.random.sample(range(100), self.blocks)
        self.cached = self.random.choice([0, self.random.randint(0, self.blocks)])
        """The receiver has so many of the first blocks already."""
        self.written.update(zip(self.target[: self.cached], self.source[: self.cached], strict=True))
        self.digested_early = self.random.choice([0.0, 0.5, 1.0])
        """The chance of a segment whose digest is known before it is sent."""
        self.given = 0
        self.announced = 0
        self.order = AnnounceOrder()
        self.sender = SenderSession("r", 1, pair_id=1, blocks=self.blocks, block_bytes=BLOCK_BYTES, settings=SETTINGS)
        self.receiver: ReceiverSession | None = None
        self.perform(self.sender, self.sender.start(self.now))

    # --- one step ---

    def run(self, steps: int) -> None:
        """Random steps, then time runs out for whoever still waits."""
        moves: list[Callable[[], None]] = [
            self.deliver,
            self.deliver,
            self.move_data,
            self.move_data,
            self.answer,
            self.answer,
            self.local,
            self.fault,
        ]
        for _ in range(steps):
            self.now += 0.001
            self.random.choice(moves)()
        for _ in range(20):
            self.expire()
        if self.sender.in_flight or (self.receiver is not None and self.receiver.in_flight):
            self.lose_pair()  # the threads' own timeouts

    def deliver(self) -> None:
        queue = self.random.choice([self.to_receiver, self.to_sender])
        if not queue:
            return
        at = self.random.randrange(len(queue)) if self.chance(self.faults.reorder) else 0
        message, blob = queue[at] if self.chance(self.faults.repeat) else queue.pop(at)
        if self.chance(self.faults.drop):
            return
        if queue is self.to_sender:
            self.feed(self.sender, message)
        else:
            self.at_receiver(message, blob)

    def at_receiver(self, message: Message, blob: bytes) -> None:
        if isinstance(message, Offer) and self.receiver is None:
            self.receiver = ReceiverSession(message, block_bytes=BLOCK_BYTES, settings=SETTINGS, now=self.now)
            if not self.pair_is_up:
                self.feed(self.receiver, PairLost("there is no pair"))
        elif isinstance(message, Announce):
            self.announce(message)
        elif self.receiver is not None:
            self.feed(self.receiver, CommitArrived(message, blob) if isinstance(message, Commit) else message)

    def announce(self, message: Announce) -> None:
        if not self.pair_is_up or self.order.is_repeated(message.sequence):
            return
        if not self.order.take(message.sequence, len(message.blocks)):
            self.lose_pair()
            return
        self.receiving += [(message.segment + at, None) for at in range(len(message.blocks))]
        if self.receiver is not None:
            self.feed(self.receiver, message)

    def move_data(self) -> None:
        """The next segment crosses once both ends are at it."""
        if not (self.pair_is_up and self.sending and self.receiving):
            return
        part, (segment, block_ids) = self.sending.pop(0), self.receiving.pop(0)
        assert part.segment == segment
        content = list(part.block_ids)
        if self.chance(self.faults.corrupt):
            content[0] = JUNK
        if block_ids is not None:
            assert self.receiver is not None
            assert not set(block_ids) & set(self.target[: self.cached]), "a block that others share is written to"
            self.written.update(zip(block_ids, content, strict=True))
            self.feed(self.receiver, SegmentDone(segment, digest(content)))
        elif self.receiver is not None and segment in self.receiver.in_flight:
            self.feed(self.receiver, SegmentDropped(segment))
        self.answers.append(SegmentDone(part.segment, digest(part.block_ids)))

    def answer(self) -> None:
        if self.answers:
            self.feed(self.sender, self.answers.pop(0))

    def local(self) -> None:
        """Prefill goes on; decode decides."""
        if self.receiver is not None and self.receiver.state == "undecided":
            refuses = self.chance(self.faults.refuse)
            self.feed(self.receiver, Refusal("no") if refuses else OfferAccepted(tuple(self.target), self.cached))
        elif self.sender.state == "committing" or self.given > self.blocks:
            return
        elif self.given < self.blocks:
            count = self.random.randint(1, self.blocks - self.given)
            ids = tuple(self.source[self.given : self.given + count])
            self.feed(self.sender, BlocksReady(self.given, ids))
            self.given += count
        else:
            self.given += 1
            self.feed(self.sender, CommitReady((FirstToken(0, 1),), 0, b""))

    def fault(self) -> None:
        if self.chance(self.faults.abort):
            self.feed(self.sender, LocalAbort("cancelled"))
        if self.chance(self.faults.abort) and self.receiver is not None:
            self.feed(self.receiver, LocalAbort("cancelled"))
        if self.chance(self.faults.lose_pair):
            self.lose_pair()
        if self.chance(self.faults.skip_time):
            self.expire()

    def expire(self) -> None:
        deadlines = [s.next_deadline() for s in (self.sender, self.receiver) if s is not None]
        self.now = max([self.now, *(deadline for deadline in deadlines if deadline is not None)])
        for session in (self.sender, self.receiver):
            if session is not None:
                self.feed(session, Tick())

    def lose_pair(self) -> None:
        self.pair_is_up = False
        for session in (self.sender, self.receiver):
            if session is not None:
                self.feed(session, PairLost("broken"))
                for segment in sorted(session.in_flight):
                    self.feed(session, SegmentDropped(segment))
        self.waiting.clear()
        self.sending.clear()
        self.receiving.clear()
        self.answers.clear()

    # --- actions ---

    def feed(self, session: TransferSession, event: object) -> None:
        self.perform(session, session.handle(event, self.now))

    def perform(self, session: TransferSession, actions: list[Action]) -> None:
        for at, action in enumerate(actions):
            if isinstance(action, SendMessage):
                queue = self.to_receiver if session is self.sender else self.to_sender
                queue.append((action.message, action.blob))
            elif isinstance(action, SendSegment):
                self.waiting.append(action)
            elif isinstance(action, Receive):
                place = next(i for i, (segment, _) in enumerate(self.receiving) if segment == action.segment)
                self.receiving[place] = (action.segment, action.block_ids)
            elif isinstance(action, CancelSegments) and session is self.receiver:
                self.receiving = [(segment, None) for segment, _ in self.receiving]
            elif isinstance(action, SessionEnded):
                assert at == len(actions) - 1, "the result is not the last action"
                assert not session.in_flight, "a result while a thread may touch the blocks"
                results = self.sender_results if session is self.sender else self.receiver_results
                results.append(action.result)  # type: ignore[arg-type]
                if isinstance(action.result, KvReceiveFailed):
                    assert action.result.block_ids in ((), tuple(self.target))
        self.send_segments()

    def send_segments(self) -> None:
        """All that wait, in one announcement or in several."""
        while self.waiting and self.pair_is_up:
            count = self.random.randint(1, len(self.waiting))
            parts, self.waiting = self.waiting[:count], self.waiting[count:]
            self.sending += parts
            counts = tuple(len(part.block_ids) for part in parts)
            message = Announce("r", 1, 1, self.announced, parts[0].segment, parts[0].first_block, counts)
            self.to_receiver.append((message, b""))
            self.announced += count
            for part in parts:
                if self.chance(self.digested_early):
                    self.feed(self.sender, SegmentBegun(part.segment, digest(part.block_ids)))

    # --- what must hold ---

    def check(self) -> None:
        assert len(self.sender_results) == 1, self.sender_results
        assert len(self.receiver_results) == (self.receiver is not None), self.receiver_results
        committed = [result for result in self.receiver_results if isinstance(result, KvCommitted)]
        if isinstance(self.sender_results[0], KvSent):
            assert self.sender_results[0].kv_bytes == (self.blocks - self.cached) * BLOCK_BYTES
            assert committed, "the sender was told that the KV arrived, and it did not"
        for result in committed:
            assert result.block_ids == tuple(self.target)
            assert [self.written.get(block) for block in self.target] == self.source

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


def digest(content: Iterable[int]) -> bytes:
    return (hash(tuple(content)) & (1 << 64) - 1).to_bytes(8, "little")
