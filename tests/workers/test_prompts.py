"""The prefill worker's bookkeeping under random orders, releases and transfer results."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockAllocator
from prefill_worker.prompts import Farewell, Prompt, PromptTable
from proto.errors import Interrupt
from proto.messages import Chunk, Finished, HandedOver, Peer, Prefill, Released, WorkFailed
from proto.sampling import Sampling

BLOCK = 4


def order(name: str, tokens: int, attempt: int = 1) -> Prefill:
    return Prefill(name, attempt, tokens, Sampling(max_tokens=5), 1, 0, 0, Peer("g", 1), Peer("d", 2))


def table(blocks: int = 20) -> PromptTable:
    return PromptTable(BlockAllocator(blocks), BLOCK)


def take(t: PromptTable, name: str, tokens: int) -> Prompt:
    prompt = t.take_in(order(name, tokens), list(range(tokens)))
    assert isinstance(prompt, Prompt)
    prompt.sending = True
    return prompt


def test_blocks_are_passed_on_once_each_as_they_become_final() -> None:
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


def test_chunks_out_of_order_beyond_the_prompt_or_of_another_attempt_are_skipped() -> None:
    t = table()
    take(t, "a", 10)
    for chunk in (Chunk("a", 1, 4, 4), Chunk("a", 1, 0, 11), Chunk("a", 2, 0, 4), Chunk("b", 1, 0, 4)):
        assert t.runnable((chunk,)) == []
    assert len(t.runnable((Chunk("a", 1, 0, 10),))) == 1


def test_a_repeated_order_changes_nothing_and_no_room_is_a_failure() -> None:
    t = table(3)
    take(t, "a", 10)
    assert t.take_in(order("a", 10), list(range(10))) is None
    failure = t.take_in(order("b", 10), list(range(10)))
    assert isinstance(failure, WorkFailed) and failure.reason is Interrupt.ENGINE_ERROR
    assert t.allocator.free_count == 0


def test_release_during_a_step_and_a_transfer_waits_for_both() -> None:
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


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_prompt_is_told_of_once_and_every_block_comes_back(data: st.DataObject) -> None:
    t = table()
    told: list[Farewell] = []
    made = 0
    flying: list[tuple[Prompt, Chunk]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        prompts = list(t.prompts.values())
        match data.draw(st.sampled_from(["take", "step", "close", "sent"])):
            case "take":
                made += 1
                tokens = data.draw(st.integers(1, 30))
                prompt = t.take_in(order(f"r{made}", tokens), list(range(tokens)))
                if isinstance(prompt, Prompt):
                    prompt.sending = True
                elif prompt is not None:
                    told.append(prompt)
            case "step":
                if flying:
                    told += t.end_step(flying)
                    flying = []
                else:
                    chunks = [Chunk(*p.key, p.computed_tokens, 1) for p in prompts if not p.done]
                    flying = t.runnable(tuple(chunks))
                    t.begin_step(flying)
            case "close" if prompts:
                prompt = data.draw(st.sampled_from(prompts))
                told += t.close(prompt, Released(*prompt.key))
            case "sent" if prompts:
                prompt = data.draw(st.sampled_from(prompts))
                told += t.sent(prompt, HandedOver(*prompt.key, 1, 1.0))
        t.allocator.check_invariants()
        assert t.allocator.held_count == sum(len(p.blocks) for p in t.prompts.values())
    told += t.end_step(flying)
    for prompt in list(t.prompts.values()):
        told += t.sent(prompt, HandedOver(*prompt.key, 1, 1.0))
    assert t.allocator.free_count == 20
    assert sorted(f.request_id for f in told) == sorted(f"r{n}" for n in range(1, made + 1))
