"""The shape of a KV block: block-major, all layers of a block contiguous, so that a run of blocks is one message.

    pool: [blocks, layers, 2 (K then V), block_size, kv_heads, head_dim]

Both ends of a transfer take shapes and dtypes from their own layout, never from the wire; the handshake compares
fingerprints.

Blocks of the two ends may differ in size where one size is a multiple of the other. Both ends then transfer and count
*sub-blocks*: blocks of the smaller size. A pool of larger blocks is read and written as a pool of sub-blocks. Sub-block `i` of
block `b` has the number `b * ratio + i`. Positions in a prompt need no further alignment, because each end's blocks are whole
sub-blocks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # by torch's name


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The content of one KV block. `block_size` is in tokens. Raises `ValueError` on a dtype or a size that cannot be."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KV layout: {name} is {getattr(self, name)}, and must be at least 1")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.block_size, self.kv_heads, self.head_dim)

    def shape(self, blocks: int) -> tuple[int, int, int, int, int, int]:
        return (blocks, *self.block_shape)

    @property
    def block_bytes(self) -> int:
        elements = self.layers * 2 * self.block_size * self.kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def in_blocks_of(self, block_size: int) -> "KvLayout":
        """The layout of the same KV in blocks of another size."""
        return dataclasses.replace(self, block_size=block_size)

    def segment_blocks(self, segment_bytes: int) -> int:
        """Blocks in a segment of at most `segment_bytes`; at least one, since a block is never split."""
        return max(1, segment_bytes // self.block_bytes)


def sub_blocks_of(block_ids: Sequence[int], ratio: int) -> tuple[int, ...]:
    """The sub-blocks of these blocks, `ratio` to a block, in order."""
    if ratio == 1:
        return tuple(block_ids)
    return tuple(block * ratio + part for block in block_ids for part in range(ratio))


def blocks_of(sub_blocks: Sequence[int], ratio: int) -> tuple[int, ...]:
    """The blocks that these sub-blocks are in, each once, in order."""
    return tuple(sub_blocks) if ratio == 1 else tuple(dict.fromkeys(sub_block // ratio for sub_block in sub_blocks))


def is_run(block_ids: Sequence[int]) -> bool:
    """Returns whether the blocks are consecutive in the pool, in this order. Most are, so all are compared at once."""
    return not block_ids or list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))


def runs_of(source_ids: Sequence[int], target_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first source block, first target block, blocks) of stretches that are contiguous in both."""
    if source_ids and is_run(source_ids) and is_run(target_ids):
        assert len(source_ids) == len(target_ids)
        return [(source_ids[0], target_ids[0], len(source_ids))]
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(source_ids, target_ids, strict=True):
        if runs:
            first_source, first_target, count = runs[-1]
            if source == first_source + count and target == first_target + count:
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source, target, 1))
    return runs
