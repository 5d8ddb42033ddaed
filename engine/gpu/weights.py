"""A recognised model's weights on its device: q, k and v as one matrix, gate and up as one.

The model's own layers become views of the joined matrices, so that weights are in memory once, and the model can still run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from engine.attention.interface import AttentionCall
from engine.cpu.recognise import LayerParts, ModelParts, NotRecognised

_POSITIONS: Final = 4096  # of one computation of rotary embeddings


@dataclass(frozen=True)
class Product:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    call: AttentionCall


@dataclass(frozen=True)
class DecoderWeights:
    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor  # [vocab, hidden]
    head: Product
    norm: torch.Tensor
    cosine: torch.Tensor  # [context_tokens, rotary dimensions] float32
    sine: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    activation: int  # a number in `engine.cpu.recognise.ACTIVATIONS`
    epsilon: float


@torch.inference_mode()
def fuse(parts: ModelParts, context_tokens: int) -> DecoderWeights:
    """Joins the matrices, one layer after the other. Raises NotRecognised for a model that has more than Llama's shape."""
    if not parts.is_plain:
        raise NotRecognised("it has parts that the GPU kernels do not know")
    cosine, sine = _rotary_tables(parts.rotary, context_tokens, parts.embedding.device)
    return DecoderWeights(
        tuple(_layer(layer, parts) for layer in parts.layers), parts.embedding.detach(), _joined([parts.head]), parts.norm,
        cosine, sine, parts.heads, parts.kv_heads, parts.head_dim, parts.activation, parts.epsilon,
    )  # fmt: skip


def _layer(layer: LayerParts, parts: ModelParts) -> LayerWeights:
    [mlp] = layer.mlps
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    return LayerWeights(
        _joined(layer.qkv), _joined([layer.out]), _joined(mlp.gate_up), _joined([mlp.down]),
        layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm,
        AttentionCall(layer.window or None, parts.scaling, parts.softcap or None),
    )  # fmt: skip


def _joined(layers: Sequence[nn.Linear]) -> Product:
    if len(layers) == 1:
        bias = layers[0].bias
        return Product(layers[0].weight.detach(), None if bias is None else bias.detach())
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined_bias: torch.Tensor | None = None
    if any(layer.bias is not None for layer in layers):
        none = [weight.new_zeros(layer.out_features) for layer in layers]
        biases = [zeros if layer.bias is None else layer.bias for layer, zeros in zip(layers, none, strict=True)]
        joined_bias = torch.cat([one.detach() for one in biases])
    first = 0
    for layer in layers:
        rows = slice(first, first + layer.out_features)
        layer.weight = nn.Parameter(weight[rows], requires_grad=False)
        if layer.bias is not None and joined_bias is not None:
            layer.bias = nn.Parameter(joined_bias[rows], requires_grad=False)
        first += layer.out_features
    return Product(weight, joined_bias)


def _rotary_tables(rotary: nn.Module, context_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as the model's own module computes them, in float32."""
    like = torch.zeros(1, 1, 1, device=device)
    found = []
    for start in range(0, context_tokens, _POSITIONS):
        places = torch.arange(start, min(start + _POSITIONS, context_tokens), device=device)[None]
        found.append([table[0].float() for table in rotary(like, places)])
    cosine, sine = (torch.cat(tables).contiguous() for tables in zip(*found, strict=True))
    return cosine, sine
