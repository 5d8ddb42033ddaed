"""How fast each kernel is alone, in GB/s or TFLOP/s, beside torch's own attention: `python -m tools.gpu.kernel_bench`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine import triton_launch
from engine.attention.forward_batch import SeqChunk, pack
from engine.attention.interface import AttentionCall
from engine.attention.triton_backend import TritonAttention
from tools.gpu.device import DTYPE, seconds_of
from tools.gpu.record import DEVICE, ON_GPU, attempt

HEADS, KV_HEADS, DIM, SIZE = (32, 8, 128, 16) if ON_GPU else (4, 2, 16, 16)
DECODES = (
    [(rows, context) for context in (1024, 4096, 512, 32_768) for rows in (64, 1, 16, 256)] if ON_GPU else [(2, 40)]
)
PREFILLS = (1024, 8192, 32_768) if ON_GPU else (40,)
TILES = ((64, 64, 4), (128, 64, 8), (128, 128, 8)) if ON_GPU else ((32, 32, 4),)  # (rows, keys, warps)
KV_BYTES_MAX = 20 << 30
CALL = AttentionCall(None, None, None)


def make_pool(tokens: int) -> torch.Tensor:
    return torch.randn(-(-tokens // SIZE), 1, 2, SIZE, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE)


def decode(rows: int, context: int) -> dict[str, Any]:
    blocks = -(-context // SIZE)
    pool = make_pool(rows * blocks * SIZE)
    chunks = [SeqChunk([7], context - 1, range(row * blocks, (row + 1) * blocks), True) for row in range(rows)]
    attention, batch = TritonAttention(pool), pack(chunks, pool)
    q, metadata = torch.randn(rows, HEADS, DIM, dtype=DTYPE, device=DEVICE), attention.plan(batch)
    seconds = seconds_of(lambda: attention.read(0, CALL, q, metadata))
    kv_bytes = rows * context * 2 * KV_HEADS * DIM * DTYPE.itemsize
    return {"us": 1e6 * seconds, "GB_s": kv_bytes / seconds / 1e9}


def prefill(tokens: int, tile: tuple[int, int, int] | None) -> dict[str, Any]:
    pool = make_pool(tokens)
    attention, real = TritonAttention(pool), triton_launch.launch
    if tile is not None:
        attention.rows, attention._tile = tile[:2]
        triton_launch.launch = lambda *of, **names: real(*of, **names, num_warps=tile[2])
    metadata = attention.plan(pack([SeqChunk([7] * tokens, 0, range(len(pool)), True)], pool))
    q = torch.randn(tokens, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    try:
        return rate(tokens, lambda: attention.read(0, CALL, q, metadata))
    finally:
        triton_launch.launch = real


def sdpa(tokens: int) -> dict[str, Any]:
    q, k, v = (torch.randn(1, heads, tokens, DIM, dtype=DTYPE, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return rate(tokens, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def rate(tokens: int, work: Callable[[], object]) -> dict[str, Any]:
    seconds = seconds_of(work, 10)
    return {"us": 1e6 * seconds, "TFLOP_s": 2 * HEADS * DIM * tokens * tokens / seconds / 1e12}


def main() -> None:
    for tokens in PREFILLS:
        attempt("kernels", f"prefill {tokens}", lambda n=tokens: prefill(n, None))
        attempt("kernels", f"prefill {tokens}, torch SDPA", lambda n=tokens: sdpa(n))
    for rows, context in DECODES:
        if rows * context * 2 * KV_HEADS * DIM * DTYPE.itemsize <= KV_BYTES_MAX:
            attempt("kernels", f"decode {rows} x {context}", lambda of=(rows, context): decode(*of))
    for tile in TILES:
        attempt(
            "kernels", f"prefill {PREFILLS[-2:][0]}, tiles {tile}", lambda tile=tile: prefill(PREFILLS[-2:][0], tile)
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
