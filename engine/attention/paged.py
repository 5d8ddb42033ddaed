"""The attention function registered with transformers: writes K and V into the paged pool and attends over it.

Models call it as `fn(module, query [1, heads, tokens, dim], key [1, kv_heads, tokens, dim], value, attention_mask, ...)` for
packed inputs. The forward in progress passes its arguments through a context variable, `forward_context`, which holds a
`Recorder` while a freshly loaded model is examined and a `PagedForward` while tokens are forwarded; each thread sees its own.
No mask function is registered under `NAME`, so that the models build none. The one under `EXAMINED` keeps the masks' rules.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.forward_code import names_read
from engine.attention.interface import AttentionBackend, AttentionCall, AttentionMetadata
from proto.errors import CrossdockError

__all__ = [
    "EXAMINED", "NAME", "AttentionCall", "PagedForward", "Recorder", "UnsupportedAttention", "forward_context", "register",
]  # fmt: skip

NAME = "crossdock_paged"
EXAMINED = "crossdock_examined"  # the same function's name while a model is examined
_OWN_POSITIONS = frozenset({"arange", "cache_position", "get_seq_length"})
"""Names in the code of attention that count tokens, which are those of many sequences in a packed forward."""
_QUERIES = (0, 1, 7, 63, 1000, 100_000, 10_000_019)
_DISTANCES = (-5, -1, 0, *(one for power in range(24) for one in ((1 << power) - 1, 1 << power)))
"""Positions of queries, and of keys before them, at which masks are compared."""
MaskRule = Callable[..., torch.Tensor]  # (batch, head, query positions, key positions) → whether a query sees a key

_HARMLESS = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "max_length_k", "max_length_q", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
    "target_dtype", "layer_idx", "num_items_in_batch", "past_key_values",
})  # fmt: skip
"""Arguments that models hand through which do not change what attention computes."""


class UnsupportedAttention(CrossdockError):
    """A layer's attention is not plain causal softmax attention over K and V of one shape."""


class Recorder:
    """Stands in for a `PagedForward` in the first forward of a model: notes the shape of each layer's K, computes nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}  # layer → (kv_heads, head_dim)
        self.dtypes: set[torch.dtype] = set()
        self.calls: dict[int, AttentionCall] = {}  # by layer
        self.masks: dict[int, tuple[torch.Tensor, MaskRule]] = {}  # address of a mask → the mask and its rule

    def record(
        self, module: Any, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, mask: torch.Tensor | None
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedAttention(f"{type(module).__name__} does not say which layer it is")
        if layer in self.shapes:
            raise UnsupportedAttention(f"layer {layer} has more than one attention")
        if key.shape != value.shape:
            raise UnsupportedAttention(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
        if names_read(module) & _OWN_POSITIONS:
            raise UnsupportedAttention(f"{type(module).__name__} counts positions by itself")
        if mask is not None:
            self._check_mask(mask, layer, call.window)
        self.calls[layer] = call
        self.dtypes |= {key.dtype, value.dtype}
        self.shapes[layer] = (key.shape[1], key.shape[3])

    def _check_mask(self, mask: torch.Tensor, layer: int, window: int | None) -> None:
        _, rule = self.masks.get(mask.untyped_storage().data_ptr(), (None, None))
        if rule is None:
            raise UnsupportedAttention("the model builds an attention mask of its own")
        near = () if window is None else (window - 1, window, window + 1)
        pairs = [(query, query - one) for query in _QUERIES for one in (*_DISTANCES, *near) if query >= one]
        queries, keys = torch.tensor(pairs).T
        wanted = (keys <= queries) & (window is None or keys > queries - window)
        none = torch.zeros_like(keys)
        if not torch.equal(rule(none, none, queries, keys).broadcast_to(wanted.shape), wanted):
            limits = "causal" if window is None else f"a sliding window of {window} tokens"
            raise UnsupportedAttention(f"the attention mask of layer {layer} is not {limits}")


@dataclass(frozen=True)
class PagedForward:
    """The forward in progress."""

    backend: AttentionBackend
    metadata: AttentionMetadata


forward_context: ContextVar[PagedForward | Recorder] = ContextVar("crossdock_forward")


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
    current, call = forward_context.get(), AttentionCall(sliding_window, scaling, softcap)
    if isinstance(current, Recorder):
        _refuse_unknown(dropout, others)
        current.record(module, key, value, call, attention_mask)
        return torch.zeros_like(query).transpose(1, 2), None
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    current.backend.write(layer, k, v, current.metadata)
    return current.backend.read(layer, call, q, current.metadata)[None], None


def _examined_mask(q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> torch.Tensor:
    """A mask that hides nothing, whose rule the `Recorder` keeps."""
    current, mask = forward_context.get(), torch.zeros(1, 1, q_length, kv_length)
    assert isinstance(current, Recorder)
    current.masks[mask.untyped_storage().data_ptr()] = mask, mask_function
    return mask


def _refuse_unknown(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedAttention("attention dropout is on")
    for name, value in others.items():
        if name == "is_causal":
            if value is False:
                raise UnsupportedAttention("attention is not causal")
        elif value is not None and value is not False and name not in _HARMLESS:
            raise UnsupportedAttention(f"attention takes {name!r}, which crossdock does not know")


def register() -> None:
    """Makes `attn_implementation=NAME` and `EXAMINED` known to transformers; idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionInterface.register(EXAMINED, paged_attention)
    AttentionMaskInterface.register(EXAMINED, _examined_mask)
