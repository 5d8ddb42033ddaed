"""The two machines: complete tables, every illegal event defined, no wrong KV and no stuck session on a bad link."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.session import receiver as receiver_session
from kvtransfer.session import sender as sender_session
from kvtransfer.session.receiver import RECEIVER_TABLE, ReceiverSession
from kvtransfer.session.sender import SENDER_TABLE, SenderSession
from kvtransfer.session.session import (
    BUG,
    HANDLE,
    IGNORE,
    REFUSE,
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
    SessionEnded,
    Tick,
    TransferSession,
    Violation,
)
from proto.codec import pack_tokens
from proto.kv import Abort, Accept, Ack, Announce, Commit, Decline, FirstToken, Offer
from tests.kvtransfer.world import BLOCK_BYTES, SETTINGS, Faults, World

FIRST = (FirstToken(0, 5),)
D1, D2 = b"11111111", b"22222222"
OFFER = Offer("r", 1, 1, 4)
COMMIT = Commit("r", 1, (D1, D2), 0, FIRST)

SENDER_EVENTS: dict[type, object] = {
    Accept: Accept("r", 1, 3),
    Decline: Decline("r", 1, "full"),
    Ack: Ack("r", 1, 4 * BLOCK_BYTES),
    Abort: Abort("r", 1, "gone"),
    BlocksReady: BlocksReady(0, (9, 8, 7, 6)),
    CommitReady: CommitReady(FIRST, 0, b""),
    SegmentBegun: SegmentBegun(0, D1),
    SegmentDone: SegmentDone(0, D1),
    SegmentDropped: SegmentDropped(0),
    LocalAbort: LocalAbort("cancelled"),
    PairLost: PairLost("broken"),
    Tick: Tick(),
}
RECEIVER_EVENTS: dict[type, object] = {
    Offer: OFFER,
    Announce: Announce("r", 1, 1, 0, 0, 0, (3,)),
    CommitArrived: CommitArrived(COMMIT, b""),
    Abort: Abort("r", 1, "gone"),
    OfferAccepted: OfferAccepted((1, 2, 3, 4)),
    Refusal: Refusal("full"),
    SegmentDone: SegmentDone(0, D1),
    SegmentDropped: SegmentDropped(0),
    LocalAbort: LocalAbort("cancelled"),
    PairLost: PairLost("broken"),
    Tick: Tick(),
}
SENDER_WAYS: dict[str, list[object]] = {
    "offered": [],
    "streaming": [BlocksReady(0, (9, 8, 7, 6)), Accept("r", 1, 3)],
    "committing": [
        BlocksReady(0, (9, 8, 7, 6)),
        CommitReady(FIRST, 0, b""),
        Accept("r", 1, 3),
        SegmentDone(0, D1),
        SegmentDone(1, D2),
    ],
}
SENDER_WAYS["draining"] = [*SENDER_WAYS["streaming"], LocalAbort("cancelled")]
SENDER_WAYS["sent"] = [*SENDER_WAYS["committing"], Ack("r", 1, 4 * BLOCK_BYTES)]
SENDER_WAYS["failed"] = [Decline("r", 1, "full")]
RECEIVER_WAYS: dict[str, list[object]] = {
    "undecided": [],
    "receiving": [OfferAccepted((1, 2, 3, 4)), Announce("r", 1, 1, 0, 0, 0, (3,)), Announce("r", 1, 1, 1, 1, 3, (1,))],
    "declined": [Refusal("full")],
    "failed": [LocalAbort("cancelled")],
}
RECEIVER_WAYS["checking"] = [*RECEIVER_WAYS["receiving"], CommitArrived(COMMIT, b"")]
RECEIVER_WAYS["draining"] = [*RECEIVER_WAYS["receiving"], LocalAbort("cancelled")]
RECEIVER_WAYS["committed"] = [*RECEIVER_WAYS["checking"], SegmentDone(0, D1), SegmentDone(1, D2)]


def sender(events: list[object], blocks: int = 4) -> SenderSession:
    session = SenderSession("r", 1, pair_id=1, blocks=blocks, block_bytes=BLOCK_BYTES, settings=SETTINGS)
    session.start(0.0)
    for event in events:
        session.handle(event, 0.0)
    return session


def receiver(events: list[object]) -> ReceiverSession:
    session = ReceiverSession(OFFER, block_bytes=BLOCK_BYTES, settings=SETTINGS, now=0.0)
    for event in events:
        session.handle(event, 0.0)
    return session


def at(end: str, state: str) -> TransferSession:
    session = sender(SENDER_WAYS[state]) if end == "sender" else receiver(RECEIVER_WAYS[state])
    assert session.state == state
    return session


PAIRS = [("sender", state, event) for state in SENDER_TABLE for event in SENDER_EVENTS.values()] + [
    ("receiver", state, event) for state in RECEIVER_TABLE for event in RECEIVER_EVENTS.values()
]


@pytest.mark.parametrize(("module", "table", "events"), [
    (sender_session, SENDER_TABLE, SENDER_EVENTS),
    (receiver_session, RECEIVER_TABLE, RECEIVER_EVENTS),
])  # fmt: skip
def test_tables_are_complete(module, table, events):
    """The tables of both machines have a rule for each state and event."""
    states = {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    assert set(table) == states - {BUG, HANDLE, IGNORE, REFUSE}
    for state, row in table.items():
        assert set(row) == set(events), state


def is_handled(session, event):
    try:
        session.handle(event, 1.0)
    except (AssertionError, KeyError) as error:  # some of these events are not whole
        return "nothing handles" not in str(error)
    return True


@pytest.mark.parametrize(("end", "state", "event"), PAIRS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_event_follows_its_rule(end, state, event):
    """What the table calls stale changes nothing, a violation ends the session, and our own bugs are assertions."""
    session = at(end, state)
    deadline = session.next_deadline()
    rule = session.table[state][type(event)]
    if rule == BUG:
        with pytest.raises(AssertionError):
            session.handle(event, 1.0)
    elif rule == IGNORE:
        assert session.handle(event, 1.0) == []
        assert (session.state, session.next_deadline()) == (state, deadline)
    elif rule == REFUSE:
        actions = session.handle(event, 1.0)
        assert isinstance(actions[0], Violation)
        assert isinstance(actions[1], SendMessage) and isinstance(actions[1].message, Abort)
        assert session.state in ("failed", "draining")
    else:
        assert rule == HANDLE and is_handled(session, event)


@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("event", [LocalAbort("cancelled"), PairLost("broken"), Abort("r", 1, "gone"), Tick()])
def test_every_state_can_end_once(end, event):
    """A session can be ended in each state, and reports its end once, when its blocks are free."""
    for state in SENDER_TABLE if end == "sender" else RECEIVER_TABLE:
        session = at(end, state)
        was_over = session.table[state][LocalAbort] == IGNORE and state != "draining"
        actions = session.handle(event, 1e6)
        for segment in sorted(session.in_flight):
            assert not any(isinstance(action, SessionEnded) for action in actions), (
                "a result before the blocks are free"
            )
            actions += session.handle(SegmentDropped(segment), 1e6)
        ends = [action for action in actions if isinstance(action, SessionEnded)]
        assert len(ends) == (0 if was_over else 1), state
        assert session.next_deadline() is None
        assert session.handle(event, 2e6) == []


def test_early_tick_does_nothing():
    """A tick before the deadline does nothing in any state."""
    for end, table in (("sender", SENDER_TABLE), ("receiver", RECEIVER_TABLE)):
        for state in table:
            assert at(end, state).handle(Tick(), 1.0) == []


def test_segments_keep_both_ends_limits():
    """Segments are runs of blocks within the limits of both ends."""
    session = sender([BlocksReady(0, (5, 6)), Accept("r", 1, 2)], blocks=7)
    actions = session.handle(BlocksReady(2, (7, 1, 2, 3, 4)), 0.0)
    assert [(part.segment, part.first_block, part.block_ids) for part in actions] == [
        (1, 2, (7, 1)),
        (2, 4, (2, 3)),
        (3, 6, (4,)),
    ]


def test_good_transfer_reports_its_size():
    """A good transfer ends with its bytes and time at the sender, and its blocks at the receiver."""
    session = sender(SENDER_WAYS["committing"])
    assert session.handle(Ack("r", 1, 4 * BLOCK_BYTES), 0.25) == [SessionEnded(KvSent("r", 1, 4 * BLOCK_BYTES, 250.0))]
    actions = receiver([*RECEIVER_WAYS["checking"], SegmentDone(0, D1)]).handle(SegmentDone(1, D2), 0.0)
    assert actions == [SendMessage(Ack("r", 1, 4 * BLOCK_BYTES)), SessionEnded(KvCommitted(COMMIT, (1, 2, 3, 4), ()))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("commit_first", [True, False])
def test_wrong_digest_never_commits(order, commit_first):
    """A session with a wrong segment digest fails, whether segments or commit come first."""
    events: list[object] = [SegmentDone(segment, D1) for segment in order]  # segment 1 was sent with D2
    session = receiver(RECEIVER_WAYS["receiving"])
    actions = []
    for event in [CommitArrived(COMMIT, b""), *events] if commit_first else [*events, CommitArrived(COMMIT, b"")]:
        actions += session.handle(event, 0.0)
    assert session.state == "failed"
    assert isinstance(actions[0], SendMessage) and isinstance(actions[0].message, Abort)
    assert isinstance(actions[-1], SessionEnded) and isinstance(actions[-1].result, KvReceiveFailed)
    assert "digest of segment 1" in actions[-1].result.reason


@pytest.mark.parametrize("frame", [
    Announce("r", 1, 1, 2, 2, 3, (1,)),  # a segment left out
    Announce("r", 1, 1, 2, 1, 0, (1,)),  # a block again
    Announce("r", 1, 1, 2, 1, 3, (2,)),  # a block too many
    CommitArrived(COMMIT, b""),  # before the last block
    CommitArrived(Commit("r", 1, (D1,), 3, FIRST), b"\0" * 8),  # a prompt cut short
])  # fmt: skip
def test_invalid_content_is_a_violation(frame):
    """An announcement or commit with invalid content fails the session and returns its blocks."""
    session = receiver([OfferAccepted((1, 2, 3, 4)), Announce("r", 1, 1, 0, 0, 0, (3,)), SegmentDone(0, D1)])
    if isinstance(frame, CommitArrived) and frame.blob:
        session.handle(Announce("r", 1, 1, 1, 1, 3, (1,)), 0.0)
        session.handle(SegmentDone(1, D2), 0.0)
        frame = CommitArrived(Commit("r", 1, (D1, D2), 3, FIRST), frame.blob)
    actions = session.handle(frame, 0.0)
    assert isinstance(actions[0], Violation)
    assert isinstance(actions[-1], SessionEnded) and isinstance(actions[-1].result, KvReceiveFailed)
    assert actions[-1].result.block_ids == (1, 2, 3, 4)


def commits_early() -> SenderSession:
    """Its Commit is out, and both of its segments are on their way."""
    session = sender([BlocksReady(0, (9, 8, 7, 6)), Accept("r", 1, 3), SegmentBegun(0, D1), SegmentBegun(1, D2)])
    assert session.handle(CommitReady(FIRST, 0, b""), 0.0) == [SendMessage(COMMIT)]
    return session


def test_early_commit_follows_announcements():
    """The commit follows the last announcement where all digests are known."""
    session = sender([BlocksReady(0, (9, 8, 7, 6)), CommitReady(FIRST, 0, b"")])
    assert len(session.handle(Accept("r", 1, 3), 0.0)) == 2
    assert session.handle(SegmentBegun(0, D1), 0.0) == []
    assert session.handle(SegmentBegun(1, D2), 0.0) == [SendMessage(COMMIT)]


def test_unknown_digest_delays_the_commit():
    """The commit waits for a segment whose digest is not known yet."""
    session = sender([BlocksReady(0, (9, 8, 7, 6)), Accept("r", 1, 3), CommitReady(FIRST, 0, b"")])
    assert session.handle(SegmentBegun(1, D2), 0.0) == []
    assert session.handle(SegmentDone(1, D2), 0.0) == []
    assert session.handle(SegmentDone(0, D1), 0.0) == [SendMessage(COMMIT)]


def test_blocks_wait_for_the_last_answer():
    """Blocks of an early commit are free with the last segment's answer, not with the ack."""
    session = commits_early()
    assert session.handle(SegmentDone(1, D2), 1.0) == []
    assert session.handle(Ack("r", 1, 4 * BLOCK_BYTES), 2.0) == []
    assert session.next_deadline() is None
    for late in (Ack("r", 1, 4 * BLOCK_BYTES), LocalAbort("cancelled"), PairLost("broken"), Tick()):
        assert session.handle(late, 3.0) == []
    assert session.handle(SegmentDropped(0), 4.0) == [SessionEnded(KvSent("r", 1, 4 * BLOCK_BYTES, 2000.0))]


