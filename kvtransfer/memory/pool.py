"""A pool of KV blocks seen as rows of bytes: packing sub-blocks into one buffer, spreading a buffer over sub-blocks, digests.

A sub-block is a block, or a whole part of one where the peer's blocks are smaller (`layout`); in the buffer each lies as a
block of the smaller size does: [layers, 2, sub-block tokens, kv_heads, head_dim].

Called from transfer threads. The sessions decide which blocks they may touch, and when.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from kvtransfer.memory.layout import KvLayout, is_run

_cuda: Any = torch.cuda  # it has no types in part
TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class OutsidePool(ValueError):
    """A block id is outside the pool. Ids come from our own allocator or were checked before, so this is a bug in
    crossdock."""


class PoolRows:
    """`pool` as sub-blocks of `sub_block_tokens` tokens, by default whole blocks, over the same memory. `layout` is then
    that of sub-blocks. Raises `ValueError` unless the pool has exactly the shape and dtype of `pool_layout`."""

    has_runs = True  # blocks that follow each other are one run of bytes

    def __init__(self, pool: torch.Tensor, pool_layout: KvLayout, sub_block_tokens: int = 0) -> None:
        layout = pool_layout
        shape, dtype = tuple(pool.shape[1:]), TORCH_DTYPES[layout.dtype]
        if shape != layout.block_shape or pool.dtype != dtype or not pool.is_contiguous():
            raise ValueError(
                f"the pool is {pool.dtype} blocks of {shape}; "
                f"the layout says {dtype} blocks of {layout.block_shape}, contiguous"
            )
        self.layout = layout.in_blocks_of(sub_block_tokens or layout.block_size)
        assert layout.block_size % self.layout.block_size == 0, "a block is not a whole number of sub-blocks"
        self.ratio = layout.block_size // self.layout.block_size  # sub-blocks in a block
        self._planes = 2 * layout.layers
        self.sub_blocks = pool.shape[0] * self.ratio
        # Rows of 8-byte words where they fit: index_copy_ moves words, and bytes one by one are several times slower.
        self._word = torch.int64 if self.layout.block_bytes // self._planes % 8 == 0 else torch.uint8
        self._rows = pool.view(pool.shape[0], -1).view(self._word)
        self.device = self._rows.device
        self._stream = stream_of(self.device)
        # [blocks, ratio, planes, words]: a sub-block's words are contiguous plane by plane only.
        self._parts = self._rows.view(pool.shape[0], self._planes, self.ratio, -1).transpose(1, 2)
        self._sub_block_words = self._rows.shape[1] // self.ratio
        self.is_flat = self.device.type == "cpu" and self.ratio == 1  # sub-block `i` begins at byte `i * block_bytes`
        self.address = self._rows.data_ptr()
        self.flat_bytes: Any = as_bytes(self._rows.view(-1)) if self.is_flat else None

    @classmethod
    def of_bytes(cls, memory: torch.Tensor, sub_blocks: KvLayout, ratio: int) -> "PoolRows":
        """A pool that fills these bytes, of blocks of `ratio` such sub-blocks."""
        layout = sub_blocks.in_blocks_of(sub_blocks.block_size * ratio)
        blocks = memory.shape[0] // layout.block_bytes
        return cls(memory.view(TORCH_DTYPES[layout.dtype]).view(layout.shape(blocks)), layout, sub_blocks.block_size)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Returns a context that enqueues work on this pool's transfer stream, separate from the compute stream. Only the host
        orders the two: KV is handed over after the step that wrote it has ended (`Engine.finish`)."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until all that was enqueued on that stream is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def buffer(self, sub_blocks: int) -> torch.Tensor:
        """Host memory for `sub-blocks` packed sub-blocks, as rows of words; pinned where the pool is on a GPU."""
        return torch.empty((sub_blocks, self._sub_block_words), dtype=self._word, pin_memory=self._stream is not None)

    def device_buffer(self, sub_blocks: int) -> torch.Tensor:
        """Returns such a buffer on the pool's device. Its memory belongs to the pool's stream, because torch may hand out
        memory that another stream still uses."""
        with self.on_stream():
            return torch.empty((sub_blocks, self._sub_block_words), dtype=self._word, device=self.device)

    def packed(self, block_ids: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        """The sub-blocks one after the other in host memory: the pool itself where they lie so, else a copy in `buffer`."""
        if self._stream is None:
            return self.rows_or_gather(block_ids, buffer)
        with self.on_stream():
            return buffer[: len(block_ids)].copy_(self.rows_or_gather(block_ids, self.device_buffer(len(block_ids))))

    def spread(self, block_ids: Sequence[int], packed: torch.Tensor) -> None:
        """Copy packed sub-blocks of host memory to their places; done when this returns."""
        with self.on_stream():
            self.scatter(block_ids, packed.to(self.device))
        self.wait()

    def rows_or_gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        """The sub-blocks one after the other on the pool's device: the pool itself where they lie so, else a copy in
        `buffer`. On a GPU it is only enqueued."""
        count = len(block_ids)
        if self.ratio > 1:
            buffer[:count].view(count, self._planes, -1).copy_(self._parts[self._places(block_ids)])
            return buffer[:count]
        if is_run(block_ids):
            return self.run(block_ids[0], count)
        index = torch.tensor(block_ids, device=self.device)
        return torch.index_select(self._rows, 0, index, out=buffer[:count])

    def scatter(self, block_ids: Sequence[int], packed: torch.Tensor) -> None:
        """Copy packed sub-blocks of the pool's device to their places. On a GPU it is only enqueued."""
        if self.ratio > 1:
            self._parts[self._places(block_ids)] = packed.view(len(block_ids), self._planes, -1)
        elif is_run(block_ids):
            self.run(block_ids[0], len(block_ids)).copy_(packed)
        else:
            self._rows.index_copy_(0, torch.tensor(block_ids, device=self.device), packed)

    def run(self, first: int, count: int) -> torch.Tensor:
        """Blocks that follow each other, where they lie; only where sub-blocks are whole blocks."""
        assert self.ratio == 1
        return self._rows[first : first + count]

    def _places(self, sub_blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, parts within them), to index with."""
        blocks, parts = np.divmod(np.asarray(sub_blocks), self.ratio)
        return torch.from_numpy(blocks).to(self.device), torch.from_numpy(parts).to(self.device)

    def check(self, block_ids: Sequence[int]) -> None:
        """Raises `OutsidePool` if an id is outside the pool. Called before any copy by address, which could otherwise
        overwrite other memory."""
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= self.sub_blocks):
            raise OutsidePool(
                f"a block outside the pool of {self.sub_blocks}, among {min(block_ids)} to {max(block_ids)}"
            )

    def as_packed(self, raw: torch.Tensor) -> torch.Tensor:
        """These bytes of host memory, in which sub-blocks lie one after the other, as `packed` has them."""
        return raw.view(self._word).view(-1, self._sub_block_words)


class RankRows(PoolRows):
    """The pools of the ranks of one model (tensor parallelism), seen as the pool that one rank would have.

    `pools` has a tensor [blocks, outer, heads of this rank] for each rank, all on one device or readable from it. `outer` is
    what lies outside the heads in a block: layers, and tokens in some layouts. Where ranks share heads, they are copies."""

    has_runs = False

    def __init__(self, pools: Sequence[torch.Tensor], layout: KvLayout) -> None:
        self.layout, self.ratio, self.sub_blocks = layout, 1, pools[0].shape[0]
        rank_bytes = pools[0][0].numel() * pools[0].element_size()
        self._shares = layout.block_bytes // rank_bytes  # ranks that share no heads
        self._copies, rest = divmod(len(pools), self._shares)
        if rest or rank_bytes * self._shares != layout.block_bytes or len({pool.shape for pool in pools}) > 1:
            raise ValueError(
                f"{len(pools)} pools with blocks of {rank_bytes} bytes are not one of {layout.block_bytes}"
            )
        self._word = torch.int64  # a head's K and V of a token are a multiple of 8 bytes
        self._ranks = [pool.view(self._word) for pool in pools]
        self._outer = pools[0].shape[1]
        self._sub_block_words = layout.block_bytes // self._word.itemsize
        self.device = pools[0].device
        self._stream = stream_of(self.device)
        self.is_flat, self.flat_bytes, self.address = False, None, 0

    def rows_or_gather(self, block_ids: Sequence[int], buffer: torch.Tensor) -> torch.Tensor:
        index, packed = torch.tensor(block_ids, device=self.device), buffer[: len(block_ids)]
        whole = packed.view(len(block_ids), self._outer, self._shares, -1)
        for part in range(self._shares):
            whole[:, :, part] = self._ranks[part * self._copies].index_select(0, index)
        return packed

    def scatter(self, block_ids: Sequence[int], packed: torch.Tensor) -> None:
        index = torch.tensor(block_ids, device=self.device)
        whole = packed.view(len(block_ids), self._outer, self._shares, -1)
        for rank, rows in enumerate(self._ranks):
            rows.index_copy_(0, index, whole[:, :, rank // self._copies])


def rows_of(pools: torch.Tensor | Sequence[torch.Tensor], layout: KvLayout, sub_block_tokens: int = 0) -> PoolRows:
    """Those of one pool, or of the pools of several ranks, whose blocks are not divided."""
    if isinstance(pools, torch.Tensor):
        return PoolRows(pools, layout, sub_block_tokens)
    if len(pools) == 1:
        return PoolRows(pools[0], layout, sub_block_tokens)
    assert sub_block_tokens in (0, layout.block_size), "workers of one model by vLLM have blocks of one size"
    return RankRows(pools, layout)


def stream_of(device: torch.device) -> Any:
    return _cuda.Stream(device) if device.type == "cuda" else None


def as_bytes(packed: torch.Tensor) -> Any:
    """Returns the same memory as an array of bytes, for functions that take buffers."""
    return packed.view(torch.uint8).numpy()
