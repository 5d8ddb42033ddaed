"""The kernels of the GPU decoder, run by Triton's interpreter, beside the same operations in plain torch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.forward_batch import NO_SLOT, SeqChunk, pack
from engine.engine import Engine
from engine.gpu.ops import TorchOps
from engine.gpu.weights import DecoderWeights, fuse
from engine.model.backend import recognised
from tests import tiny_models
from tests.engine.gpu_runners import candidate_of, gpu_engine
from tests.engine.test_exactness import prompts_of
from tests.engine.test_gpu_runner import SAMPLINGS, pipelined

triton_ops = pytest.importorskip("engine.gpu.triton_ops", reason="Triton is not installed")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("hidden", [24, 64])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_matches_torch(hidden: int, adds: bool) -> None:
    """The norm kernel equals torch, with and without an addition."""
    pool = random(4, 1, 2, 4, 1, 16)
    x, delta, weight = random(3, hidden), random(3, hidden) + 1 if adds else None, random(hidden)
    want = TorchOps(pool).add_norm(x.clone(), delta, weight, 1e-5)
    got = triton_ops.TritonOps(pool).add_norm(x.clone(), delta, weight, 1e-5)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("activation", [0, 1])
def test_activation_kernels_match_torch(activation: int) -> None:
    pool, gate_up = random(4, 1, 2, 4, 1, 16), random(3, 2 * 40) * 4
    want = TorchOps(pool).activate(gate_up, activation)
    assert torch.allclose(triton_ops.TritonOps(pool).activate(gate_up, activation), want, atol=1e-5)


def model_of(path: Path) -> tuple[DecoderWeights, torch.Tensor]:
    candidate, pool = candidate_of(path)
    return fuse(recognised(candidate), 64), pool


@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rotate_and_write_matches_torch(kind: str, rotary: int, tmp_path: Path) -> None:
    """The kernel norms and rotates queries and keys, and writes KV, as torch does."""
    model, pool = model_of(tiny_models.make(kind, tmp_path))
    model = replace(model, cosine=model.cosine[:, :rotary].contiguous(), sine=model.sine[:, :rotary].contiguous())
    pool.normal_()
    qkv = random(6, (4 + 2 * 2) * 16)
    found = []
    for make in (TorchOps, triton_ops.TritonOps):
        own = pool.clone()
        ops = make(own)
        batch = pack([SeqChunk([7] * 5, 14, [3, 2], False), SeqChunk([8], 0, [5], False)], own)
        batch.slots[5] = NO_SLOT
        q = ops.rotate_and_write(1, model.layers[1], model, qkv, ops.attention.plan(batch))
        found.append((q, own))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5) and not torch.equal(found[0][1], pool)
    assert torch.equal(found[1][1][5], pool[5]), "a row that fills the batch up writes nothing"


def logits_of(engine: Engine) -> torch.Tensor:
    chunks = [SeqChunk(list(range(6, 15)), 0, [3], True), SeqChunk([9] * 5, 0, [1], True)]
    first = engine.forward(chunks)
    decoded = engine.forward([SeqChunk([11], 9, [3], True), SeqChunk([12], 5, [1], True)])
    return torch.cat((first, decoded))


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_whole_model_matches_torch(kind: str, tmp_path: Path) -> None:
    """Logits of a whole model over the Triton kernels equal those over torch."""
    path = tiny_models.make(kind, tmp_path, num_hidden_layers=2, vocab_size=64, spread=0.1)
    want = logits_of(gpu_engine(path))
    assert torch.allclose(logits_of(gpu_engine(path, triton_ops.TritonOps)), want, atol=1e-3)


def test_pipeline_tokens_match_torch(tmp_path: Path) -> None:
    """The pipeline draws the same tokens over the Triton kernels as over torch."""
    path = tiny_models.make("qwen2", tmp_path, num_hidden_layers=1, vocab_size=64, max_position_embeddings=64)
    prompts = prompts_of((5, 2), seed=1, highest=60)
    want = pipelined(gpu_engine(path), prompts, SAMPLINGS[:2], 5)
    assert pipelined(gpu_engine(path, triton_ops.TritonOps), prompts, SAMPLINGS[:2], 5) == want