def test_early_commit_waits_for_progress():
    """An early commit waits for progress of its segments first, and then for the ack."""
    session = commits_early()
    assert session.next_deadline() == SETTINGS.idle_timeout_ms / 1e3
    session.handle(SegmentDone(0, D1), 1.0)
    assert session.next_deadline() == 1.0 + SETTINGS.idle_timeout_ms / 1e3
    session.handle(SegmentDone(1, D2), 2.0)
    assert session.next_deadline() == 2.0 + SETTINGS.ack_timeout_ms / 1e3


@pytest.mark.parametrize("event", [LocalAbort("cancelled"), PairLost("broken"), Abort("r", 1, "gone"), Tick()])
def test_early_commit_can_still_fail(event):
    """A session with an early commit can fail until the ack has come."""
    session = commits_early()
    actions = session.handle(event, 1e6)
    assert actions[-1] == CancelSegments() and session.handle(SegmentDone(0, D1), 1e6) == []
    (ended,) = session.handle(SegmentDropped(1), 1e6)
    assert isinstance(ended, SessionEnded) and isinstance(ended.result, KvFailed)


def test_ack_of_wrong_size_fails():
    """An ack for another number of bytes is a violation and fails the session."""
    actions = sender(SENDER_WAYS["committing"]).handle(Ack("r", 1, 3 * BLOCK_BYTES), 0.0)
    assert isinstance(actions[0], Violation)
    assert isinstance(actions[-1], SessionEnded) and isinstance(actions[-1].result, KvFailed)


