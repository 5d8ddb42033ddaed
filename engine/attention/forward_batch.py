"""What one forward pass prepares once, for all layers: token rows, cache slots, and who attends over what.

The pool `[blocks, layers, 2, block_size, kv_heads, head_dim]` is seen two ways, both without copying:
- as rows of one token (`kv_heads * head_dim` numbers), to write fresh K and V: `PoolViews.key_rows[layer]`;
- as rows of one block (`block_size * kv_heads * head_dim`), to gather what was written before: `PoolViews.block_rows[layer]`.
Each layer's view starts at that layer's offset, so one index tensor serves every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.batch_invariant import KEYS_MIN, TILE, OneRow

OnLogits = Callable[[int, torch.Tensor], None]
LOGITS_ROWS: Final = 64
"""Rows of logits that `on_logits` is given at once: 40 MB with a vocabulary of 150,000."""


@dataclass(frozen=True)
class SeqChunk:
    """Consecutive tokens of one sequence to forward, and the block table their K and V go to.

    `start` is the absolute position of `tokens[0]`; the KV of all earlier positions is in the pool already.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    """The sequence's block table, covering at least `start + len(tokens)` positions."""
    wants_logits: bool
    """Whether the logits of the last token are wanted."""
    on_logits: OnLogits | None = None
    """Called with the logits of all its tokens, some at a time: the number of the first, and [tokens, vocab] float32. What it
    is given is overwritten when it has returned."""


def rows_of_logits(chunks: Sequence[SeqChunk]) -> Iterator[tuple[OnLogits, int, int, int]]:
    """For each piece of logits that `on_logits` is to be given: that, the number of its first token in the chunk and in the
    packed batch, and how many tokens it has."""
    first = 0
    for chunk in chunks:
        if chunk.on_logits is not None:
            for start in range(0, len(chunk.tokens), LOGITS_ROWS):
                yield chunk.on_logits, start, first + start, min(LOGITS_ROWS, len(chunk.tokens) - start)
        first += len(chunk.tokens)


class PoolViews:
    """The two-dimensional views of a pool, one per layer, and a scratch buffer to gather into."""

    def __init__(self, pool: torch.Tensor, min_rows: int = 0) -> None:
        """`min_rows`: the fewest rows of a product in `engine.attention.batch_invariant`; 0: that attention is not used."""
        self.min_rows = min_rows
        blocks, layers, two, block_size, kv_heads, head_dim = pool.shape
        assert two == 2, pool.shape
        self.pool = pool
        self.layers, self.block_size, self.kv_heads, self.head_dim = layers, block_size, kv_heads, head_dim
        token_rows = pool.view(-1, kv_heads * head_dim)
        self.key_rows = [token_rows[2 * layer * block_size :] for layer in range(layers)]
        self.value_rows = [token_rows[(2 * layer + 1) * block_size :] for layer in range(layers)]
        plane_rows = pool.view(-1, block_size * kv_heads * head_dim)
        self.block_rows = [plane_rows[2 * layer :] for layer in range(layers)]
        self._scratch = pool.new_zeros(2 * min(64, blocks), block_size * kv_heads * head_dim)

    def scratch(self, blocks: int) -> torch.Tensor:
        """Room for K and V of this many blocks: [2 * blocks, block_size * kv_heads * head_dim]. One user at a time."""
        if self._scratch.shape[0] < 2 * blocks:
            self._scratch = self._scratch.new_zeros(4 * blocks, self._scratch.shape[1])
        return self._scratch[: 2 * blocks]


