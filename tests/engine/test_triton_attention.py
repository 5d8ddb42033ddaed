"""The attention kernels, run by Triton's interpreter, beside the torch backend."""

import pytest
import torch

from engine.attention.forward_batch import NO_SLOT, ForwardBatch, SeqChunk, pack
from engine.attention.interface import AttentionBackend, AttentionCall
from engine.attention.torch_backend import TorchAttention

triton_backend = pytest.importorskip("engine.attention.triton_backend", reason="Triton is not installed")

PLAIN = AttentionCall(None, None, None)
CALLS = {
    "plain": PLAIN,
    "window": AttentionCall(5, None, None),
    "softcap": AttentionCall(None, 0.3, 1.5),
    "both": AttentionCall(9, 0.3, 1.5),
}


def random_pool(heads: int, dim: int, size: int, dtype: torch.dtype = torch.float32, blocks: int = 24) -> torch.Tensor:
    return torch.randn(blocks, 2, 2, size, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def chunk(start: int, count: int, table: list[int]) -> SeqChunk:
    return SeqChunk([7] * count, start, table, True)


def attended(
    backend: AttentionBackend, batch: ForwardBatch, heads: int, call: AttentionCall, pool: torch.Tensor
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens, (kv_heads, dim) = len(batch.positions), pool.shape[4:]
    q = torch.randn(tokens, heads, dim, generator=generator).to(pool.dtype)
    k, v = torch.randn(2, tokens, kv_heads, dim, generator=generator).to(pool.dtype)
    metadata = backend.plan(batch)
    backend.write(1, k, v, metadata)
    return backend.read(1, call, q, metadata)


def compare(
    chunks: list[SeqChunk], call: AttentionCall, heads: int, pool: torch.Tensor, tolerance: float = 1e-5
) -> None:
    ours, theirs = pool.clone(), pool.clone()
    got = attended(triton_backend.TritonAttention(ours), pack(chunks, ours), heads, call, ours)
    want = attended(TorchAttention(theirs), pack(chunks, theirs), heads, call, theirs)
    assert torch.equal(ours, theirs), "what was written"
    assert torch.allclose(got.float(), want.float(), atol=tolerance), (got.float() - want.float()).abs().max()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_single_tokens_match_torch(call: AttentionCall) -> None:
    """The longest has more than one split."""
    chunks = [chunk(0, 1, [3]), chunk(37, 1, list(range(10, 0, -1))), chunk(143, 1, [*range(11, 23), *range(24)][:36])]
    compare(chunks, call, 4, random_pool(2, 16, 4))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_mixed_chunks_match_torch(call: AttentionCall) -> None:
    """A chunk of more than one tile, with context in the pool; another from the beginning."""
    pool = random_pool(1, 16, 5)
    chunks = [chunk(11, 70, list(range(17))), chunk(0, 6, [18, 17]), chunk(22, 1, [23, 20, 21, 19, 22])]
    compare(chunks, call, 2, pool)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(3, 1, 24, 1), (6, 2, 64, 3), (2, 2, 16, 16)])
def test_odd_sizes_match_torch(heads: int, kv_heads: int, dim: int, size: int) -> None:
    """Attention equals the reference for sizes that are not powers of two."""
    pool = random_pool(kv_heads, dim, size)
    table = list(range(23, 0, -1))
    compare([chunk(18, 1, table), chunk(2, 1, [0, 0, 0])], PLAIN, heads, pool)
    compare([chunk(9, 9, table), chunk(0, 3, [0, 0, 0])], PLAIN, heads, pool)


def test_float16_matches_torch() -> None:
    """The interpreter's products of bfloat16 are of the bits as integers, so that type is for a GPU to try."""
    pool = random_pool(2, 16, 4, torch.float16)
    compare([chunk(37, 1, list(range(10))), chunk(4, 1, [12, 11])], PLAIN, 4, pool, 3e-3)


def test_unwritten_slots_are_not_read() -> None:
    """NaN in spare slots and in blocks past the end changes nothing."""
    pool = random_pool(2, 16, 4)
    pool[9:] = torch.nan
    pool[8, :, :, 2:] = torch.nan
    backend = triton_backend.TritonAttention(pool)
    for chunks in ([chunk(33, 1, list(range(10)))], [chunk(30, 4, list(range(10)))]):
        assert torch.isfinite(attended(backend, pack(chunks, pool), 4, CALLS["window"], pool)).all()


def test_padding_rows_write_nothing() -> None:
    """Rows that only fill a batch up write nothing to the pool."""
    for make in (triton_backend.TritonAttention, TorchAttention):
        pool = random_pool(2, 16, 4)
        batch = pack([chunk(5, 1, [2, 3]), chunk(0, 1, [7])], pool)
        batch.slots[1] = NO_SLOT
        before = pool.clone()
        attended(make(pool), batch, 4, PLAIN, pool)
        assert torch.equal(pool[7], before[7]) and not torch.equal(pool[3], before[3])