def test_repeated_commit_is_acknowledged():
    """A committed receiver acknowledges a repeated commit again."""
    actions = at("receiver", "committed").handle(CommitArrived(COMMIT, b""), 0.0)
    assert actions == [SendMessage(Ack("r", 1, 4 * BLOCK_BYTES))]


def test_prompt_tokens_survive_the_commit():
    """Prompt tokens packed with the commit come out unchanged at the receiver."""
    session = receiver(RECEIVER_WAYS["receiving"])
    session.handle(SegmentDone(0, D1), 0.0)
    session.handle(SegmentDone(1, D2), 0.0)
    commit = Commit("r", 1, (D1, D2), 3, FIRST)
    ended = session.handle(CommitArrived(commit, pack_tokens([7, 8, 9])), 0.0)[-1]
    assert ended == SessionEnded(KvCommitted(commit, (1, 2, 3, 4), (7, 8, 9)))


def test_cached_blocks_are_not_sent():
    """Blocks that the receiver has already are not sent, and do not count in the bytes."""
    session = sender([BlocksReady(0, (9, 8))])
    assert session.handle(Accept("r", 1, 3, 3), 0.0) == []
    sent = session.handle(BlocksReady(2, (7, 6)), 0.0)
    assert [(part.segment, part.first_block, part.block_ids) for part in sent] == [(0, 3, (6,))]
    session.handle(CommitReady(FIRST, 0, b""), 0.0)
    commit = session.handle(SegmentDone(0, D1), 0.0)[0].message
    far = receiver([OfferAccepted((1, 2, 3, 4), 3), Announce("r", 1, 1, 0, 0, 3, (1,)), SegmentDone(0, D1)])
    acked, ended = far.handle(CommitArrived(commit, b""), 0.0)  # type: ignore[arg-type]
    assert acked == SendMessage(Ack("r", 1, BLOCK_BYTES)) and ended == SessionEnded(
        KvCommitted(commit, (1, 2, 3, 4), ())  # type: ignore[arg-type]
    )  # type: ignore[arg-type]
    assert session.handle(acked.message, 0.0) == [SessionEnded(KvSent("r", 1, BLOCK_BYTES, 0.0))]


