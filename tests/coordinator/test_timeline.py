"""Explanations from event logs: the right culprit for every reason to wait, and nothing that did not happen."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pytest

from coordinator.event_log.felt import RANKS, Felt, FeltRequest
from coordinator.event_log.reasons import (
    BehindNoRoom,
    CachedElsewhere,
    FasterElsewhere,
    NoRoomOnWorker,
    OrderWithinTenant,
    OtherTurn,
    Reason,
    RoomKept,
    SameTenant,
)
from coordinator.event_log.timeline import (
    Changed,
    ChunkSent,
    Entry,
    KeptFor,
    Passed,
    Placed,
    RequestEnded,
    Submitted,
    Timeline,
)
from coordinator.events import Limits, PeerDown, Tick
from proto.errors import Interrupt
from proto.messages import CacheEvents, Chunk, Finished, HandedOver, Released, StepDone, WorkFailed
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.decisions import StepEnd
from tests.coordinator.logged_core import LoggedCore, as_logged, replay
from tests.coordinator.test_cache import hashes
from tests.coordinator.test_replay import contended_world, random_world
from tests.coordinator.world import Harness, named, submit
from tests.helpers import first

R = TypeVar("R")
E = TypeVar("E")
ONE_STEP = Limits(step_tokens=8, steps_in_flight=1, quantum_tokens=0.0)


class Scene(Harness):
    """Prefill workers from 10, and one decode worker, 20; what they compute is said line by line."""

    @staticmethod
    def of(limits: Limits = ONE_STEP, prefill: int = 1, **worker: int) -> "Scene":
        harness = Harness.make(prefill, limits=limits, core=LoggedCore, **worker)
        return Scene(core=harness.core)

    def come(self, name: str, tenant: str, tokens: int = 8, max_tokens: int = 4, deadline_ms: float = 0.0) -> None:
        self.now += 0.1
        request = submit(name, tokens, max_tokens=max_tokens)
        self.receive(1, msgspec.structs.replace(request, tenant=tenant, deadline_ms=deadline_ms))

    def step(self, number: int, *chunks: Chunk) -> None:
        """The prefill worker has done a step."""
        self.now += 0.1
        self.receive(10, StepDone(number, chunks, 1.0, 0))

    def hand_over(self, name: str) -> None:
        self.receive(10, HandedOver(name, 1, 100, 3.0))

    def finish(self, name: str) -> None:
        self.now += 0.1
        self.receive(20, Finished(name, 1, 4, 0))

    def story(self, name: str) -> list[Entry]:
        return story_of(as_logged(self.core), name)


def story_of(core: LoggedCore, name: str) -> list[Entry]:
    story = Timeline(name)
    assert replay(core.event_log()).run(story) is None
    return story.finish()


def only(kind: type[E], entries: list[Entry]) -> E:
    [found] = [entry for entry in entries if isinstance(entry, kind)]
    return found


def reason(kind: type[R], entries: list[Entry]) -> tuple[R, Passed]:
    """The one reason of a kind, with how often it was so."""
    [found] = [(e.reason, e) for e in entries if isinstance(e, Passed) and isinstance(e.reason, kind)]
    return found


def test_story_of_request_without_wait() -> None:
    """The story of a request that never waits has its placement, chunks, hand-over and end."""
    s = Scene.of()
    s.come("a", "acme/ann", tokens=12)
    s.step(0, Chunk("a", 1, 0, 8))
    s.step(1, Chunk("a", 1, 8, 4))
    s.hand_over("a")
    s.finish("a")
    came, placed, first, second, computed, decoding, ended = s.story("a")
    assert came == Submitted(0.0, 1, "standard", "acme/ann", 12, 4, 0, 0)
    assert isinstance(placed, Placed) and placed.workers == "prefill-10 + decode-20" and not placed.kept
    assert first == ChunkSent(0.0, "prefill-10", 0, 0, 8, 12, 0, StepEnd.FULL)
    assert isinstance(second, ChunkSent) and (second.start, second.tokens, second.end) == (8, 4, "nothing_waits")
    assert isinstance(computed, Changed) and computed.state == "handing_over"
    assert isinstance(decoding, Changed) and (decoding.state, decoding.transfer_ms) == ("decoding", 3.0)
    assert isinstance(ended, RequestEnded) and ended.outcome == "finished" and ended.by is None


def test_story_tells_other_tenants_turn() -> None:
    """The story names the other tenant whose turn came first, and its level in the fair order."""
    s = Scene.of()
    s.come("busy1", "busy/bob")
    s.come("busy2", "busy/bob")
    s.come("other1", "other/olga")
    s.come("other2", "other/olga")
    s.step(0, Chunk("busy1", 1, 0, 8))
    s.step(1, Chunk("other1", 1, 0, 8))
    why, passed = reason(OtherTurn, s.story("busy2"))
    assert (passed.times, passed.requests, passed.requests_in_all) == (1, ("other1",), 1)
    assert (why.by.request, why.by.tenant, why.by.priority_class) == ("other1", "other/olga", "standard")
    assert (why.level, why.winner, why.ours) == ("organisation", "other", "busy")
    assert why.winner_round == 0.0 < why.our_round
    came = only(Submitted, s.story("other2"))
    assert (came.waiting, came.waiting_of_tenant) == (2, 1)


def test_repeated_turns_are_told_once() -> None:
    """Several turns of one tenant are told as one entry with their number."""
    s = Scene.of()
    s.come("big", "busy", tokens=8, max_tokens=100)
    s.come("next", "busy", tokens=8)
    for number in range(5):
        s.come(f"small{number}", "other", tokens=8, max_tokens=1)
    s.step(0, Chunk("big", 1, 0, 8))
    for number in range(4):
        s.step(number + 1, Chunk(f"small{number}", 1, 0, 8))
    why, passed = reason(OtherTurn, s.story("next"))
    assert why.by.tenant == "other" and passed.times == 5
    assert passed.requests == ("small0", "small1", "small2") and passed.requests_in_all == 5
    assert passed.until_s - passed.at_s == pytest.approx(0.4)


def test_story_tells_earlier_deadline() -> None:
    """The story names a request of the same tenant that went first for its earlier deadline."""
    s = Scene.of()
    s.come("first", "acme")
    s.come("late", "acme")
    s.come("urgent", "acme", deadline_ms=900.0)
    s.step(0, Chunk("first", 1, 0, 8))
    why, passed = reason(SameTenant, s.story("late"))
    assert (why.by.request, why.order, passed.times) == ("urgent", OrderWithinTenant.DEADLINE, 1)
    assert why.due_before_s == pytest.approx(4.0 - 0.9 - 0.1)


def test_story_tells_overtaken_request() -> None:
    """The story names a request of the same tenant that was overtaken too often and goes first."""
    s = Scene.of(Limits(step_tokens=8, steps_in_flight=1, overtaken_max=1))
    s.come("first", "acme")
    s.come("old", "acme")
    s.come("urgent", "acme", deadline_ms=500.0)
    s.come("urgent2", "acme", deadline_ms=600.0)
    s.step(0, Chunk("first", 1, 0, 8))
    s.step(1, Chunk("urgent", 1, 0, 8))
    orders = [e.reason for e in s.story("urgent2") if isinstance(e, Passed)]
    assert [(why.by.request, why.order) for why in orders if isinstance(why, SameTenant)] == [
        ("urgent", OrderWithinTenant.DEADLINE),
        ("old", OrderWithinTenant.AGED),
    ]


def test_story_tells_order_within_tenant() -> None:
    """The story tells that a request of the same tenant had fewer chunks left or came first."""
    s = Scene.of(dataclasses.replace(ONE_STEP, priority_classes={"standard": PriorityClass(ttft_s_per_chunk=0.0)}))
    s.come("first", "acme")
    s.now -= 0.1
    s.come("long", "acme", tokens=24)
    s.now -= 0.1
    s.come("short", "acme")
    s.now -= 0.1
    s.come("second", "acme")
    s.step(0, Chunk("first", 1, 0, 8))
    assert [why.order for why in (reason(SameTenant, s.story(name))[0] for name in ("long", "second"))] == [
        OrderWithinTenant.FEWER_CHUNKS,
        OrderWithinTenant.CAME_FIRST,
    ]


def full_decode(**limits: int) -> Scene:
    """`hog` holds 8 of the 10 blocks of the decode worker."""
    s = Scene.of(Limits(step_tokens=16, steps_in_flight=1, quantum_tokens=0.0, **limits), kv_blocks=10)  # type: ignore[arg-type]
    s.come("hog", "hogs", tokens=10, max_tokens=20)
    s.step(0, Chunk("hog", 1, 0, 10))
    s.hand_over("hog")
    return s


def test_story_tells_missing_decode_room() -> None:
    """The story names the decode worker without room and what it lacks."""
    s = full_decode()
    s.come("waits", "acme", tokens=10, max_tokens=20)
    s.finish("hog")
    entries = s.story("waits")
    why, _ = reason(NoRoomOnWorker, entries)
    assert why == NoRoomOnWorker("decode-20", 8, 2, 1, 63, "hogs", 8, kept=False)
    assert only(Placed, entries).at_s == pytest.approx(0.1)


def test_story_tells_left_out_pair() -> None:
    """The story tells that a request waited because a pair was left out."""
    s = Scene.of()
    for number in range(3):
        s.come(f"r{number}", "acme")
        s.step(number, Chunk(f"r{number}", 1, 0, 8))
        s.receive(10, WorkFailed(f"r{number}", 1, Interrupt.TRANSFER_FAILED, "planted"))
        s.receive(20, Released(f"r{number}", 1))
    s.come("waits", "acme")
    s.now += 2.1
    s.post(Tick())
    entries = s.story("waits")
    assert reason(NoRoomOnWorker, entries)[0].circuit_open
    assert only(Placed, entries).at_s == pytest.approx(2.1)


def test_story_tells_kept_room() -> None:
    """The story tells that room was kept for a request that others had bypassed."""
    s = full_decode(bypasses_max=1)
    s.come("waits", "acme", tokens=10, max_tokens=20)
    s.come("small", "other", tokens=4, max_tokens=1)
    s.step(1, Chunk("small", 1, 0, 4))
    s.come("after", "other", tokens=4, max_tokens=1)
    after, _ = reason(RoomKept, s.story("after"))
    assert (after.by.request, after.by.tenant, after.bypassed) == ("waits", "acme", 1)
    s.receive(10, Finished("small", 1, 1, 0))
    s.finish("hog")
    entries = s.story("waits")
    assert only(KeptFor, entries).bypassed == 1 and only(Placed, entries).kept
    assert any(isinstance(e, Passed) and isinstance(e.reason, NoRoomOnWorker) and e.reason.kept for e in entries)


def test_story_tells_blocked_request_ahead() -> None:
    """The story names the request without room that a request waits behind."""
    s = full_decode()
    s.come("waits", "acme", tokens=10, max_tokens=20)
    s.come("behind", "acme", tokens=10, max_tokens=20)
    why, _ = reason(BehindNoRoom, s.story("behind"))
    assert why.by is not None and why.by.request == "waits"
    s.come("third", "acme", tokens=10, max_tokens=20)
    why, passed = reason(BehindNoRoom, s.story("behind"))
    assert why.by is not None and why.by.request == "waits"
    assert passed.requests == ("waits",) and passed.times == 2


def test_story_tells_wait_for_cached_worker() -> None:
    """The story tells that a request waited for the worker that has its prompt cached."""
    s = Scene.of(Limits(step_tokens=16, steps_in_flight=1), prefill=2)
    s.receive(10, CacheEvents(hashes(200), b""))
    for name in ("busy", "a"):
        s.receive(1, named(submit(name, 816), 1))
    s.now += 0.5
    s.receive(10, StepDone(0, (Chunk("busy", 1, 800, 16),), 16.0, 0))
    entries = s.story("a")
    why, passed = reason(CachedElsewhere, entries)
    assert why == CachedElsewhere("prefill-10", 800, "prefill-11", 0) and passed.at_s == 0.0
    placed = only(Placed, entries)
    assert (placed.at_s, placed.workers, placed.cached_tokens) == (0.5, "prefill-10 + decode-20", 800)


def test_story_tells_expiry() -> None:
    """The story of an expired request names its deadline."""
    s = Scene.of()
    s.come("first", "acme")
    s.come("late", "acme", deadline_ms=300.0)
    s.now += 0.4
    s.post(Tick())
    ended = only(RequestEnded, s.story("late"))
    assert (ended.outcome, ended.by) == ("expired", None)
    assert "deadline of 300 ms" in ended.why and ended.at_s == pytest.approx(0.4) and ended.retry_after_s > 0


def test_story_names_winner_of_shed_place() -> None:
    """The story of a shed request names the request that it gave way to."""
    s = Scene.of(Limits(queue_requests_max=2, step_tokens=8, steps_in_flight=1))
    for name in ("running", "fat1", "fat2"):
        s.come(name, "fat/joe")
    s.come("thin", "slim/jim")
    entries = s.story("fat2")
    ended = only(RequestEnded, entries)
    assert ended.outcome == "rejected" and "overload" in ended.why and ended.retry_after_s > 0
    assert ended.by is not None and (ended.by.request, ended.by.tenant) == ("thin", "slim/jim")


def test_story_tells_immediate_rejection() -> None:
    """The story of a request rejected at once gives the reason."""
    s = Scene.of()
    s.come("huge", "acme", tokens=4096, max_tokens=100)
    came, ended = s.story("huge")
    assert isinstance(came, Submitted) and isinstance(ended, RequestEnded)
    assert (ended.outcome, ended.at_s) == ("rejected", 0.0)
    assert ended.why == "too_long: 4196 tokens in all; the context holds 4096"


def test_story_tells_interrupt_and_resubmit() -> None:
    """The story of an interrupted request names the lost worker and has both attempts."""
    s = Scene.of()
    s.come("a", "acme")
    s.post(PeerDown(10, "killed"))
    s.now += 1.0
    s.receive(1, msgspec.structs.replace(submit("a", 8, attempt=2), tenant="acme"))
    entries = s.story("a")
    assert [e.attempt for e in entries if isinstance(e, Submitted)] == [1, 2]
    interrupted = only(Changed, entries)
    assert interrupted.state == "interrupted" and "prefill-10: killed" in interrupted.why
    assert entries[-1].at_s == pytest.approx(1.0)


def test_unknown_request_has_no_story() -> None:
    assert story_of(random_world(0, steps=20), "nobody") == []


def check(core: LoggedCore, name: str) -> None:
    """What every story keeps to."""
    story = Timeline(name)
    again = replay(core.event_log())
    assert again.run(story) is None, name
    entries = story.finish()
    assert isinstance(entries[0], Submitted)
    times = [entry.at_s for entry in entries if not isinstance(entry, Passed)]
    assert times == sorted(times), name
    done = 0
    for entry in entries:
        if isinstance(entry, Placed):
            done = entry.cached_tokens
        if isinstance(entry, ChunkSent):
            # Behind what is done; before it where less was cached than was believed.
            assert entry.start <= done, name
            done = entry.start + entry.tokens
        if isinstance(entry, Passed):
            assert entry.at_s <= entry.until_s and entry.times >= 1
            check_reason(entry.reason, name)
    ended = [entry for entry in entries if isinstance(entry, RequestEnded)]
    assert len(ended) == (name not in again.core.cluster.requests), name
    if ended and ended[0].outcome == "finished":
        assert entries[-1] is ended[0] and done == prompt_tokens(entries)


def prompt_tokens(entries: list[Entry]) -> int:
    return next(e.prompt_tokens for e in reversed(entries) if isinstance(e, Submitted))


def check_reason(why: Reason, name: str) -> None:
    match why:
        case OtherTurn():
            assert why.winner_round <= why.our_round and why.winner != why.ours
        case NoRoomOnWorker():
            assert why.blocks_needed > why.blocks_free or why.seqs_needed > why.seqs_free, (name, why)
        case CachedElsewhere():
            assert why.cached_tokens > why.cached_tokens_there and why.worker != why.asked
        case FasterElsewhere():
            assert why.done_s < why.done_there_s and why.worker != why.asked
        case SameTenant() | RoomKept():
            assert why.by.request != name
        case BehindNoRoom():
            assert why.by is None or why.by.request != name


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_random_stories_match_events(seed: int) -> None:
    """Stories from random clusters agree with what happened."""
    for core, count in ((random_world(seed), 8), (contended_world(seed), 8)):
        felt = Felt(0.0, count, "queue")
        assert replay(core.event_log()).run(felt) is None
        for row in felt.finish()[0]:
            check(core, row.request)


@pytest.mark.parametrize("rank", RANKS)
def test_felt_ranks_match_the_stories(rank: str) -> None:
    """Requests are listed by what their clients felt, as their stories tell it; so are those that did not finish."""
    core = contended_world(1)
    felt = Felt(0.0, 6, rank)
    assert replay(core.event_log()).run(felt) is None
    rows, unfinished = felt.finish()
    assert len(rows) == 6 and felt.requests > 50
    assert [RANKS[rank](row) for row in rows] == sorted((RANKS[rank](row) for row in rows), reverse=True)
    for row in (*rows, *unfinished):
        check_felt(row, story_of(core, row.request))


def check_felt(row: FeltRequest, entries: Sequence[Entry]) -> None:
    came = next(e for e in entries if isinstance(e, Submitted))
    assert (row.tenant, row.prompt_tokens) == (came.tenant, came.prompt_tokens)
    first = next((e.at_s for e in entries if isinstance(e, Changed) and e.state in ("handing_over", "decoding")), None)
    assert row.ttft_s == (None if first is None else pytest.approx(first, abs=1e-6))
    if isinstance(entries[-1], RequestEnded):
        assert row.duration_s == pytest.approx(entries[-1].at_s, abs=1e-6) and row.outcome == entries[-1].outcome
    if not any(isinstance(e, Changed) and e.state == "interrupted" for e in entries):
        until = next(e.at_s for e in entries if isinstance(e, Placed | RequestEnded))
        assert row.waited_s == pytest.approx(until, abs=1e-6)
