"""Greedy tokens through the paged engine equal `generate` of transformers."""

import os
import random
from pathlib import Path

import pytest
import torch

from engine.engine import SeqChunk
from engine.kv.allocator import BlockAllocator
from tests import tiny_models
from tests.engine import support

LENGTHS = (1, 16, 17, 70)
NEW_TOKENS = 16


def prompts_of(lengths: tuple[int, ...], seed: int, highest: int = tiny_models.VOCAB) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, highest) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("kind", list(tiny_models.KINDS))
def test_tiny_models_match_transformers(kind: str, tmp_path: Path) -> None:
    """Greedy tokens equal those of transformers alone, in chunks and in a batch."""
    path = tiny_models.make(kind, tmp_path)
    prompts = prompts_of(LENGTHS, seed=7)
    expected = support.plain_greedy(path, prompts, NEW_TOKENS)
    assert len({token for answer in expected for token in answer}) > 10, (
        "the model says too little to tell caches apart"
    )
    engine = support.load(path)
    for index in (0, -1):
        alone = support.engine_greedy(engine, [prompts[index]], NEW_TOKENS, chunk=512)
        assert alone == [expected[index]], f"{len(prompts[index])} tokens alone"
    assert support.engine_greedy(engine, prompts, NEW_TOKENS, chunk=13) == expected, "together, in chunks of 13"
    assert support.engine_greedy(engine, prompts, NEW_TOKENS, chunk=32, join_every=3) == expected, (
        "joining at every third step"
    )


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size_gives_equal_tokens(block_size: int, tmp_path: Path) -> None:
    """Greedy tokens equal those of transformers with any block size."""
    path = tiny_models.make("mistral", tmp_path)
    prompts = prompts_of((1, 9, 70), seed=3)
    engine = support.load(path, block_size)
    assert support.engine_greedy(engine, prompts, 12, chunk=20) == support.plain_greedy(path, prompts, 12)


def test_forward_returns_only_wanted_logits(tmp_path: Path) -> None:
    """A forward pass counts its tokens, returns the wanted logits and writes to its own blocks only."""
    engine = support.load(tiny_models.make("llama", tmp_path))
    assert engine.tokens_forwarded == 0, "the self-check does not count"
    assert not engine.pool.any(), "the self-check leaves nothing behind"
    none = engine.forward([SeqChunk([7, 8, 9], 0, [3], False)])
    both = engine.forward(
        [SeqChunk([10], 3, [3], True), SeqChunk([7, 8, 9], 0, [4], False), SeqChunk([11, 12], 0, [5], True)]
    )
    assert none.shape == (0, tiny_models.VOCAB)
    assert both.shape == (2, tiny_models.VOCAB) and both.dtype == torch.float32
    assert engine.tokens_forwarded == 3 + 6
    touched = {block for block in range(engine.blocks) if engine.pool[block].any()}
    assert touched == {3, 4, 5}, "a forward writes to its chunks' blocks only"


def test_unwritten_slots_do_not_matter(tmp_path: Path) -> None:
    """Greedy tokens stay the same if the pool is filled with NaN before."""
    engine = support.load(tiny_models.make("gemma2", tmp_path))
    prompts = prompts_of((5, 30), seed=5)
    clean = support.engine_greedy(engine, prompts, 10, chunk=11)
    engine.pool.fill_(float("nan"))
    assert support.engine_greedy(engine, prompts, 10, chunk=11) == clean


def test_forks_copy_shared_blocks_on_write(tmp_path: Path) -> None:
    """Forks of one prompt share its blocks and copy a block before they write to it."""
    engine = support.load(tiny_models.make("llama", tmp_path))
    allocator = BlockAllocator(engine.blocks)
    [prompt] = prompts_of((21,), seed=11)
    first = support.Stream(engine, allocator, prompt)
    engine.forward([first.next_chunk(64)])
    second = support.Stream(engine, allocator, prompt)
    second.blocks, second.computed = first.blocks.fork(), first.computed
    first.known.append(50)
    second.known.append(60)
    for _ in range(8):
        rows = engine.forward([first.next_chunk(1), second.next_chunk(1)]).argmax(dim=-1).tolist()
        first.known.append(rows[0])
        second.known.append(rows[1])
    assert first.blocks.table[0] == second.blocks.table[0], "the full block is shared"
    assert first.blocks.table[1] != second.blocks.table[1], "the partial one was copied"
    assert first.output[1:] == support.engine_greedy(engine, [[*prompt, 50]], 8, chunk=64)[0]
    assert second.output[1:] == support.engine_greedy(engine, [[*prompt, 60]], 8, chunk=64)[0]


@pytest.mark.skipif(not os.environ.get("CROSSDOCK_TEST_MODEL"), reason="CROSSDOCK_TEST_MODEL names no model folder")
def test_default_model_matches_transformers() -> None:
    """The default test model gives the same greedy tokens as transformers."""
    path = Path(os.environ["CROSSDOCK_TEST_MODEL"])
    prompts = prompts_of((1, 30, 150), seed=2, highest=40_000)
    engine = support.load(path, kv_bytes=256 << 20)
    assert support.engine_greedy(engine, prompts, 64, chunk=64) == support.plain_greedy(path, prompts, 64)