def test_full_cache_gets_commit_only():
    """A receiver that has all blocks already gets the commit alone."""
    session = sender([BlocksReady(0, (9, 8, 7, 6)), CommitReady(FIRST, 0, b"")])
    (committing,) = session.handle(Accept("r", 1, 3, 4), 0.0)
    assert committing == SendMessage(Commit("r", 1, (), 0, FIRST))
    acked, ended = receiver([OfferAccepted((1, 2, 3, 4), 4)]).handle(CommitArrived(committing.message, b""), 0.0)  # type: ignore[arg-type]
    assert acked == SendMessage(Ack("r", 1, 0)) and isinstance(ended.result, KvCommitted)
    assert session.handle(acked.message, 0.0) == [SessionEnded(KvSent("r", 1, 0, 0.0))]


def test_cached_segments_are_a_violation():
    """A segment of cached blocks and an accept of more blocks than offered are violations."""
    actions = receiver([OfferAccepted((1, 2, 3, 4), 2)]).handle(Announce("r", 1, 1, 0, 0, 0, (3,)), 0.0)
    assert isinstance(actions[0], Violation)
    assert isinstance(sender([]).handle(Accept("r", 1, 3, 5), 0.0)[0], Violation)


def test_targets_keep_prompt_order():
    """Target blocks are used in the order of the prompt."""
    session = receiver([OfferAccepted((40, 10, 30, 20))])
    assert session.handle(Announce("r", 1, 1, 0, 0, 0, (3,)), 0.0) == [Receive(0, (40, 10, 30))]
    assert session.handle(Announce("r", 1, 1, 1, 1, 3, (1,)), 0.0) == [Receive(1, (20,))]


