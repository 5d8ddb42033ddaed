"""A decode worker computes what a prompt adds to KV that it has: between steps of its streams, without a hand-over."""

import pytest

from decode_worker.core import DecodeCore
from decode_worker.requests import Phase
from decode_worker.suffixes import STEPS_QUEUED_MAX, Slice
from proto.codec import pack_tokens
from proto.errors import FinishReason, Interrupt, RemoteProtocolError
from proto.messages import (
    CacheMiss,
    Chunk,
    Destination,
    Finished,
    Prefill,
    Release,
    Released,
    Step,
    StepDone,
    TokenItem,
    Tokens,
    WorkFailed,
)
from tests.workers.test_batch import BLOCK, GATEWAYS, reserve
from tests.workers.test_reservations import make_core

TOKENS = 3 * BLOCK + 1
OWN = Destination("tcp://d", 9)


def begin(
    core: DecodeCore[str],
    name: str = "a",
    *,
    cached: int = 0,
    tokens: int = TOKENS,
    ids: bytes | None = None,
    text: int = 1,
) -> Prefill:
    order = reserve(name, tokens, text=text, max_tokens=4)
    core.order(order)
    prefill = Prefill(name, 1, tokens, order.sampling, 1, 0, 0, GATEWAYS[0], OWN, BLOCK, order.block_hashes, cached)
    core.order(prefill, pack_tokens(range(tokens)) if ids is None else ids)
    return prefill


def step(core: DecodeCore[str], number: int, start: int, end: int = TOKENS, name: str = "a") -> None:
    core.order(Step(number, (Chunk(name, 1, start, end - start),)))


def next_slice(core: DecodeCore[str], most: int = 100, now: float = 0.0) -> Slice[str]:
    found = core.next_slice(most, now)
    assert found is not None
    return found


def first(name: str = "a", token: int = 5, finish: FinishReason | None = None) -> list[TokenItem]:
    return [TokenItem(name, 1, 0, 0, (token,), finish)]


def keep(core: DecodeCore[str], tokens: int = TOKENS, name: str = "z") -> None:
    """An earlier prompt of the same text was computed here."""
    begin(core, name, tokens=tokens)
    step(core, 0, 0, tokens, name)
    core.slice_computed(next_slice(core), first(name, finish=FinishReason.STOP), 0.0)


def test_suffix_joins_batch_after_last_slice() -> None:
    """A suffix is computed in slices once a step says so, and joins the batch with the last of them."""
    core, ports = make_core()
    begin(core)
    assert core.next_slice(100, 0.0) is None, "not before a step says so"
    step(core, 7, 0)
    starts = []
    for now in (1.0, 1.1, 1.2):
        part = next_slice(core, 5, now)
        starts.append((part.start, part.tokens, part.is_last))
        core.slice_computed(part, first() if part.is_last else [], now + 0.05)
    assert starts == [(0, tuple(range(5)), False), (5, tuple(range(5, 10)), False), (10, tuple(range(10, 13)), True)]
    done = [said for said in ports.said if isinstance(said, StepDone)]
    assert [(said.step_id, said.computed) for said in done] == [(7, (Chunk("a", 1, 0, TOKENS),))]
    assert done[0].step_ms == pytest.approx(250), "with what ran between its slices"
    assert [said.items for said in ports.said if isinstance(said, Tokens)] == [tuple(first())]
    assert core.table.attempts["a", 1].phase is Phase.RUNNING
    plan = core.plan()
    assert plan is not None and [(row.token, row.position) for row in plan.rows] == [(5, TOKENS)]


def test_suffix_reports_cache_misses() -> None:
    """A suffix starts after its cached tokens; a shorter cache than expected is reported as a miss."""
    core, ports = make_core()
    keep(core)
    begin(core, "b", cached=3 * BLOCK)
    step(core, 1, 3 * BLOCK, name="b")
    assert next_slice(core).start == 3 * BLOCK
    core.order(Release("b", 1))
    core.suffixes.failed(next(iter_slices(core, "b")), "x")
    begin(core, "c", cached=2 * BLOCK, text=2)
    assert CacheMiss("c", 1, 0) in ports.said


def iter_slices(core: DecodeCore[str], name: str):  # type: ignore[no-untyped-def]
    attempt = core.table.attempts[(name, 1)]
    assert attempt.suffix is not None
    yield Slice(attempt, attempt.suffix, (1,), attempt.suffix.computed_tokens)


def test_fully_cached_prompt_redoes_last_block() -> None:
    """The first token is drawn from the logits of its last one."""
    core, _ = make_core()
    keep(core, 2 * BLOCK)
    begin(core, "b", cached=2 * BLOCK, tokens=2 * BLOCK)
    step(core, 1, BLOCK, 2 * BLOCK, "b")
    part = next_slice(core)
    assert part.start == BLOCK and part.suffix.blocks[1] != core.table.allocator.match_prefix([])
    assert len(set(part.suffix.blocks)) == 2


