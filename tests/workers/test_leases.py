"""A decode worker's blocks through random lives of attempts and transfers: who holds which is known after every step."""

import random

import pytest

from decode_worker.requests import Phase
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.receiver import ReceiverSession
from kvtransfer.session.session import (
    Action,
    CommitArrived,
    KvCommitted,
    KvReceiveFailed,
    LocalAbort,
    OfferAccepted,
    PairLost,
    Quarantine,
    Receiving,
    SegmentDone,
    SegmentDropped,
    SessionEnded,
)
from proto.errors import Interrupt
from proto.kv import Abort, Announce, Commit, FirstToken, Offer
from proto.messages import Released, WorkFailed
from tests.workers.leases import check_invariants, leases
from tests.workers.test_batch import BLOCK, STOP_TOKEN, World, reserve

PEER = 9
DIGEST = b"12345678"


class LeaseWorld:
    """Reservations, offers, segments, commits, steps, ends and losses, in any order that can happen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(pool=40)
        self.table = self.world.table
        self.sessions: dict[tuple[str, int], ReceiverSession] = {}
        self.made = 0
        self.quarantines = 0

    def receiving(self) -> list[Receiving]:
        return [
            Receiving(*key, PEER, session.state, session.block_ids)
            for key, session in self.sessions.items()
            if session.block_ids
        ]

    def step(self) -> None:
        self.random.choice(
            [self.begin, self.announce, self.announce, self.land, self.land, self.commit, self.run, self.run, self.end]
        )()
        check_invariants(self.table, self.receiving())

    def begin(self) -> None:
        self.made += 1
        tokens, text = self.random.randint(1, 30), self.random.choice([None, 1, 2])
        order = reserve(f"r{self.made}", tokens, choices=self.random.choice([1, 1, 2]), text=text)
        self.table.reserve(order)
        blocks = -(-tokens // BLOCK)
        answer = self.table.target_blocks((order.request_id, 1), PEER, blocks)
        if not isinstance(answer, OfferAccepted):
            attempt = self.table.attempts[(order.request_id, 1)]
            self.table.close(attempt, Released(*attempt.key))
            return
        offer = Offer(order.request_id, 1, 1, blocks)
        session = ReceiverSession(offer, block_bytes=1, settings=KvSettings(segment_bytes=3), now=0.0)
        self.sessions[(order.request_id, 1)] = session
        self.feed(session, answer)

    def pick(self, *states: str) -> ReceiverSession | None:
        found = [session for session in self.sessions.values() if session.state in states]
        return self.random.choice(found) if found else None

    def announce(self) -> None:
        session = self.pick("receiving")
        if session is not None and session._next_block < session.blocks:
            count = min(3, session.blocks - session._next_block)
            segment = len(session._digests)
            self.feed(session, Announce(session.request_id, 1, 1, segment, segment, session._next_block, (count,)))

    def land(self) -> None:
        session = self.pick("receiving", "checking", "draining")
        if session is not None and session.in_flight:
            segment = self.random.choice(sorted(session.in_flight))
            dropped = session.state == "draining" and self.random.random() < 0.5
            digest = DIGEST if self.random.random() < 0.9 else b"corrupt!"
            self.feed(session, SegmentDropped(segment) if dropped else SegmentDone(segment, digest))

    def commit(self) -> None:
        session = self.pick("receiving")
        if session is not None and session._next_block == session.blocks:
            order = self.table.attempts[(session.request_id, 1)].order
            first = tuple(FirstToken(choice, 5) for choice in range(order.choices))
            message = Commit(session.request_id, 1, (DIGEST,) * len(session._digests), 0, first)
            self.feed(session, CommitArrived(message, b""))

    def run(self) -> None:
        self.world.step(STOP_TOKEN if self.random.random() < 0.2 else 50)
        for stuck in self.world.stuck:
            attempt = self.table.attempts[stuck[0].key]
            attempt.final_report = WorkFailed(*attempt.key, Interrupt.PREEMPTED, "")
            self.table.ended(stuck)
        self.world.stuck.clear()

    def end(self) -> None:
        """A release from the coordinator, an abort of the sender, the loss of its link, or of everybody's."""
        if self.random.random() < 0.5 and self.table.attempts:
            attempt = self.random.choice(list(self.table.attempts.values()))
            self.table.close(attempt, Released(*attempt.key))
            if attempt.phase is Phase.RECEIVING:
                self.feed(self.sessions[attempt.key], LocalAbort("released"))
            return
        session = self.pick("receiving", "checking", "draining")
        if session is not None:
            everybody = list(self.sessions.values()) if self.random.random() < 0.3 else [session]
            event = Abort(session.request_id, 1, "no more") if len(everybody) == 1 else PairLost("no heartbeat")
            for each in everybody:
                self.feed(each, event)

    def feed(self, session: ReceiverSession, event: object) -> None:
        for action in session.handle(event, 0.0):
            self.carry_out(session, action)

    def carry_out(self, session: ReceiverSession, action: Action) -> None:
        key = (session.request_id, session.attempt)
        if isinstance(action, Quarantine):
            self.quarantines += 1
            self.table.quarantine(key, list(action.block_ids))
        elif isinstance(action, SessionEnded):
            del self.sessions[key]
            attempt = self.table.attempts.get(key)
            if isinstance(action.result, KvReceiveFailed):
                self.table.received_nothing(key, list(action.result.block_ids), Released(*key))
            elif isinstance(action.result, KvCommitted):
                if attempt is None or attempt.final_report is not None:
                    self.table.received_nothing(key, list(action.result.block_ids), Released(*key))
                else:
                    self.world.commit(attempt.order, list(action.result.block_ids))

    def drain(self) -> None:
        """Everybody lets go; what was in flight is proven to be over."""
        for session in list(self.sessions.values()):
            self.feed(session, PairLost("the end"))
            for segment in sorted(session.in_flight):
                self.feed(session, SegmentDropped(segment))
                check_invariants(self.table, self.receiving())
        for attempt in list(self.table.attempts.values()):
            self.table.close(attempt, Released(*attempt.key))
        self.world.step()
        check_invariants(self.table, self.receiving())