def test_joint_segments_are_all_or_nothing():
    """Segments announced together are all received, or none is if they exceed the offer."""
    session = receiver([OfferAccepted((40, 10, 30, 20))])
    together = session.handle(Announce("r", 1, 1, 0, 0, 0, (2, 1, 1)), 0.0)
    assert together == [Receive(0, (40, 10)), Receive(1, (30,)), Receive(2, (20,))]
    assert session.in_flight == {0, 1, 2}
    too_much = receiver([OfferAccepted((40, 10, 30, 20))])
    actions = too_much.handle(Announce("r", 1, 1, 0, 0, 0, (2, 3)), 0.0)
    assert isinstance(actions[0], Violation) and too_much.state == "failed" and not too_much.in_flight


def chances(top: float) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.0, top / 10, top])


@settings(max_examples=1_500, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.integers(0, 300),
    faults=st.builds(
        Faults,
        drop=chances(0.2),
        repeat=chances(0.4),
        reorder=chances(0.5),
        corrupt=chances(0.2),
        abort=chances(0.05),
        lose_pair=chances(0.05),
        refuse=chances(0.5),
        skip_time=chances(0.05),
    ),
)
def test_faults_never_corrupt_or_stall(seed, steps, faults):
    """No mix of faults on the link commits wrong KV or leaves a session stuck."""
    world = World(seed, faults)
    world.run(steps)
    world.check()


@pytest.mark.parametrize("seed", range(20))
def test_faultless_transfer_arrives(seed):
    """A transfer arrives when the link has no faults."""
    world = World(seed, Faults())
    world.run(500)
    world.check()
    assert isinstance(world.sender_results[0], KvSent)


@pytest.mark.parametrize("seed", range(20))
def test_repeated_frames_do_no_harm(seed):
    """A transfer arrives although frames are repeated."""
    world = World(seed, Faults(repeat=0.4))
    world.run(2_000)
    world.check()
    assert isinstance(world.sender_results[0], KvSent)
