"""Paged attention by the kernels in `triton_kernels`: for GPUs, and for Triton's interpreter."""

from typing import Any, Final

import numpy as np
import torch
from triton import next_power_of_2

from engine import triton_launch
from engine.attention import triton_kernels
from engine.attention.forward_batch import ForwardBatch, upload
from engine.attention.interface import AttentionCall, AttentionMetadata

SPLITS: Final = 32  # of a sequence's keys; always as many are launched, so that one CUDA graph fits any length
_SHARED_BYTES: Final = 101_376  # per program, on the smallest GPUs that are served: A10, L4, RTX
_EVERYTHING: Final = (1 << 31) - 1  # a window that hides nothing


def tile_sizes(dim_pad: int, number_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """(tokens of a prompt at a time, keys at a time), so that a program's numbers fit its GPU: all registers of one that
    computes in float32 hold a quarter as many."""
    rows = 64 if number_bytes < 4 else 32 if dim_pad <= 128 else 16
    tile = 64 if number_bytes < 4 else 32
    while tile > 16 and number_bytes * (rows * (dim_pad + tile) + 2 * tile * dim_pad) > shared_bytes:
        tile //= 2
    return rows, tile


class TritonAttention:
    name = "triton"

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` [blocks, layers, 2, block_size, kv_heads, head_dim]."""
        _, layers, _, self._block_size, self._kv_heads, self._head_dim = pool.shape
        self._layers: tuple[torch.Tensor, ...] = pool.view(pool.shape[0], layers, -1).unbind(1)
        """[blocks, 2 * block_size * kv_heads * head_dim] of each layer, with the pool's stride."""
        self._block_stride = pool.stride(0)
        self.v_distance = self._block_size * self._kv_heads * self._head_dim
        self._dim_pad = max(16, next_power_of_2(self._head_dim))
        properties = torch.cuda.get_device_properties(pool.device) if pool.is_cuda else None
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES)
        self.rows, self._tile = tile_sizes(self._dim_pad, pool.itemsize, shared_bytes)
        """`rows` is the number of prompt tokens in a tile of queries. `_tile` is the number of keys processed at once, and the
        fewest in a split."""

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        if batch.is_decode:
            return AttentionMetadata(batch)
        tiles_of = [-(-count // self.rows) for count in batch.counts]
        sequences = np.repeat(np.arange(len(tiles_of)), tiles_of)
        firsts = (np.arange(len(sequences)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * self.rows
        tiles = torch.from_numpy(np.stack((sequences, firsts)).astype(np.int32))
        return AttentionMetadata(batch, tiles=upload(tiles, batch.tables.device))

    def layer(self, layer: int) -> torch.Tensor:
        """Where K of a layer begins; V is `v_distance` numbers further."""
        return self._layers[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        k, v = (one if one.stride(-1) == 1 and one.stride(1) == self._head_dim else one.contiguous() for one in (k, v))
        width = self._kv_heads * self._head_dim
        triton_launch.launch(
            triton_kernels.write, (k.shape[0],), k, v, self._layers[layer], metadata.batch.slots, k.stride(0), v.stride(0),
            self.v_distance, WIDTH=width, PADDED=next_power_of_2(width),
        )  # fmt: skip

    def read(self, layer: int, call: AttentionCall, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        q = q.contiguous()
        scale = self._head_dim**-0.5 if call.scaling is None else call.scaling
        shared = (scale, call.softcap or 0.0, call.window or _EVERYTHING)
        sizes = {"DIM": self._head_dim, "DIM_PAD": self._dim_pad}
        of_keys = {
            "SOFTCAP": bool(call.softcap), "KV_HEADS": self._kv_heads, "BLOCK_SIZE": self._block_size, "TILE": self._tile,
        }  # fmt: skip
        if metadata.tiles is None:
            return self._decode(layer, q, metadata.batch, shared, sizes, of_keys)
        batch, tiles, out = metadata.batch, metadata.tiles, torch.empty_like(q)
        triton_launch.launch(
            triton_kernels.prefill, (tiles.shape[1], q.shape[1]), q, self._layers[layer], batch.tables, batch.lengths,
            batch.row_starts, tiles, out, *shared, tiles.shape[1], batch.tables.stride(0), self._block_stride,
            self.v_distance, HEADS=q.shape[1], ROWS=self.rows, **sizes, **of_keys,
        )  # fmt: skip
        return out

    def _decode(
        self, layer: int, q: torch.Tensor, batch: ForwardBatch, shared: tuple[Any, ...], sizes: dict[str, int],
        of_keys: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        sequences, heads, _ = q.shape
        group = heads // self._kv_heads
        sums = q.new_empty((sequences, heads, SPLITS, self._dim_pad), dtype=torch.float32)
        stats = q.new_empty((sequences, heads, SPLITS, 2), dtype=torch.float32)
        triton_launch.launch(
            triton_kernels.decode, (sequences, self._kv_heads, SPLITS), q, self._layers[layer], batch.tables, batch.lengths,
            sums, stats, *shared, batch.tables.stride(0), self._block_stride, self.v_distance, GROUP=group,
            GROUP_PAD=max(16, next_power_of_2(group)), SPLITS=SPLITS, **sizes, **of_keys,
        )  # fmt: skip
        out = torch.empty_like(q)
        triton_launch.launch(
            triton_kernels.join_splits, (sequences, heads), sums, stats, batch.lengths, out, shared[-1], HEADS=heads,
            SPLITS=SPLITS, TILE=self._tile, **sizes,
        )  # fmt: skip
        return out
