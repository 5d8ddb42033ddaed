"""What is computed for a token has the same bits one by one, in any chunks, and beside others: so a resumed stream is exact."""

import random
from pathlib import Path

import pytest
import torch

from engine.attention import batch_invariant as batch_invariant
from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from tests import tiny_models
from tests.engine import support

TOKENS = 2 * batch_invariant.TILE + 90
HEADS = (2, 2, 16)
needs_steady = pytest.mark.skipif(
    not batch_invariant.min_rows(*HEADS), reason="the matrix products of this machine round rows differently"
)


def attended(softcap: float | None, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last 70 of 300 tokens: by `batch_invariant`, and by the formula in double precision."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3, 2, 70, 16, generator=generator)
    key, value = torch.randn(2, 3, 300, 16, generator=generator)
    places = torch.arange(300)
    hidden = places > places[230:, None]
    if window is not None:
        hidden |= places <= places[230:, None] - window
    mask = torch.zeros(70, 300).masked_fill_(hidden, -torch.inf)
    scores = query.double() @ key.double().unsqueeze(1).transpose(2, 3) * 0.2
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    want = torch.softmax(scores + mask, -1) @ value.double().unsqueeze(1)
    return batch_invariant.attend(query, key, value, mask if window else mask[:, 230:], 8, 0.2, softcap), want.float()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_it_is_attention(softcap: float | None, window: int | None) -> None:
    got, want = attended(softcap, window)
    assert torch.allclose(got, want, atol=1e-5)


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


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "gemma2", "gemma3", "smollm3", "mixtral"]
)
def test_a_token_computed_again_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    window = {"sliding_window": 300} if "sliding_window" in tiny_models.KINDS[kind][1] else {}
    path = tiny_models.make(kind, tmp_path, max_position_embeddings=1024, **window)
    engine = support.load(path)
    if not engine.is_batch_invariant:
        pytest.skip(
            "the matrix products of this machine round rows differently, and the CPU kernels do not run this model"
        )
    source = random.Random(7)
    tokens = [source.randrange(6, tiny_models.VOCAB) for _ in range(TOKENS)]
    one_by_one = kv_and_logits(engine, tokens, random.Random(0), 1)
    for seed, most in ((1, 30), (2, 256), (3, TOKENS)):
        kv, logits = kv_and_logits(engine, tokens, random.Random(seed), most)
        assert torch.equal(kv, one_by_one[0]), f"{kind}: KV in chunks of up to {most}, seed {seed}"
        assert torch.equal(logits, one_by_one[1]), f"{kind}: logits in chunks of up to {most}, seed {seed}"


def test_what_rounds_by_the_number_of_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm
    monkeypatch.setattr(
        torch, "bmm", lambda a, b: real(a.double(), b.double()).float() if a.shape[1] > 16 else real(a, b)
    )
    assert not batch_invariant.min_rows(*HEADS)