@pytest.mark.parametrize("seed", range(12))
def test_every_block_always_has_a_holder(seed: int) -> None:
    """Each block has its holder after every step of a random run, and all blocks are free at the end."""
    world = LeaseWorld(seed)
    for _ in range(300):
        world.step()
    world.drain()
    allocator = world.table.allocator
    assert not world.sessions and not world.table.attempts and world.quarantines
    assert allocator.free_count + allocator.cached_count == allocator.total
    assert leases(world.table, world.receiving()) == []


def test_quarantined_block_names_its_holder() -> None:
    """A block of a lost pair stays quarantined, is given to no other attempt and is listed with its holder."""
    world = LeaseWorld(0)
    order = reserve("a", 4 * BLOCK)
    answer = world.world.accept(order)
    session = ReceiverSession(Offer("a", 1, 1, 4), block_bytes=1, settings=KvSettings(segment_bytes=2), now=0.0)
    world.sessions[("a", 1)] = session
    world.feed(session, answer)
    world.feed(session, Announce("a", 1, 1, 0, 0, 0, (2,)))
    world.feed(session, PairLost("no heartbeat"))
    [lease] = leases(world.table, world.receiving())
    assert (lease.request_id, lease.attempt, lease.peer_incarnation, lease.state) == ("a", 1, PEER, "draining")
    assert world.table.allocator.quarantined_count == 2
    room = world.table.allocator.free_count
    taken = set(world.table.allocator.allocate(room))
    assert not taken & set(answer.block_ids), "blocks that may still be written to were given out"
    world.table.allocator.free(sorted(taken))
    world.feed(session, SegmentDropped(0))
    check_invariants(world.table, world.receiving())
    assert world.table.allocator.quarantined_count == 0 and world.table.allocator.free_count == 40
