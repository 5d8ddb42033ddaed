"""The prefill worker's bookkeeping under random orders, releases and transfer results."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.allocator import BlockAllocator
from prefill_worker.prompts import FinalReport, PrefillRequest, PromptTable
from proto.errors import Interrupt
from proto.messages import Chunk, Destination, Finished, HandedOver, Prefill, Released, WorkFailed
from proto.sampling import Sampling

BLOCK = 4


def order(name: str, tokens: int, attempt: int = 1, text: int | None = None, cached: int = 0) -> Prefill:
    """Prompts of one `text` begin alike; without one, nothing is looked up or kept."""
    blocks = range(tokens // BLOCK) if text is not None else ()
    hashes = b"".join(bytes([text or 0, block]) * 8 for block in blocks)
    return Prefill(
        name,
        attempt,
        tokens,
        Sampling(max_tokens=5),
        1,
        0,
        0,
        Destination("g", 1),
        Destination("d", 2),
        16,
        hashes,
        cached,
    )


def table(blocks: int = 20) -> PromptTable:
    return PromptTable(BlockAllocator(blocks), BLOCK)


def take(t: PromptTable, name: str, tokens: int, text: int | None = None, cached: int = 0) -> PrefillRequest:
    prompt = t.take_in(order(name, tokens, text=text, cached=cached), list(range(tokens)))
    assert isinstance(prompt, PrefillRequest)
    prompt.sending = True
    return prompt


def test_final_blocks_are_passed_on_once() -> None:
    """Each block is passed on once, as soon as it is final."""
    t = table()
    prompt = take(t, "a", 10)
    seen: list[tuple[int, int]] = []
    for start, length in ((0, 4), (4, 4), (8, 2)):
        work = t.runnable((Chunk("a", 1, start, length),))
        t.begin_step(work)
        assert t.end_step(work) == []
        first, blocks = t.fresh_blocks(prompt)
        seen.append((first, len(blocks)))
    assert seen == [(0, 1), (1, 1), (2, 1)] and prompt.done


def test_wrong_chunks_are_skipped() -> None:
    """Chunks out of order, beyond the prompt or of another attempt are not run."""
    t = table()
    take(t, "a", 10)
    for chunk in (Chunk("a", 1, 4, 4), Chunk("a", 1, 0, 11), Chunk("a", 2, 0, 4), Chunk("b", 1, 0, 4)):
        assert t.runnable((chunk,)) == []
    assert len(t.runnable((Chunk("a", 1, 0, 10),))) == 1
    assert len(t.runnable((Chunk("a", 1, 0, 4), Chunk("a", 1, 0, 10)))) == 1, "its blocks would be freed twice"


def test_repeated_prompt_order_changes_nothing() -> None:
    """A repeated order changes nothing, and an order without room fails."""
    t = table(3)
    take(t, "a", 10)
    assert t.take_in(order("a", 10), list(range(10))) is None
    failure = t.take_in(order("b", 10), list(range(10)))
    assert isinstance(failure, WorkFailed) and failure.reason is Interrupt.ENGINE_ERROR
    assert t.allocator.free_count == 0


def compute(t: PromptTable, prompt: PrefillRequest, tokens: int) -> None:
    work = t.runnable((Chunk(*prompt.key, prompt.computed_tokens, tokens),))
    assert len(work) == 1
    t.begin_step(work)
    t.end_step(work)


def test_known_prefix_is_not_recomputed() -> None:
    """A known prefix is shared, can be sent at once and is not computed again."""
    t = table()
    one = take(t, "a", 10, text=1)
    compute(t, one, 8)
    other = take(t, "b", 13, text=1, cached=8)
    assert other.blocks[:2] == one.blocks[:2] and not set(other.blocks[2:]) & set(one.blocks)
    assert (other.cached_tokens, other.computed_tokens) == (8, 8)
    assert t.fresh_blocks(other) == (0, one.blocks[:2]), "what is known is final: it can be sent at once"
    assert t.runnable((Chunk("b", 1, 0, 4),)) == [], "a shared block is never written to"
    compute(t, other, 5)
    assert t.fresh_blocks(other) == (2, other.blocks[2:]) and other.done
    t.sent(one, HandedOver("a", 1, 1, 1.0))
    t.sent(other, HandedOver("b", 1, 1, 1.0))
    assert (t.allocator.cached_count, t.allocator.free_count) == (3, 17), (
        "full blocks stay, in case they are wanted again"
    )
    assert take(t, "c", 16, text=1, cached=12).blocks[:3] == other.blocks[:3]


def test_cached_tokens_follow_the_coordinator() -> None:
    """A prompt uses at most the cached tokens that the coordinator believes, and fewer if fewer are here."""
    t = table()
    compute(t, take(t, "a", 8, text=1), 8)
    assert take(t, "b", 12, text=1, cached=4).cached_tokens == 4
    assert take(t, "c", 12, text=1, cached=12).cached_tokens == 8
    assert take(t, "d", 12, text=2, cached=8).cached_tokens == 0


def test_last_token_is_always_computed() -> None:
    t = table()
    compute(t, take(t, "a", 8, text=1), 8)
    again = take(t, "b", 8, text=1, cached=8)
    assert again.cached_tokens == 4 and not again.done


def test_partial_prompt_shares_computed_part() -> None:
    """A prompt that is not complete shares the blocks that are computed, not those that a step still writes."""
    t = table()
    prompt = take(t, "a", 12, text=1)
    compute(t, prompt, 4)
    work = t.runnable((Chunk("a", 1, 4, 4),))
    t.begin_step(work)
    assert take(t, "b", 12, text=1, cached=8).cached_tokens == 4, "a block that a step still writes is not known"


def test_broken_prompt_is_not_shared() -> None:
    """A prompt with a broken step is not found in the cache by other prompts."""
    t = table()
    prompt = take(t, "a", 12, text=1)
    compute(t, prompt, 8)
    work = t.runnable((Chunk("a", 1, 8, 4),))
    t.begin_step(work)
    t.end_step(work, broken=frozenset({prompt.key}))
    assert take(t, "b", 12, text=1, cached=8).cached_tokens == 0


def test_disabled_prefix_cache_keeps_nothing() -> None:
    t = PromptTable(BlockAllocator(20), BLOCK, prefix_cache=False)
    prompt = take(t, "a", 8, text=1)
    compute(t, prompt, 8)
    assert take(t, "b", 8, text=1, cached=4).cached_tokens == 0
    t.sent(prompt, HandedOver("a", 1, 1, 1.0))
    assert t.allocator.cached_count == 0


def test_cached_blocks_make_room_for_prompts() -> None:
    """Cached blocks are given up for a prompt that fits; a prompt that does not fit takes none."""
    t = table(4)
    prompt = take(t, "a", 12, text=1)
    compute(t, prompt, 12)
    t.sent(prompt, HandedOver("a", 1, 1, 1.0))
    assert isinstance(t.take_in(order("b", 20, text=1, cached=12), list(range(20))), WorkFailed)
    assert (t.allocator.held_count, t.allocator.cached_count) == (0, 3)
    assert len(take(t, "c", 16, text=2).blocks) == 4 and t.allocator.cached_count == 0


def test_release_waits_for_step_and_transfer() -> None:
    """A release is reported once, after the step in flight and the transfer have both ended."""
    t = table()
    prompt = take(t, "a", 10)
    work = t.runnable((Chunk("a", 1, 0, 8),))
    t.begin_step(work)
    assert t.close(prompt, Released("a", 1)) == []
    assert t.sent(prompt, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "aborted")) == []
    assert t.allocator.held_count == 3, "the step in flight still writes"
    assert t.end_step(work) == [Released("a", 1)], "the first reason is the one told"
    assert t.allocator.free_count == 20 and not t.prompts
    assert t.close(prompt, Finished("a", 1, 1, 0)) == [], "told once"


def test_failure_reports_emitted_first_token() -> None:
    """A transfer that fails after the first token reports the tokens that were sent."""
    t = table()
    prompt = take(t, "a", 10)
    compute(t, prompt, 10)
    prompt.output_tokens = 2
    [failed] = t.sent(prompt, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "aborted"))
    assert isinstance(failed, WorkFailed) and failed.output_tokens == 2


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_prompts_report_once_and_free_blocks(data: st.DataObject) -> None:
    """Each prompt gets one final report and all blocks come back, for random sequences of events."""
    t = table()
    told: list[FinalReport] = []
    made = 0
    flying: list[tuple[PrefillRequest, Chunk]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        prompts = list(t.prompts.values())
        match data.draw(st.sampled_from(["take", "step", "close", "sent"])):
            case "take":
                made += 1
                tokens = data.draw(st.integers(1, 30))
                text, cached = data.draw(st.sampled_from([None, 1, 2])), data.draw(st.integers(0, 30))
                prompt = t.take_in(order(f"r{made}", tokens, text=text, cached=cached), list(range(tokens)))
                if isinstance(prompt, PrefillRequest):
                    prompt.sending = True
                elif prompt is not None:
                    told.append(prompt)
            case "step":
                if flying:
                    told += t.end_step(flying)
                    flying = []
                else:
                    chunks = [Chunk(*p.key, p.computed_tokens, min(3, p.order.prompt_tokens - p.computed_tokens))
                              for p in prompts if not p.done]  # fmt: skip
                    flying = t.runnable(tuple(chunks))
                    t.begin_step(flying)
            case "close" if prompts:
                prompt = data.draw(st.sampled_from(prompts))
                told += t.close(prompt, Released(*prompt.key))
            case "sent" if prompts:
                prompt = data.draw(st.sampled_from(prompts))
                told += t.sent(prompt, HandedOver(*prompt.key, 1, 1.0))
        t.allocator.check_invariants()
        assert t.allocator.held_count == len({block for p in t.prompts.values() for block in p.blocks})
        for p in t.prompts.values():
            written = {
                block for q in t.prompts.values() if q is not p for block in q.blocks[: q.cached_tokens // BLOCK]
            }
            assert not written & set(p.blocks[p.computed_tokens // BLOCK :]), "a block is shared and written to"
    told += t.end_step(flying)
    for prompt in list(t.prompts.values()):
        told += t.sent(prompt, HandedOver(*prompt.key, 1, 1.0))
    assert t.allocator.free_count + t.allocator.cached_count == 20
    assert sorted(f.request_id for f in told) == sorted(f"r{n}" for n in range(1, made + 1))
