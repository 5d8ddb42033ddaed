"""The interface of an attention backend, and the arguments of its callers."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.attention.forward_batch import ForwardBatch


@dataclass(frozen=True)
class AttentionCall:
    window: int | None  # a token sees itself and `window - 1` before it; None: all
    scaling: float | None  # the factor on scores; None: head_dim ** -0.5
    softcap: float | None  # scores are bounded by `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118)


@dataclass(frozen=True)
class RowGroup:
    rows: torch.Tensor  # [sequences, rows] of the packed batch
    tables: torch.Tensor  # [sequences, blocks]
    positions: torch.Tensor  # [sequences, rows]


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata that `plan` prepares once for all layers."""

    batch: ForwardBatch
    groups: tuple[RowGroup, ...] = ()
    tiles: torch.Tensor | None = field(default=None)
    """Tiles for the backend `triton`: [2, tiles] int32, the sequence of each tile of queries and its first row in there.
    None: there is one row for each sequence."""


class AttentionBackend(Protocol):
    """Attention over the pool that it was made for."""

    name: str

    def plan(self, batch: ForwardBatch) -> AttentionMetadata: ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        """k, v [tokens, kv_heads, head_dim] go to the slots of their tokens."""

    def read(self, layer: int, call: AttentionCall, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Causal attention of q [tokens, heads, head_dim] over what the pool has for their sequences; of q's shape."""
