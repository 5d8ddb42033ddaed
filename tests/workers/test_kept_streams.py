"""What a decode worker that is about to prefill keeps of its streams, under the names by which their next attempts ask."""

from typing import Any

import pytest

from kvtransfer.session.session import OfferAccepted
from proto.codec import split_hashes
from proto.errors import Interrupt
from proto.kv import Commit, FirstToken, Offer, kept_names
from proto.messages import Release, Released, WorkFailed
from tests.workers.test_batch import BLOCK, POOL, World, reserve
from tests.workers.test_reservations import PREFILL_INCARNATION, make_core


def world() -> World:
    return World()


def names(order: Any, tokens: int) -> list[bytes]:
    return split_hashes(kept_names(order.block_hashes, order.request_id, order.attempt, BLOCK, tokens))


def release(w: World, name: str = "a") -> None:
    w.told += w.table.close(w.table.attempts[(name, 1)], Released(name, 1))


@pytest.mark.parametrize("tokens", [3, 8, 10])
@pytest.mark.parametrize("in_step", [False, True])
def test_next_attempt_finds_full_blocks(tokens: int, in_step: bool) -> None:
    """All full blocks of a released stream are found by its next attempt."""
    w = world()
    order = reserve("a", tokens, max_tokens=50, text=1)
    w.run(order)
    for _ in range(9):
        w.step()
    if in_step:
        w.batch.plan(w.stuck.append)
    length, table = w.batch.running[0].blocks.length, list(w.batch.running[0].blocks.table)
    release(w)
    if in_step:
        assert not w.told, "a step still writes to its blocks"
        w.step()
    assert w.told == [Released("a", 1, 9)] and w.table.allocator.held_count == 0
    found = w.table.allocator.match_prefix(names(order, length + 3 * BLOCK))
    assert found == table[: length // BLOCK] and len(found) > tokens // BLOCK
    w.table.allocator.check_invariants()


def test_resumed_attempt_extends_its_names() -> None:
    """It was resumed itself: some of its blocks have names that no text stands for."""
    w = world()
    order = reserve("a", 10, max_tokens=50, text=1, resumed=4)
    w.run(order)
    for _ in range(6):
        w.step()
    release(w)
    assert len(w.table.allocator.match_prefix(names(order, 16))) == 16 // BLOCK


@pytest.mark.parametrize("why", ["no cache", "choices", "suspect", "broken step"])
def test_unusable_blocks_get_no_name(why: str) -> None:
    """Output gets no name if the cache is off, there are several choices, or its KV cannot be trusted."""
    w = world()
    w.table.prefix_cache = why != "no cache"
    order = reserve("a", 2 * BLOCK + 1, max_tokens=50, text=1, choices=2 if why == "choices" else 1)
    w.run(order)
    for _ in range(2 * BLOCK):
        w.step()
    if why == "suspect":
        w.table.allocator.forget(w.batch.running[0].blocks.table[:1])
    if why == "broken step":
        w.batch.plan(w.stuck.append)
        release(w)
        for sequence in w.batch.abandon():
            failure = WorkFailed("a", 1, Interrupt.ENGINE_ERROR, "the model failed")
            w.table.close(w.table.attempts[sequence.key], failure, is_sound=False)
    else:
        release(w)
    known = {"no cache": 0, "suspect": 0}.get(why, 2)
    assert len(w.table.allocator.match_prefix(names(order, 4 * BLOCK))) == known
    assert w.table.allocator.room == POOL - known


def test_failed_step_names_no_blocks() -> None:
    """A step that fails while its stream is being released adds no block to the cache."""
    core, ports = make_core()
    order = reserve("a", 2 * BLOCK - 1, max_tokens=8, text=1)
    core.order(order)
    answer = core.offered(PREFILL_INCARNATION, Offer("a", 1, 1, 2))
    assert isinstance(answer, OfferAccepted)
    core.table.allocator.insert(split_hashes(order.block_hashes), list(answer.block_ids)[:1])
    core.committed(PREFILL_INCARNATION, Commit("a", 1, (), 0, (FirstToken(0, 5),)), list(answer.block_ids), [])
    assert core.plan() is not None
    core.order(Release("a", 1))
    core.step_failed("out of luck")
    assert [type(one) for one in ports.said] == [Released]
    assert len(core.table.allocator.match_prefix(names(order, 2 * BLOCK))) == 1
