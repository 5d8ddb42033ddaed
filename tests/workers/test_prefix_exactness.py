"""A prompt that begins with another's KV answers as one computed from its first token, with full and sliding windows."""

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from gateway.text.block_hashes import block_hashes
from kvtransfer.memory.digests import BlockDigests, Digester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from prefill_worker.compute import run_step
from prefill_worker.prompts import PrefillRequest, PromptTable
from proto.codec import pack_tokens
from proto.messages import Chunk, Destination, Prefill, Released, TokenItem
from proto.sampling import Sampling
from tests import tiny_models
from tests.engine.support import load

BLOCK = 16
BEGIN = [7 + token * 5 % 240 for token in range(100)]
ENDS = ([9, 8, 7], [11] * 40, [200 - token for token in range(60)])
GREEDY, DRAWN = Sampling(max_tokens=4, logprobs=3), Sampling(max_tokens=4, temperature=1.0, seed=3, logprobs=3)


def first_token(
    engine: Engine,
    table: PromptTable,
    name: str,
    tokens: list[int],
    *,
    cached: int,
    sampling: Sampling,
    chunk: int,
    digests: BlockDigests | None = None,
) -> tuple[PrefillRequest, TokenItem]:
    hashes = block_hashes(pack_tokens(tokens), BLOCK, "tenant:t")
    order = Prefill(
        name, 1, len(tokens), sampling, 1, 0, 0, Destination("g", 1), Destination("d", 2), 16, hashes, cached
    )
    prompt = table.take_in(order, tokens)
    assert isinstance(prompt, PrefillRequest)
    while True:
        length = min(chunk, len(tokens) - prompt.computed_tokens)
        work = table.runnable((Chunk(name, 1, prompt.computed_tokens, length),))
        table.begin_step(work)
        result = run_step(engine, work, digests.make if digests else lambda block_ids: None)
        table.end_step(work, result.broken)
        if prompt.done:
            return prompt, result.first_tokens[prompt.key][0]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_cached_prefix_keeps_first_tokens_exact(kind: str, tmp_path: Path) -> None:
    """First tokens and their probabilities are the same with and without a cached prefix."""
    engine = load(tiny_models.make(kind, tmp_path / kind))
    table = PromptTable(BlockAllocator(engine.blocks), BLOCK)
    plain = PromptTable(table.allocator, BLOCK, prefix_cache=False)
    first, _ = first_token(engine, table, "begin", [*BEGIN, 5], cached=0, sampling=GREEDY, chunk=32)
    shared = list(first.blocks)
    table.close(first, Released("begin", 1))
    before = engine.pool[shared[: len(BEGIN) // BLOCK]].clone()
    for at, end in enumerate(ENDS):
        for sampling in (GREEDY, DRAWN):
            name, tokens = f"{at}-{sampling.temperature}", [*BEGIN, *end]
            hot, item = first_token(engine, table, name, tokens, cached=1000, sampling=sampling, chunk=48)
            cold, expected = first_token(engine, plain, name, tokens, cached=1000, sampling=sampling, chunk=48)
            assert hot.cached_tokens >= 96 and cold.cached_tokens == 0 and item.cached_tokens == hot.cached_tokens
            assert item.tokens == expected.tokens
            ours, theirs = item.logprobs[0], expected.logprobs[0]
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-3)
            table.close(hot, Released(*hot.key))
            plain.close(cold, Released(*cold.key))
    assert engine.pool[shared[: len(BEGIN) // BLOCK]].equal(before), "what is shared was written to"


def test_final_blocks_are_digested_once(tmp_path: Path) -> None:
    """With chunks that end within blocks, and blocks that others have computed."""
    engine = load(tiny_models.make("llama", tmp_path / "llama"))
    info, table = engine.info, PromptTable(BlockAllocator(engine.blocks), BLOCK)
    layout = KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype)
    digests, now = (kind(PoolRows(engine.pool, layout)) for kind in (BlockDigests, Digester))
    digests.make(range(engine.blocks))  # of what was there before
    for number, end in enumerate((*ENDS, ENDS[0])):
        tokens = [*BEGIN, *end]
        prompt, _ = first_token(
            engine,
            table,
            f"r{number}",
            tokens,
            cached=1000,
            sampling=GREEDY,
            chunk=37,
            digests=digests,  # type: ignore[arg-type]
        )
        assert (prompt.cached_tokens > 0) is (number > 0)
        assert digests.digest(prompt.blocks) == now.digest(prompt.blocks)
        table.close(prompt, Released(*prompt.key))
