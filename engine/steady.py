"""Attention on a CPU that gives a token the same bits however many others are computed with it, and wherever its prompt is cut
into chunks: what a decode step computed is computed again, exactly, when a stream is resumed as a prompt.

Fused attention does not: its sums over keys are cut by the number of queries. Here are plain products of matrices, with what
makes their rounding a row's own affair: never fewer than `ROWS_MIN` rows, sums over at most `TILE` keys at a time, from
absolute places on, added up in order, and softmax, whose lanes are the keys' places. Keys that a row may not see add exact
zeros. That a product's rows do not depend on each other is true of some kernels only (of MKL's for AVX-512, not of those for
AVX2), and promised by none, so `is_steady` tries it.
"""

from itertools import product
from typing import Final

import torch
import torch.nn.functional as F

TILE: Final = 256
"""Keys summed by one product: longer sums are cut in two by the kernels, by a rule of theirs."""
ROWS_MIN: Final = 8
KEYS_MIN: Final = 16
_QUERY_ROWS: Final = 64
"""Tokens computed at once: their scores stay in the cache up to some thousand keys."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Of one sequence: query [kv_heads, group, rows, dim] over key, value [kv_heads, visible, dim], of which the first is at a
    multiple of `TILE` in the sequence and the last is the last row's own → [kv_heads, group, rows, dim].

    `mask` [rows, last] is added to the scores of as many last keys; None: every row sees every key.
    """
    rows, visible = query.shape[2], key.shape[1]
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if rows <= _QUERY_ROWS:
        return _block(query, key, value, mask, softcap)
    assert mask is not None
    parts = []
    for first in range(0, rows, _QUERY_ROWS):
        last = min(rows, first + _QUERY_ROWS)
        unseen = rows - last
        seen = visible - unseen
        part = mask[first:last, : mask.shape[1] - unseen]
        parts.append(_block(query[:, :, first:last], key[:, :seen], value[:, :seen], part, softcap))
    return torch.cat(parts, dim=2)


def _block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    kv_heads, group, rows, dim = query.shape
    used, visible = group * rows, key.shape[1]
    flat = query.reshape(kv_heads, used, dim)
    if used < ROWS_MIN:
        flat = F.pad(flat, (0, 0, 0, ROWS_MIN - used))
    if visible < KEYS_MIN:
        key, value = (F.pad(one, (0, 0, 0, KEYS_MIN - visible)) for one in (key, value))
    scores = torch.bmm(flat, key.transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if visible < KEYS_MIN:
        scores[:, :, visible:] = -torch.inf
    if mask is not None:
        scores[:, :used, visible - mask.shape[1] : visible].unflatten(1, (group, rows)).add_(mask)
    weights = torch.softmax(scores, dim=-1)
    out: torch.Tensor | None = None
    for some, values in zip(weights.split(TILE, dim=2), value.split(TILE, dim=1), strict=True):
        less = KEYS_MIN - some.shape[2]
        if less > 0:
            some, values = F.pad(some, (0, less)), F.pad(values, (0, 0, 0, less))
        part = torch.bmm(some, values)
        out = part if out is None else out.add_(part)
    assert out is not None
    return out[:, :used].reshape(kv_heads, group, rows, dim)


@torch.inference_mode()
def is_steady(kv_heads: int, group: int, dim: int) -> bool:
    """Whether the kernels of this machine keep the promise for such heads: rows of a prompt, computed in parts and alone, have
    the bits that they have when it is computed whole."""
    generator = torch.Generator().manual_seed(0)
    for length in (5, 17, TILE + 1, TILE + 45):
        query, key, value = (torch.randn(heads * kv_heads, length, dim, generator=generator) for heads in (group, 1, 1))
        query = query.view(kv_heads, group, length, dim)
        causal = torch.full((length, length), -torch.inf).triu_(1)
        whole = attend(query, key, value, causal)
        for rows, at in product((1, 2, 3, 7, 16, 33, 64, 100, 256), (0.0, 0.1, 0.4, 1.0)):
            first = int(at * (length - rows))
            last = first + rows
            if first < 0:
                continue
            mask = causal[first:last, first:last]
            part = attend(query[:, :, first:last], key[:, :last], value[:, :last], mask if rows > 1 else None)
            if not torch.equal(part, whole[:, :, first:last]):
                return False
    return True
