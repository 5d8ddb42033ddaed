"""The attention function registered with transformers: writes K and V into the paged pool and attends over it.

Models call it as `fn(module, query [1, heads, tokens, dim], key [1, kv_heads, tokens, dim], value, attention_mask, ...)` for
packed inputs. What the forward in progress is about reaches it through one context variable, `forward_context`, which holds a
`Recorder` while a freshly loaded model is examined and a `ForwardBatch` while tokens are forwarded; each thread sees its own.
No mask function is registered under the name, so that the models build none.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine.attention import batch_invariant as batch_invariant
from engine.attention.forward_batch import AttentionMetadata, ForwardBatch, PoolViews
from proto.errors import CrossdockError

NAME = "crossdock_paged"

_HARMLESS = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k", "max_length_q", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
    "target_dtype", "layer_idx", "num_items_in_batch", "past_key_values",
})  # fmt: skip
"""Arguments that models hand through which do not change what attention computes."""


class UnsupportedAttention(CrossdockError):
    """A layer's attention is not plain causal softmax attention over K and V of one shape."""


@dataclass(frozen=True)
class AttentionCall:
    """With what a layer calls its attention."""

    window: int | None
    scaling: float | None
    softcap: float | None


class Recorder:
    """Stands in for a plan during the first forward of a model: notes the shape of each layer's K, computes nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        """Layer → (kv_heads, head_dim)."""
        self.dtypes: set[torch.dtype] = set()
        self.calls: dict[int, AttentionCall] = {}
        """Layer → what it is called with."""

    def record(self, module: Any, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedAttention(f"{type(module).__name__} does not say which layer it is")
        if layer in self.shapes:
            raise UnsupportedAttention(f"layer {layer} has more than one attention")
        if key.shape != value.shape:
            raise UnsupportedAttention(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
        self.calls[layer] = call
        self.dtypes |= {key.dtype, value.dtype}
        self.shapes[layer] = (key.shape[1], key.shape[3])


forward_context: ContextVar[ForwardBatch | Recorder] = ContextVar("crossdock_forward")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Returns ([1, tokens, heads, dim], None). Raises UnsupportedAttention while a model is being examined."""
    current = forward_context.get()
    if isinstance(current, Recorder):
        _refuse_unknown(attention_mask, dropout, others)
        current.record(module, key, value, AttentionCall(sliding_window, scaling, softcap))
        return torch.zeros_like(query).transpose(1, 2), None
    layer, tokens, views = module.layer_idx, current.tokens, current.views
    assert isinstance(layer, int)
    views.key_rows[layer].index_copy_(0, current.slots, key.transpose(1, 2).reshape(tokens, -1))
    views.value_rows[layer].index_copy_(0, current.slots, value.transpose(1, 2).reshape(tokens, -1))
    work = current.work(sliding_window)
    if views.min_rows and all(item.one_row is not None for item in work):
        return _attend_each(query, views, layer, work, scaling, softcap), None
    parts = []
    for item in work:
        rows = slice(item.first_row, item.last_row)
        if item.gather is not None:
            assert item.gathered is not None and item.key is not None and item.value is not None
            torch.index_select(views.block_rows[layer], 0, item.gather, out=item.gathered)
            seen_key, seen_value = item.key, item.value
        else:
            seen_key, seen_value = key[:, :, rows], value[:, :, rows]
        if views.min_rows:
            parts.append(
                _attend_steadily(query[:, :, rows], seen_key, seen_value, item, views.min_rows, scaling, softcap)
            )
        elif softcap is None:
            parts.append(_attend(query[:, :, rows], seen_key, seen_value, item, scaling))
        else:
            parts.append(_attend_softcapped(query[:, :, rows], seen_key, seen_value, item, scaling, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _attend_each(
    query: torch.Tensor,
    views: PoolViews,
    layer: int,
    work: list[AttentionMetadata],
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Of one token of each sequence, with `batch_invariant`: query [1, heads, sequences, dim] → [1, sequences, heads, dim]."""
    _, heads, sequences, dim = query.shape
    assert work[0].key is not None
    kv_heads = work[0].key.shape[1]
    outs = []
    for item, rows in zip(work, batch_invariant.rows_of(query[0], kv_heads, views.min_rows, scaling), strict=True):
        assert item.gather is not None and item.gathered is not None and item.one_row is not None
        torch.index_select(views.block_rows[layer], 0, item.gather, out=item.gathered)
        outs.append(batch_invariant.attend_one(rows, item.one_row, softcap))
    return torch.stack(outs)[:, :, : heads // kv_heads].reshape(1, sequences, heads, dim)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, item: AttentionMetadata, scaling: float | None
) -> torch.Tensor:
    """Of one sequence: query [1, heads, rows, dim] over key, value [1, kv_heads, visible, dim] → [1, rows, heads, dim].

    Query heads that share a KV head become rows (one token) or a broadcast batch (several), so K and V are never repeated.
    """
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    if rows == 1:
        out = F.scaled_dot_product_attention(query.reshape(1, kv_heads, -1, dim), key, value, scale=scaling)
        return out.reshape(1, 1, heads, dim)
    group = heads // kv_heads
    shape = (kv_heads, group, key.shape[2], dim)
    out = F.scaled_dot_product_attention(
        query.reshape(kv_heads, group, rows, dim),
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        attn_mask=item.mask,
        is_causal=item.mask is None and item.gather is None,
        scale=scaling,
    )
    return out.reshape(1, heads, rows, dim).transpose(1, 2)


def _attend_steadily(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    item: AttentionMetadata,
    fewest: int,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """As `_attend`, with `batch_invariant`."""
    _, heads, rows, dim = query.shape
    grouped = query[0].view(key.shape[1], -1, rows, dim)
    out = batch_invariant.attend(grouped, key[0], value[0], item.mask, fewest, scaling, softcap)
    return out.reshape(1, heads, rows, dim).transpose(1, 2)


def _attend_softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    item: AttentionMetadata,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """As `_attend`, with scores bounded by `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118)."""
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    scores = torch.matmul(query.reshape(kv_heads, heads // kv_heads * rows, dim), key[0].transpose(1, 2))
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).view(heads, rows, -1)
    if item.mask is not None:
        scores = scores + item.mask
    elif item.gather is None:
        scores = scores + scores.new_full((rows, rows), -torch.inf).triu(1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    out = torch.matmul(weights.view(kv_heads, -1, weights.shape[-1]), value[0])
    return out.view(1, heads, rows, dim).transpose(1, 2)


def _refuse_unknown(attention_mask: torch.Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise UnsupportedAttention("the model builds an attention mask of its own")
    if dropout:
        raise UnsupportedAttention("attention dropout is on")
    for name, value in others.items():
        if name == "is_causal":
            if value is False:
                raise UnsupportedAttention("attention is not causal")
        elif value is not None and value is not False and name not in _HARMLESS:
            raise UnsupportedAttention(f"attention takes {name!r}, which crossdock does not know")


def register() -> None:
    """Makes `attn_implementation=NAME` known to transformers; idempotent."""
    AttentionInterface.register(NAME, paged_attention)
