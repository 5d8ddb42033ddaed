"""Paged attention in plain torch: the reference for the other backends, and the backend for models that they cannot run.

One variant for everything: K and V are gathered from the pool, scores are computed in float32, softmax weighs V. Windows and
causality are one mask. No operation depends on what is in a tensor, so it also runs on fake tensors and inside a CUDA graph.
"""

from typing import Final

import torch

from engine.attention.forward_batch import ForwardBatch
from engine.attention.interface import AttentionCall, AttentionMetadata, RowGroup

_SCORES_MAX: Final = 1 << 25  # at once: 128 MiB


class TorchAttention:
    name = "torch"

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` [blocks, layers, 2, block_size, kv_heads, head_dim]."""
        self._pool = pool
        _, self._layers, _, self._block_size, self._kv_heads, self._head_dim = pool.shape
        self._token_rows = pool.view(-1, self._kv_heads, self._head_dim)

    def plan(self, batch: ForwardBatch) -> AttentionMetadata:
        return AttentionMetadata(batch, tuple(_group(batch, members) for members in _members(batch)))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        # Rows without a slot repeat the write of the first row.
        slots = metadata.batch.slots
        is_real = slots >= 0
        slots = torch.where(is_real, slots, slots[0].clamp(min=0))
        for plane, values in ((2 * layer, k), (2 * layer + 1, v)):
            values = torch.where(is_real[:, None, None], values, values[:1])
            self._token_rows.index_copy_(0, slots + plane * self._block_size, values)

    def read(self, layer: int, call: AttentionCall, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in metadata.groups:
            sequences, rows = group.rows.shape
            keys, values = self._gather(layer, group)
            tile = max(1, _SCORES_MAX // (sequences * q.shape[1] * keys.shape[1]))
            for first in range(0, rows, tile):
                part = group.rows[:, first : first + tile]
                positions = group.positions[:, first : first + tile]
                attended = _attend(q[part], keys, values, positions, call)
                out.index_copy_(0, part.reshape(-1), attended.flatten(0, 1).to(out.dtype))
        return out

    def _gather(self, layer: int, group: RowGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [sequences, tokens, kv_heads, head_dim] in float32; zeros where nothing was written yet."""
        sequences, blocks = group.tables.shape
        found = self._pool[group.tables.reshape(-1).long(), layer].float()
        found = found.view(sequences, blocks, 2, self._block_size, self._kv_heads, self._head_dim).transpose(1, 2)
        found = found.reshape(sequences, 2, blocks * self._block_size, self._kv_heads, self._head_dim)
        places = torch.arange(found.shape[2], device=found.device)
        is_known = places <= group.positions[:, -1:]
        key, value = torch.where(is_known[:, None, :, None, None], found, 0.0).unbind(1)
        return key, value


def _members(batch: ForwardBatch) -> list[list[int]]:
    """Sequences to attend at once. Those with one row go together, as long as the longest is at most twice the shortest;
    the others, chunks of prompts, are large enough to go alone."""
    groups = [[index] for index, count in enumerate(batch.counts) if count > 1]
    ones = sorted((index for index, count in enumerate(batch.counts) if count == 1), key=batch.blocks.__getitem__)
    for index in ones:
        last = groups[-1] if groups and batch.counts[groups[-1][0]] == 1 else None
        if last is not None and batch.blocks[index] <= 2 * batch.blocks[last[0]] + 4:
            last.append(index)
        else:
            groups.append([index])
    return groups


def _group(batch: ForwardBatch, members: list[int]) -> RowGroup:
    device, count = batch.tables.device, batch.counts[members[0]]
    blocks = max(batch.blocks[index] for index in members)
    if len(members) == len(batch.counts):
        sequences = torch.arange(len(members), device=device)
    else:
        sequences = torch.tensor(members, device=device)
    rows = batch.row_starts[sequences].long()[:, None] + torch.arange(count, device=device)
    return RowGroup(rows, batch.tables[sequences, :blocks], batch.positions[rows])


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """q [sequences, rows, heads, dim], keys and values [sequences, tokens, kv_heads, dim], positions [sequences, rows] → of
    q's shape, in float32."""
    sequences, rows, heads, dim = q.shape
    grouped = q.float().view(sequences, rows, keys.shape[2], -1, dim)
    scores = torch.einsum("srkgd,stkd->skgrt", grouped, keys) * (dim**-0.5 if call.scaling is None else call.scaling)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    places = torch.arange(keys.shape[1], device=q.device)
    hidden = places > positions[:, :, None]
    if call.window is not None:
        hidden |= places <= positions[:, :, None] - call.window
    weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), dim=-1)
    return torch.einsum("skgrt,stkd->srkgd", weights, values).reshape(sequences, rows, heads, dim)