@dataclass(frozen=True)
class AttentionMetadata:
    """One sequence's attention in one forward, for one sliding window (or none)."""

    first_row: int
    last_row: int
    """Query rows [first_row, last_row) of the packed batch."""
    gather: torch.Tensor | None
    """Rows of `block_rows[layer]` to copy to `gathered`: those of K, then those of V. None: only fresh K and V count."""
    gathered: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    """Views of `gathered`: [1, kv_heads, visible tokens, head_dim]."""
    mask: torch.Tensor | None
    """Added to the scores: 0 where query row i may see key j, else -inf; [query rows, visible tokens], or the last of those.
    None: every key is visible, or, where nothing is gathered, those up to the query's own."""
    one_row: OneRow | None = None
    """The same, prepared; where it is one row, and attention is `batch_invariant`'s."""


class ForwardBatch:
    """The inputs of one forward, and its attention work for each sliding window the layers use."""

    def __init__(self, views: PoolViews, chunks: Sequence[SeqChunk], device: torch.device) -> None:
        self.views = views
        self._chunks = chunks
        self._device = device
        self._work: dict[int | None, list[AttentionMetadata]] = {}
        self.longest = max(chunk.start + len(chunk.tokens) for chunk in chunks)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        size, stride = views.block_size, 2 * views.layers * views.block_size
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            assert chunk.tokens and chunk.start >= 0, "a chunk has at least one token"
            assert len(chunk.blocks) * size >= end, f"{len(chunk.blocks)} blocks do not cover {end} tokens"
            token_ids.extend(chunk.tokens)
            positions.extend(range(chunk.start, end))
            slots.extend(chunk.blocks[at // size] * stride + at % size for at in range(chunk.start, end))
            if chunk.wants_logits:
                wanted.append(len(token_ids) - 1)
        self.tokens = len(token_ids)
        self.input_ids = torch.tensor([token_ids], device=device)
        self.position_ids = torch.tensor([positions], device=device)
        self.slots = torch.tensor(slots, device=device)
        self.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)

    def work(self, window: int | None) -> list[AttentionMetadata]:
        """The attention of every sequence when a token sees itself and at most `window - 1` tokens before it."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._work:
            row = 0
            work = []
            for chunk in self._chunks:
                work.append(self._attend(chunk, row, window))
                row += len(chunk.tokens)
            self._work[window] = work
        return self._work[window]

    def _attend(self, chunk: SeqChunk, row: int, window: int | None) -> AttentionMetadata:
        count, end, size = len(chunk.tokens), chunk.start + len(chunk.tokens), self.views.block_size
        batch_invariant = self.views.min_rows > 0
        if chunk.start == 0 and count > 1:
            hides = batch_invariant or (window is not None and window < count)
            mask = self._mask(0, count, 0, count, window) if hides else None
            return AttentionMetadata(row, row + count, None, None, None, None, mask)
        visible_from = 0 if window is None else max(0, chunk.start - window + 1)
        if batch_invariant:
            visible_from -= visible_from % TILE
        first_block = visible_from // size
        table = list(chunk.blocks[first_block : -(-end // size)])
        planes = torch.tensor(table, device=self._device) * (2 * self.views.layers)
        gathered = self.views.scratch(len(table))
        shape = (2, len(table) * size, self.views.kv_heads, self.views.head_dim)
        visible = slice(visible_from - first_block * size, end - first_block * size)
        key, value = gathered.view(shape)[:, visible].transpose(1, 2).unsqueeze(1).unbind(0)
        mask_from = chunk.start if batch_invariant and window is None else visible_from
        all_visible = count == 1 and (window is None or not batch_invariant)
        mask = None if all_visible else self._mask(chunk.start, end, mask_from, end, window)
        one_row = (
            OneRow.of(key[0], value[0], mask) if batch_invariant and count == 1 and key.shape[2] >= KEYS_MIN else None
        )
        return AttentionMetadata(row, row + count, torch.cat((planes, planes + 1)), gathered, key, value, mask, one_row)

    def _mask(self, query_from: int, query_to: int, key_from: int, key_to: int, window: int | None) -> torch.Tensor:
        queries = torch.arange(query_from, query_to, device=self._device).unsqueeze(1)
        keys = torch.arange(key_from, key_to, device=self._device).unsqueeze(0)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self.views.pool.dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)
