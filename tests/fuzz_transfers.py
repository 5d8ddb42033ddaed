"""Random frames from the other end to the two machines of a KV transfer, whose own thread and worker do as they should. See
`fuzz_cores`."""

import random
from collections import deque
from typing import Any

from kvtransfer.session.limits import KvSettings
from kvtransfer.session.receiver import ReceiverSession
from kvtransfer.session.sender import SenderSession
from kvtransfer.session.session import (
    BlocksReady,
    CancelSegments,
    CommitArrived,
    CommitReady,
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
from proto.codec import decode, to_frames
from proto.errors import RemoteProtocolError
from proto.kv import Abort, Accept, Ack, Announce, Commit, Decline, FirstToken, Offer
from tests.random_messages import RandomMessages

BLOCK_BYTES = 1_000
SETTINGS = KvSettings(segment_bytes=3 * BLOCK_BYTES)
DIGEST = b"d" * 8


class TransferWorld:
    """A new session of either kind whenever one has ended."""

    def __init__(self, seed: int) -> None:
        self.random = source = random.Random(seed)
        self.messages = RandomMessages(
            source,
            {
                "request_id": ("r",),
                "attempt": (1,),
                "blocks": (1, 1, 2, 3, (1,), (3,), (2, 1)),
                "segment": (0, 0, 1, 2),
                "first_block": (0, 0, 3, 6),
                "segment_blocks": (1, 3, 100),
                "cached_blocks": (0, 0, 2, 7),
                "kv_bytes": (0, 1_000, 4_000, 7_000),
                "digests": ((), (DIGEST,), (DIGEST, DIGEST), (b"e" * 8,)),
                "prompt_tokens": (0, 0, 3),
            },
        )
        self.now = 0.0
        self.trail: deque[Any] = deque(maxlen=4)
        self.begin()

    def begin(self) -> None:
        self.blocks = self.random.choice([1, 4, 7])
        self.given, self.committed, self.decided, self.ended = 0, False, False, False
        self.digested: set[int] = set()
        self.sends = self.random.random() < 0.5
        if self.sends:
            sender = SenderSession("r", 1, pair_id=1, blocks=self.blocks, block_bytes=BLOCK_BYTES, settings=SETTINGS)
            self.session: TransferSession = sender
            self.perform(sender.start(self.now))
        else:
            offer = Offer("r", 1, 1, self.blocks)
            self.session = ReceiverSession(offer, block_bytes=BLOCK_BYTES, settings=SETTINGS, now=self.now)

    def step(self) -> None:
        self.now += self.random.choice([0, 0.001, 0.1]) if self.random.random() < 0.98 else 60
        chance = self.random.random()
        if chance < 0.5:
            self.frame()
        elif chance < 0.7 and self.session.in_flight:
            self.thread()
        elif chance < 0.92:
            self.local()
        else:
            self.feed(self.random.choice([Tick(), Tick(), LocalAbort("x" * 600), PairLost("x" * 600)]))
        if self.ended and self.random.random() < 0.2:
            self.begin()

    def end(self) -> None:
        self.feed(PairLost("the end"))
        while self.session.in_flight:
            self.feed(SegmentDropped(min(self.session.in_flight)))
        assert self.ended

    def frame(self) -> None:
        kinds = (
            (Accept, Accept, Decline, Ack, Abort) if self.sends else (Offer, Announce, Announce, Commit, Commit, Abort)
        )
        kind = self.random.choice(kinds)
        fields: dict[str, Any] = {}
        if kind is Announce:
            fields["blocks"] = self.random.choice([(1,), (3,), (2, 1), (1, 1, 1), (1 << 20,)])
        elif kind is Offer:
            fields["blocks"] = self.random.choice([1, 4, 7])
        if kind in (Decline, Abort) and self.random.random() < 0.8:
            return
        made = self.messages.make(kind, **fields)
        try:
            blob = b"\1\0\0\0" * made.prompt_tokens if kind is Commit and made.prompt_tokens < 100 else b""
            message, blob = decode(to_frames(made, blob))
        except RemoteProtocolError:
            return
        self.feed(CommitArrived(message, blob) if isinstance(message, Commit) else message)

    def thread(self) -> None:
        segment = self.random.choice(sorted(self.session.in_flight))
        draining = self.session.state == "draining"
        if draining and self.random.random() < 0.5:
            self.feed(SegmentDropped(segment))
        elif (
            self.sends
            and segment not in self.digested
            and self.session.state == "streaming"
            and self.random.random() < 0.3
        ):
            self.digested.add(segment)
            self.feed(SegmentBegun(segment, DIGEST))
        else:
            self.feed(SegmentDone(segment, DIGEST))

    def local(self) -> None:
        """Prefill goes on, as long as the session does; decode decides."""
        if not self.sends:
            if not self.decided and self.session.state == "undecided":
                self.decided = True
                cached = self.random.choice([0, 0, min(2, self.blocks)])
                taken = OfferAccepted(tuple(range(self.blocks)), cached)
                self.feed(self.random.choice([taken, taken, taken, Refusal("x" * 600)]))
        elif self.given < self.blocks:
            count = self.random.randint(1, self.blocks - self.given)
            self.feed(BlocksReady(self.given, tuple(range(self.given, self.given + count))))
            self.given += count
        elif not self.committed:
            self.committed = True
            self.feed(CommitReady((FirstToken(0, 1),), 0, b""))

    def feed(self, event: object) -> None:
        self.trail.append((self.session.state, event))
        self.perform(self.session.handle(event, self.now))

    def perform(self, actions: list[Any]) -> None:
        for at, action in enumerate(actions):
            if isinstance(action, SendMessage):
                decode(to_frames(action.message, action.blob))
            elif isinstance(action, SendSegment | Receive):
                assert action.segment in self.session.in_flight or not self.session.in_flight
                assert not self.sends or action.block_ids
            elif isinstance(action, CancelSegments):
                assert self.session.in_flight
            elif isinstance(action, SessionEnded):
                assert at == len(actions) - 1 and not self.session.in_flight and not self.ended
                self.ended = True
        self.session.next_deadline()
