"""Whether a model has the shape that the kernels knows, told by its parts and not by its name.

The shape is that of Llama (Touvron et al. 2023, arXiv:2302.13971): RMSNorm, attention with rotary embedding, RMSNorm, gated
MLP; with or without biases, norms of queries and keys, sliding windows, joined projections. Parts that look alike may compute
something else, so norms and activations are tried here, and the whole model is compared after load (`model.selfcheck`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.paged import AttentionCall
from engine.cpu.library import HEAD_DIM_MAX, LANES, QUERIES_MAX

ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (F.silu, lambda x: F.gelu(x, approximate="tanh"))
"""By their numbers in the kernels."""
_IGNORED = (nn.Dropout, nn.Identity)


class NotRecognised(Exception):
    """The model has another shape."""


@dataclass(frozen=True)
class LayerParts:
    qkv: tuple[nn.Linear, ...]
    """Queries, keys, values, as one layer or as three."""
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    window: int


@dataclass(frozen=True)
class ModelParts:
    layers: tuple[LayerParts, ...]
    embedding: torch.Tensor
    """[vocab, hidden]"""
    head: nn.Linear
    norm: torch.Tensor
    rotary: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    activation: int
    epsilon: float
    scaling: float
    softcap: float

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            yield from (*layer.qkv, layer.out, *layer.gate_up, layer.down)
        yield self.head


def recognise(model: Any, kv_heads: int, head_dim: int, calls: list[AttentionCall]) -> ModelParts:
    """The parts of a causal language model of transformers. Raises NotRecognised."""
    body, head = model.get_decoder(), model.get_output_embeddings()
    children = _children(body, {"embed_tokens", "layers", "norm", "rotary_emb"})
    epsilons: set[float] = set()
    layers = tuple(
        _layer(layer, call, head_dim, epsilons) for layer, call in zip(children["layers"], calls, strict=True)
    )
    norm = _norm(children["norm"], epsilons)
    down, hidden = layers[0].down, norm.numel()
    heads, inner = layers[0].out.in_features // head_dim, down.in_features
    scalings = {head_dim**-0.5 if call.scaling is None else call.scaling for call in calls}
    softcaps = {call.softcap or 0.0 for call in calls}
    activations = {_activation(layer.mlp) for layer in children["layers"]}
    if any(len(found) > 1 for found in (epsilons, scalings, softcaps, activations)):
        raise NotRecognised("its layers differ from each other")
    _check_sizes(hidden, heads, kv_heads, head_dim, inner)
    for layer in layers:
        rows = tuple(sum(part.out_features for part in parts) for parts in (layer.qkv, layer.gate_up))
        if rows != ((heads + 2 * kv_heads) * head_dim, 2 * inner) or layer.out.in_features != heads * head_dim:
            raise NotRecognised("its projections have other sizes")
    if type(head) is not nn.Linear or type(children["embed_tokens"]) is not nn.Embedding:
        raise NotRecognised("its embeddings are of another kind")
    return ModelParts(
        layers, children["embed_tokens"].weight, head, norm, children["rotary_emb"], heads, kv_heads, head_dim, inner,
        activations.pop(), epsilons.pop(), scalings.pop(), softcaps.pop(),
    )  # fmt: skip


def _children(module: nn.Module, wanted: set[str], optional: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    found = {name: child for name, child in module.named_children() if not isinstance(child, _IGNORED)}
    if not wanted <= set(found) <= wanted | optional:
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(found))}")
    return found


def _layer(layer: nn.Module, call: AttentionCall, head_dim: int, epsilons: set[float]) -> LayerParts:
    parts = _children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = parts["self_attn"], parts["mlp"]
    if hasattr(attention, "qkv_proj"):
        qkv = [_children(attention, {"qkv_proj", "o_proj"})["qkv_proj"]]
    else:
        own = _children(attention, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
        qkv = [own["q_proj"], own["k_proj"], own["v_proj"]]
    if hasattr(mlp, "gate_up_proj"):
        gate_up = [_children(mlp, {"gate_up_proj", "down_proj"}, {"activation_fn", "act_fn"})["gate_up_proj"]]
    else:
        own = _children(mlp, {"gate_proj", "up_proj", "down_proj"}, {"activation_fn", "act_fn"})
        gate_up = [own["gate_proj"], own["up_proj"]]
    if any(type(linear) is not nn.Linear for linear in (*qkv, *gate_up, attention.o_proj, mlp.down_proj)):
        raise NotRecognised("its projections are not plain linear layers")
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else _norm(norm, epsilons, head_dim) for norm in head_norms)
    return LayerParts(
        tuple(qkv),
        attention.o_proj,
        tuple(gate_up),
        mlp.down_proj,
        _norm(parts["input_layernorm"], epsilons),
        _norm(parts["post_attention_layernorm"], epsilons),
        query_norm,
        key_norm,
        call.window or 0,
    )


def _norm(norm: nn.Module, epsilons: set[float], size: int | None = None) -> torch.Tensor:
    """The weights of an RMSNorm: as they are, or those that it adds 1 to."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(epsilon, float) or weight.dim() != 1:
        raise NotRecognised(f"{type(norm).__name__} is not an RMSNorm")
    if size is not None and weight.numel() != size:
        raise NotRecognised("its queries and keys are not normed head by head")
    x = (torch.randn(2, weight.numel(), generator=torch.Generator().manual_seed(0)) * 0.01).to(weight)
    plain = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    for candidate in (weight.float(), 1.0 + weight.float()):
        if torch.allclose(norm(x).float(), plain * candidate, rtol=tolerance, atol=tolerance / 10):
            epsilons.add(epsilon)
            return candidate.detach().float().clone()  # a view would keep the whole file mapped
    raise NotRecognised(f"{type(norm).__name__} is not an RMSNorm")


def _activation(mlp: nn.Module) -> int:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    x = torch.linspace(-8.0, 8.0, 65)
    for number, known in enumerate(ACTIVATIONS):
        if function is not None and torch.allclose(function(x), known(x), atol=1e-5):
            return number
    raise NotRecognised("its MLP has another activation")


def _check_sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> None:
    if hidden % LANES or inner % LANES or head_dim % LANES or head_dim > HEAD_DIM_MAX:
        raise NotRecognised(f"its sizes {hidden}, {inner}, {head_dim} are not multiples of {LANES}")
    if heads % kv_heads or heads // kv_heads > QUERIES_MAX:
        raise NotRecognised(f"{heads} heads of queries for {kv_heads} of keys")
