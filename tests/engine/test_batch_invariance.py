"""What is computed for a token has the same bits one by one, in any chunks, and beside others: so a resumed stream is exact."""

import random
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from tests import tiny_models
from tests.engine import support

TOKENS = 330  # several tiles of keys, and more than a sliding window


def kv_and_logits(
    engine: Engine, tokens: list[int], cuts: random.Random, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV [tokens, …] and the last logits, of a sequence computed in chunks of at most `most`, beside another one."""
    allocator = BlockAllocator(engine.blocks)
    allocator.free(cuts.sample(allocator.allocate(engine.blocks), engine.blocks))
    stream = support.Stream(engine, allocator, tokens)
    other = support.Stream(engine, allocator, tokens[::-1])
    logits = torch.empty(0)
    while stream.computed < len(tokens):
        chunks = [stream.next_chunk(cuts.randint(1, most))]
        if other.computed < len(tokens) and cuts.random() < 0.5:
            chunks.append(other.next_chunk(cuts.randint(1, 40)))
        logits = engine.forward(chunks)
    kv = engine.pool[stream.blocks.table].transpose(1, 3).flatten(0, 1)
    return kv[: len(tokens)].clone(), logits[0].clone()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_recomputed_tokens_have_same_bits(kind: str, tmp_path: Path) -> None:
    """KV and logits of a token have the same bits in chunks of any size."""
    window = {"sliding_window": 300} if "sliding_window" in tiny_models.KINDS[kind][1] else {}
    path = tiny_models.make(kind, tmp_path, max_position_embeddings=1024, **window)
    engine = support.load(path)
    if not engine.is_batch_invariant:
        pytest.skip("the CPU kernels do not run this model here, and nothing else is called batch-invariant")
    source = random.Random(7)
    tokens = [source.randrange(6, tiny_models.VOCAB) for _ in range(TOKENS)]
    one_by_one = kv_and_logits(engine, tokens, random.Random(0), 1)
    for seed, most in ((1, 30), (2, 256), (3, TOKENS)):
        kv, logits = kv_and_logits(engine, tokens, random.Random(seed), most)
        assert torch.equal(kv, one_by_one[0]), f"{kind}: KV in chunks of up to {most}, seed {seed}"
        assert torch.equal(logits, one_by_one[1]), f"{kind}: logits in chunks of up to {most}, seed {seed}"
