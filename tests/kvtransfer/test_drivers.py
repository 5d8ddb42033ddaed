"""Both drivers in one process, over real pairs of each transport: bytes, order, refusals, aborts, losses, what frees blocks."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.memory.layout import KvLayout
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Abort, Announce, Commit, Offer, PairClosed, PairListen
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S, Ends, announces, same_bytes, shuffled, with_ends

LAYOUTS = {
    "float32": LAYOUT,
    "bfloat16": KvLayout(layers=3, kv_heads=1, head_dim=4, block_size=8, dtype="bfloat16"),
    "odd bytes": KvLayout(layers=1, kv_heads=3, head_dim=1, block_size=1, dtype="bfloat16"),
    "float8": KvLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float8_e4m3fn"),
}


pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_arrive_in_any_order(name):
    """Random and contiguous blocks, one segment and many, one chunk and many, several sessions at once on one pair."""
    layout = LAYOUTS[name]

    async def test(ends: Ends) -> None:
        rng = random.Random(f"{name} 5")
        taken = shuffled(ends.blocks, ends.blocks, seed=6)
        sources, targets = {}, {}
        for number in range(6):
            count = rng.choice([1, 2, 3, 7, 9, 16]) if number else 20
            start = rng.randrange(ends.blocks - count)
            run = list(range(start, start + count))
            sources[f"r{number}"] = run if rng.random() < 0.4 else shuffled(ends.blocks, count, seed=number)
            targets[f"r{number}"] = [taken.pop() for _ in range(min(count, len(taken)))]
        sources = {name: ids for name, ids in sources.items() if len(targets[name]) == len(ids)}
        before = ends.target.clone()
        ends.accept = lambda incarnation, offer: OfferAccepted(tuple(targets[offer.request_id]))
        for request_id, ids in sources.items():
            ends.transfer(request_id, ids, chunks=rng.randint(1, 4))
        await ends.ended(len(sources))
        assert all(isinstance(result, KvSent) for result in ends.results), ends.results
        for request_id, ids in sources.items():
            assert same_bytes(ends.target[targets[request_id]], ends.source[ids]), request_id
        untouched = sorted(set(range(ends.blocks)) - {b for name in sources for b in targets[name]})
        assert same_bytes(ends.target[untouched], before[untouched])
        sent = sum(len(ids) for ids in sources.values()) * layout.block_bytes
        assert ends.sender.counters["bytes"] == ends.receiver.counters["bytes"] == sent
        assert ends.sender.counters["pairs"] == ends.receiver.counters["pairs"] == 1

    with_ends(test, layout=layout, settings=replace(SMALL, segment_bytes=3 * layout.block_bytes))


def test_segments_fit_the_smaller_end():
    """Segments are no larger than the end with the smaller limit allows."""
    announced: list[Announce] = []

    def watch(message: object) -> bool:
        if isinstance(message, Announce):
            announced.append(message)
        return True

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert [blocks for announce in announced for blocks in announce.blocks] == [2] * 10

    smaller = replace(SMALL, segment_bytes=2 * LAYOUT.block_bytes)
    with_ends(test, to_receiver=watch, receiver_settings=smaller)


def test_segments_are_announced_in_batches():
    """The first few segments are announced at once, and later ones in batches."""
    announced: list[int] = []

    def watch(message: object) -> bool:
        if isinstance(message, Announce):
            assert message.segment == sum(announced)
            announced.append(len(message.blocks))
        return True

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 64, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert sum(announced) == 64 and announced[0] == 4 and len(announced) <= 20

    settings = replace(SMALL, segment_bytes=LAYOUT.block_bytes, window_segments=8, window_bytes=1)
    with_ends(test, to_receiver=watch, settings=settings)


def test_skipping_allows_larger_announcements():
    """All remaining segments are announced together by shm, which skips unwanted ones, and few by others."""
    announced: list[int] = []

    def watch(message: object) -> bool:
        if isinstance(message, Announce):
            announced.append(len(message.blocks))
        return True

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 64, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert announced[:2] == [4, 60] if ends_module.TRANSPORT == "shm" else max(announced) == 4

    block_bytes = LAYOUT.block_bytes
    settings = replace(SMALL, segment_bytes=block_bytes, window_segments=1, window_bytes=4 * block_bytes)
    with_ends(test, to_receiver=watch, settings=settings)


def test_commit_brings_tokens_and_prompt():
    """The commit brings first tokens and prompt tokens to the receiver."""

    async def test(ends: Ends) -> None:
        ends.transfer("r", [3, 1], prompt=(5, 6, 7, 8, 9))
        await ends.ended(1)
        commit, block_ids, prompt = ends.committed[0]
        assert (commit.first_tokens[0].token, block_ids, prompt) == (7, [0, 1], [5, 6, 7, 8, 9])

    with_ends(test)


def test_offer_may_wait_or_be_refused():
    """An offer may be accepted later or be refused with a reason, and repeated decisions are ignored."""

    async def test(ends: Ends) -> None:
        undecided: list[Offer] = []
        ends.accept = lambda incarnation, offer: undecided.append(offer) if offer.request_id == "late" else "no room"
        ends.transfer("late", [1, 2, 3])
        ends.transfer("refused", [4])
        await ends.until(lambda: len(ends.results) == 1)
        assert ends.results == [KvFailed("refused", 1, "declined: no room")]
        assert ends.committed == ends.failed == [] and len(undecided) == 1
        ends.receiver.decide("late", 1, OfferAccepted((9, 8, 7)))
        await ends.ended(1)
        assert same_bytes(ends.target[[9, 8, 7]], ends.source[[1, 2, 3]])
        ends.receiver.decide("late", 1, OfferAccepted((9, 8, 7)))  # repeated: ignored
        ends.receiver.decide("never", 1, "no")

    with_ends(test)


@pytest.mark.parametrize("cached", [5, 16])
def test_cached_blocks_do_not_cross(cached):
    """Blocks that the receiver has cached are neither sent nor written to."""

    async def test(ends: Ends) -> None:
        before = ends.target.clone()
        targets = tuple(shuffled(64, 16, 3))
        ends.accept = lambda incarnation, offer: OfferAccepted(targets, cached)
        source = shuffled(64, 16, 4)
        ends.transfer("r", source, chunks=3)
        await ends.ended(1)
        moved = (16 - cached) * LAYOUT.block_bytes
        assert isinstance(ends.results[0], KvSent) and ends.results[0].kv_bytes == moved
        assert ends.sender.counters["bytes"] == ends.receiver.counters["bytes"] == moved
        assert ends.committed[0][1] == list(targets)
        assert same_bytes(ends.target[list(targets[cached:])], ends.source[source[cached:]])
        assert same_bytes(ends.target[list(targets[:cached])], before[list(targets[:cached])])

    with_ends(test)


def test_undecided_offer_times_out():
    """An offer that the receiver does not decide on fails at both ends at its deadline."""

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1])
        await ends.ended(1)
        assert ends.failed == [("r", 1, [], "nobody decided on the offer in time")]
        assert ends.results == [KvFailed("r", 1, "declined: nobody decided on the offer in time")]

    with_ends(test, settings=replace(SMALL, decide_timeout_ms=50), accept=lambda incarnation, offer: None)


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_abort_keeps_the_pair_in_order(by):
    """An abort amid the segments stops writes to its blocks, and the next session on the pair arrives."""

    async def test(ends: Ends) -> None:
        ends.accept = lambda incarnation, offer: OfferAccepted(
            tuple(range(50) if offer.request_id == "r" else range(50, 60))
        )
        before = ends.target.clone()
        ends.sender.open("r", 1, 2, 50)
        ends.sender.blocks_ready("r", 1, 0, shuffled(64, 40, 1))
        aborting = ends.sender if by == "sender" else ends.receiver

        def abort_at_second(message: object) -> bool:
            if announces(message, "r", 2):  # type: ignore[arg-type]
                ends.loop.call_soon(aborting.abort, "r", 1, "cancelled")
            return True

        ends.to_receiver = abort_at_second
        ends.transfer("next", shuffled(64, 10, 2), chunks=3)
        await ends.ended(2)
        assert [type(result) for result in ends.results] == [KvFailed, KvSent]
        assert ends.failed[0][:3] == ("r", 1, list(range(50))) and "cancelled" in ends.failed[0][3]
        assert same_bytes(ends.target[50:60], ends.source[shuffled(64, 10, 2)])
        assert same_bytes(ends.target[20:50], before[20:50]), "segments went on being written after the abort"
        assert ends.sender.counters["pairs"] == 1 and ends.sender.counters["pairs_lost"] == 0

    with_ends(test, settings=replace(SMALL, window_segments=4, window_bytes=1))


def test_blocks_are_freed_after_the_thread():
    """A failed session with a segment in flight ends when that segment has been answered, not before."""

    async def test(ends: Ends) -> None:
        held = asyncio.Event()

        def hold(message: object) -> bool:
            if isinstance(message, Announce):  # lost: the sender's thread waits for a receive that is never posted
                held.set()
                return False
            return True

        def note(where: list[Any], what: object) -> None:
            if where is ends.results:
                down_when_reported.append(ends.sender.counters["pairs_lost"])
            plain(where, what)

        plain, ends._note = ends._note, note
        down_when_reported: list[int] = []
        ends.to_receiver = hold
        ends.transfer("r", list(range(60)))  # more than the kernel holds of a connection that nobody reads
        async with asyncio.timeout(WAIT_S):
            await held.wait()
        ends.sender.abort("r", 1, "cancelled")
        await ends.ended(1)
        assert down_when_reported == [1], "reported while the transfer thread may read the blocks"
        assert ends.results == [KvFailed("r", 1, "cancelled")]
        assert ends.sender.counters["pairs_lost"] == 1  # the segment could not be sent within its timeout

    layout = replace(LAYOUT, head_dim=2048)
    with_ends(
        test, layout=layout, settings=replace(SMALL, segment_bytes=64 * layout.block_bytes, segment_timeout_ms=500)
    )


def test_cancelled_segment_is_discarded():
    """It is announced, so it will come; the receiver has given the session up and must not write to its blocks."""

    async def test(ends: Ends) -> None:
        listening: list[PairListen] = []

        def hold_back(message: object) -> bool:
            if isinstance(message, PairListen):
                listening.append(message)
                ends.changed.set()
            return not isinstance(message, PairListen | Abort)

        ends.to_sender = hold_back
        before = ends.target.clone()
        ends.transfer("r", [1, 2, 3])
        await ends.until(lambda: len(listening) == 1)
        ends.receiver.handle(1, Announce("r", 1, 1, 0, 0, 0, (3,)), b"")
        ends.receiver.abort("r", 1, "cancelled")
        assert ends.failed == []
        ends.sender.handle(2, listening[0], b"")
        await ends.until(lambda: len(ends.failed) == 1)
        assert ends.failed == [("r", 1, [0, 1, 2], "cancelled")]
        assert ends.receiver.counters["pairs_lost"] == 0 and same_bytes(ends.target, before)

    with_ends(test)


def test_unanswered_offer_times_out():
    """An offer without an answer fails at the sender at its deadline."""

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1])
        await ends.until(lambda: len(ends.results) == 1)
        assert ends.results == [KvFailed("r", 1, "timed out waiting for an answer to the offer")]

    with_ends(test, settings=replace(SMALL, accept_timeout_ms=50), to_receiver=lambda m: not isinstance(m, Offer))


def test_corrupted_kv_is_never_committed():
    """A segment whose digest is wrong fails the session at both ends."""

    async def test(ends: Ends) -> None:
        def corrupt(message: object) -> bool:
            if isinstance(message, Commit):
                wrong = Commit(message.request_id, 1, (b"\0" * 8, *message.digests[1:]), 0, message.first_tokens)
                ends.loop.call_soon(ends.receiver.handle, 1, wrong, b"")
                return False
            return True

        ends.to_receiver = corrupt
        ends.transfer("r", shuffled(64, 10, 1))
        await ends.ended(1)
        assert ends.committed == [] and "digest of segment 0" in ends.failed[0][3]
        assert isinstance(ends.results[0], KvFailed) and "digest" in ends.results[0].reason

    with_ends(test)


def test_lost_peer_fails_its_sessions():
    """A lost peer fails its sessions, and a new pair serves the next one."""

    async def test(ends: Ends) -> None:
        ends.sender.open("r1", 1, 2, 10)
        ends.sender.blocks_ready("r1", 1, 0, [1, 2, 3, 4])
        await ends.until(lambda: any(isinstance(frame, Announce) for frame in ends.frames))
        ends.sender.peer_lost(2, "no heartbeat")
        ends.receiver.peer_lost(1, "no heartbeat")
        await ends.ended(1)
        assert ends.results == [KvFailed("r1", 1, "peer lost: no heartbeat")]
        ends.transfer("r2", [5, 6, 7])
        await ends.ended(2)
        assert isinstance(ends.results[1], KvSent) and ends.sender.counters["pairs"] == 2

    with_ends(test)


def test_new_pair_replaces_the_old():
    """The sender lost its pair and the word of it was lost too: the receiver learns from the next PairOpen."""

    async def test(ends: Ends) -> None:
        ends.transfer("r1", [1, 2])
        await ends.ended(1)
        ends.sender.open("r2", 1, 2, 5)
        ends.to_receiver = lambda message: not isinstance(message, PairClosed)
        ends.sender.peer_lost(2, "link down")
        ends.transfer("r3", [3, 4, 5])
        await ends.ended(3)
        assert {result.request_id: type(result) for result in ends.results} == {
            "r1": KvSent,
            "r2": KvFailed,
            "r3": KvSent,
        }
        assert [failure[0] for failure in ends.failed] == ["r2"]

    with_ends(test)
