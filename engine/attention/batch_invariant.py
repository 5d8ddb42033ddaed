"""Attention on a CPU that gives a token the same bits however many others are computed with it, and wherever its prompt is cut
into chunks: what a decode step computed is computed again, exactly, when a stream is resumed as a prompt.

Fused attention does not: its sums over keys are cut by the number of queries. Here are plain products of matrices, with what
makes their rounding a row's own affair: never fewer than some rows, sums over at most `TILE` keys at a time, from
absolute places on, added up in order, and softmax, whose lanes are the keys' places. Keys that a row may not see add exact
zeros. That a product's rows do not depend on each other is true of some kernels only (of MKL's for AVX-512, not of those for
AVX2), and promised by none, so `min_rows` tries it.

`attend` is for any rows of one sequence; `attend_one` for the one row of a decode step, prepared beforehand for all sequences
and layers, since there the calls cost as much as the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch
import torch.nn.functional as F

TILE: Final = 256
"""Keys summed by one product: longer sums are cut in two by the kernels, by a rule of theirs."""
KEYS_MIN: Final = 16
_ROWS: Final = (4, 8)
"""Fewest rows of a product that may do: fewer have kernels of their own."""
_QUERY_ROWS: Final = 64
"""Tokens computed at once: their scores stay in the cache up to some thousand keys."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    fewest: int,
    scaling: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Of one sequence: query [kv_heads, group, rows, dim] over key, value [kv_heads, visible, dim], of which the first is at a
    multiple of `TILE` in the sequence and the last is the last row's own → [kv_heads, group, rows, dim].

    `mask` [rows, last] is added to the scores of as many last keys; None: every row sees every key. `fewest`: of
    `min_rows`.
    """
    rows, visible = query.shape[2], key.shape[1]
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if rows <= _QUERY_ROWS:
        return _block(query, key, value, mask, fewest, softcap)
    assert mask is not None
    parts = []
    for first in range(0, rows, _QUERY_ROWS):
        last = min(rows, first + _QUERY_ROWS)
        unseen = rows - last
        seen = visible - unseen
        part = mask[first:last, : mask.shape[1] - unseen]
        parts.append(_block(query[:, :, first:last], key[:, :seen], value[:, :seen], part, fewest, softcap))
    return torch.cat(parts, dim=2)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    fewest: int,
    softcap: float | None,
) -> torch.Tensor:
    kv_heads, group, rows, dim = query.shape
    used, visible = group * rows, key.shape[1]
    flat = query.reshape(kv_heads, used, dim)
    if used < fewest:
        flat = F.pad(flat, (0, 0, 0, fewest - used))
    if visible < KEYS_MIN:
        key, value = (F.pad(one, (0, 0, 0, KEYS_MIN - visible)) for one in (key, value))
    scores = torch.bmm(flat, key.transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if visible < KEYS_MIN:
        scores[:, :, visible:] = -torch.inf
    if mask is not None:
        scores[:, :used, visible - mask.shape[1] : visible].view(kv_heads, group, rows, -1).add_(mask)
    out = _summed(torch.softmax(scores, dim=-1), torch.split(value, TILE, dim=1))
    return out[:, :used].reshape(kv_heads, group, rows, dim)


def _summed(weights: torch.Tensor, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of values by weights [kv_heads, rows, visible], tile after tile."""
    if len(tiles) == 1 and weights.shape[2] >= KEYS_MIN:
        return torch.bmm(weights, tiles[0])
    out: torch.Tensor | None = None
    for some, values in zip(torch.split(weights, TILE, dim=2), tiles, strict=True):
        less = KEYS_MIN - some.shape[2]
        if less > 0:
            some, values = F.pad(some, (0, less)), F.pad(values, (0, 0, 0, less))
        part = torch.bmm(some, values)
        out = part if out is None else out.add_(part)
    assert out is not None
    return out


@dataclass(frozen=True)
class OneRow:
    """A sequence's last row, over keys and values that lie in the same place in each layer. Not for fewer than `KEYS_MIN`."""

    key: torch.Tensor
    """[kv_heads, dim, visible]"""
    tiles: tuple[torch.Tensor, ...]
    """[kv_heads, at most TILE, dim] of the values."""
    mask: torch.Tensor | None
    """[1, visible], added to the scores."""

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> "OneRow":
        """Of key, value [kv_heads, visible, dim]."""
        assert key.shape[1] >= KEYS_MIN
        return cls(key.transpose(1, 2), torch.split(value, TILE, dim=1), mask)


def rows_of(query: torch.Tensor, kv_heads: int, fewest: int, scaling: float | None) -> tuple[torch.Tensor, ...]:
    """query [heads, sequences, dim] → for each sequence [kv_heads, group or more, dim], as `attend_one` wants it."""
    heads, sequences, dim = query.shape
    scaled = query * (dim**-0.5 if scaling is None else scaling)
    rows, more = scaled.view(kv_heads, -1, sequences, dim).permute(2, 0, 1, 3), fewest - heads // kv_heads
    return (F.pad(rows, (0, 0, 0, more)) if more > 0 else rows).unbind(0)


def attend_one(rows: torch.Tensor, over: OneRow, softcap: float | None) -> torch.Tensor:
    """[kv_heads, group or more, dim]; what is more is of no meaning."""
    scores = torch.bmm(rows, over.key)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if over.mask is not None:
        scores.add_(over.mask)
    return _summed(torch.softmax(scores, dim=-1), over.tiles)


@torch.inference_mode()
def min_rows(kv_heads: int, group: int, dim: int) -> int:
    """Of a product whose rows have the same bits whatever it is part of, for such heads and on this machine; 0 if there is no
    such number. Found by trial: rows of a prompt, in parts and alone, against the prompt computed whole."""
    return next((rows for rows in _ROWS if _is_steady(kv_heads, group, dim, rows)), 0)


def _is_steady(kv_heads: int, group: int, dim: int, fewest: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for length in (5, 17, TILE + 1, TILE + 45):
        query, key, value = (torch.randn(heads * kv_heads, length, dim, generator=generator) for heads in (group, 1, 1))
        query = query.view(kv_heads, group, length, dim)
        causal = torch.full((length, length), -torch.inf).triu_(1)
        whole = attend(query, key, value, causal, fewest)
        for rows, at in product((1, 2, 3, 7, 16, 33, 64, 100, 256), (0.0, 0.1, 0.4, 1.0)):
            first = int(at * (length - rows))
            last = first + rows
            if first < 0:
                continue
            mask = causal[first:last, first:last] if rows > 1 else None
            part = attend(query[:, :, first:last], key[:, :last], value[:, :last], mask, fewest)
            if not torch.equal(part, whole[:, :, first:last]):
                return False
    return True
