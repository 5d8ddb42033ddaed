"""The inputs of one forward pass, as tensors: token ids, positions, block tables, and where K and V go.

The pool `[blocks, layers, 2, block_size, kv_heads, head_dim]` is also rows of one token, `kv_heads * head_dim` numbers each. A
token's slot is the number of the row that its K has in layer 0; the rows of other layers, and those of V, are at fixed
distances, so one tensor of slots serves every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
NO_SLOT: Final = -1  # of a padding row, for which nothing is written

OnLogits = Callable[[int, torch.Tensor], None]
LOGITS_ROWS: Final = 64  # rows of logits that `on_logits` is given at once: 40 MB with a vocabulary of 150,000


@dataclass(frozen=True)
class SeqChunk:
    """Consecutive tokens of one sequence to forward, and the block table their K and V go to.

    `start` is the absolute position of `tokens[0]`; the KV of all earlier positions is in the pool already.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]  # covers at least `start + len(tokens)` positions
    wants_logits: bool  # of the last token
    on_logits: OnLogits | None = None
    """Called with the logits of all tokens of the chunk, in pieces: the index of the piece's first token, and [tokens, vocab]
    float32. The tensor is overwritten after the call."""


def rows_of_logits(chunks: Sequence[SeqChunk]) -> Iterator[tuple[OnLogits, int, int, int]]:
    """Yields, for each piece of logits: `on_logits`, the index of its first token in the chunk and in the packed batch, and
    its number of tokens."""
    first = 0
    for chunk in chunks:
        if chunk.on_logits is not None:
            for start in range(0, len(chunk.tokens), LOGITS_ROWS):
                yield chunk.on_logits, start, first + start, min(LOGITS_ROWS, len(chunk.tokens) - start)
        first += len(chunk.tokens)


@dataclass(frozen=True)
class ForwardBatch:
    """The packed inputs of one forward. Tensors are on the device, tuples on the host."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens], or NO_SLOT
    row_starts: torch.Tensor  # [sequences + 1] int32: sequence i has the rows [row_starts[i], row_starts[i + 1])
    lengths: torch.Tensor  # [sequences] int32: tokens of each sequence, those of this forward included
    tables: torch.Tensor  # [sequences, blocks] int32. Entries past a sequence's own blocks are any valid block.
    wanted: torch.Tensor  # rows whose logits are wanted
    counts: tuple[int, ...]
    blocks: tuple[int, ...]  # of each sequence, as far as its rows see

    @property
    def is_decode(self) -> bool:
        return max(self.counts) == 1


def pack(chunks: Sequence[SeqChunk], pool: torch.Tensor) -> ForwardBatch:
    """One copy to the device, from pinned memory. Raises ValueError for chunks without tokens, and for tables that do not cover
    them or name blocks that the pool does not have."""
    size, slots_per_block = pool.shape[3], pool.shape[1] * 2 * pool.shape[3]
    counts = tuple(len(chunk.tokens) for chunk in chunks)
    lengths = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
    blocks = tuple(-(-length // size) for length in lengths)
    for chunk, count, needed in zip(chunks, counts, blocks, strict=True):
        if not count or chunk.start < 0:
            raise ValueError("a chunk is empty")
        if len(chunk.blocks) < needed:
            raise ValueError(f"{len(chunk.blocks)} blocks do not cover {chunk.start + count} tokens")
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(starts[-1]) + np.repeat(np.array(lengths) - starts[1:], counts)
    tables = np.zeros((len(chunks), max(blocks)), np.int64)
    for row, (chunk, needed) in enumerate(zip(chunks, blocks, strict=True)):
        tables[row, :needed] = chunk.blocks[:needed]
    if tables.min() < 0 or tables.max() >= pool.shape[0]:
        raise ValueError("a block table names a block that the pool does not have")
    places = tables[np.repeat(np.arange(len(chunks)), counts), positions // size]
    slots = places * slots_per_block + positions % size
    token_ids = np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks])
    wanted = starts[1:][[chunk.wants_logits for chunk in chunks]] - 1
    parts = (token_ids, positions, slots, starts, np.array(lengths), tables, wanted)
    token_ids_, positions_, slots_, starts_, lengths_, tables_, wanted_ = to_device(parts, pool.device)
    return ForwardBatch(
        token_ids_, positions_, slots_, starts_.int(), lengths_.int(), tables_.int(), wanted_, counts, blocks
    )


def to_device(parts: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int64 as tensors of the same shapes, by one copy."""
    flat = upload(torch.from_numpy(np.concatenate([part.ravel() for part in parts])), device)
    pieces = torch.split(flat, [part.size for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device. The host does not wait for a GPU, and may change the tensor at once."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