def test_one_token_answer_never_joins() -> None:
    """An answer that ends with its first token finishes without joining the batch."""
    core, ports = make_core()
    begin(core)
    step(core, 0, 0)
    core.slice_computed(next_slice(core), first(finish=FinishReason.STOP), 0.0)
    assert isinstance(ports.said[-1], Finished) and ports.said[-1].output_tokens == 1
    assert not core.table.attempts and core.table.allocator.held_count == 0


@pytest.mark.parametrize("in_slice", [False, True])
def test_release_waits_for_running_slice(in_slice: bool) -> None:
    """A released suffix frees its blocks once no slice writes to them, and its step is answered."""
    core, ports = make_core()
    begin(core)
    step(core, 3, 0)
    part = next_slice(core, 5) if in_slice else None
    core.order(Release("a", 1))
    if part is not None:
        assert Released("a", 1) not in ports.said and core.table.allocator.held_count
        core.slice_computed(part, [], 0.0)
    assert Released("a", 1) in ports.said and core.table.allocator.held_count == 0
    assert core.next_slice(5, 0.0) is None
    assert StepDone(3, (), 0.0, 0) in ports.said, "its step is answered, with nothing computed"


def test_failed_slice_fails_its_attempt() -> None:
    """A failed step, or logits from which no token can be drawn, fails the attempt with an engine error."""
    core, ports = make_core()
    for name, number in (("a", 0), ("b", 1)):
        begin(core, name, text=number)
        step(core, number, 0, name=name)
        part = next_slice(core)
        if name == "a":
            core.suffixes.failed(part, "planted")
        else:
            core.slice_computed(part, None, 0.0)
    failures = [said for said in ports.said if isinstance(said, WorkFailed)]
    assert [(said.request_id, said.reason) for said in failures] == [
        ("a", Interrupt.ENGINE_ERROR),
        ("b", Interrupt.ENGINE_ERROR),
    ]
    assert isinstance(ports.said[-1], StepDone), "after the failure, or the coordinator counts a first token"
    assert core.table.allocator.held_count == 0


@pytest.mark.parametrize("ids", [b"", pack_tokens([99] * TOKENS), pack_tokens(range(TOKENS - 1))])
def test_invalid_ids_fail_only_their_attempt(ids: bytes) -> None:
    core, ports = make_core()
    begin(core, ids=ids)
    assert isinstance(ports.said[-1], WorkFailed) and not core.table.attempts


def test_suffix_without_room_takes_nothing() -> None:
    """A suffix that finds no room fails and holds no block."""
    core, ports = make_core()
    begin(core, tokens=9 * BLOCK)
    assert isinstance(ports.said[-1], WorkFailed) and core.table.allocator.held_count == 0


def test_pending_grammar_lets_others_pass() -> None:
    """A suffix that waits for its grammar lets others go first, and those are finished before it begins."""
    core, _ = make_core()
    begin(core, "a")
    suffix = core.table.attempts["a", 1].suffix
    assert suffix is not None
    suffix.is_ready = False
    step(core, 0, 0)
    begin(core, "b", text=2)
    step(core, 1, 0, name="b")
    part = next_slice(core, 5)
    assert part.attempt.key == ("b", 1)
    core.slice_computed(part, [], 0.0)
    core.suffixes.grammar_ready(core.table.attempts["a", 1])
    assert next_slice(core, 5).attempt.key == ("b", 1), "what is begun is finished first"


def test_lost_coordinator_releases_suffix() -> None:
    """A suffix is released, and no slice of it runs, once the coordinator is lost."""
    core, ports = make_core()
    begin(core)
    step(core, 0, 0)
    core.coordinator_lost(1.0)
    assert core.next_slice(5, 1.0) is None and Released("a", 1) in ports.said and not core.table.attempts


def test_impossible_orders_end_the_link() -> None:
    """A step of two chunks, or more queued steps than allowed, is a protocol error."""
    core, _ = make_core()
    chunk = Chunk("a", 1, 0, 4)
    with pytest.raises(RemoteProtocolError):
        core.order(Step(0, (chunk, Chunk("b", 1, 0, 4))))
    for number in range(STEPS_QUEUED_MAX):
        core.order(Step(number, (chunk,)))
    with pytest.raises(RemoteProtocolError):
        core.order(Step(99, (chunk,)))


def test_repeated_suffix_order_is_ignored() -> None:
    core, ports = make_core()
    prefill = begin(core)
    held = core.table.allocator.held_count
    core.order(prefill, pack_tokens(range(TOKENS)))
    assert core.table.allocator.held_count == held and not ports.said
