"""The operations of `engine.gpu.ops`, by the kernels of `engine.gpu.kernels`."""

import torch
from triton import next_power_of_2

from engine import triton_launch
from engine.attention.interface import AttentionMetadata
from engine.attention.triton_backend import TritonAttention
from engine.gpu import kernels
from engine.gpu.weights import DecoderWeights, LayerWeights

_ACTIVATED_AT_ONCE = 1024


class TritonOps:
    def __init__(self, pool: torch.Tensor) -> None:
        self.attention = TritonAttention(pool)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, (rows, hidden) = torch.empty_like(x), x.shape
        triton_launch.launch(
            kernels.add_norm, (rows,), x, x if delta is None else delta, weight, out, epsilon, SIZE=hidden,
            PADDED=next_power_of_2(hidden), ADDS=delta is not None,
        )  # fmt: skip
        return x, out

    def rotate_and_write(
        self, number: int, layer: LayerWeights, model: DecoderWeights, qkv: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        q = qkv.new_empty((qkv.shape[0], model.heads, model.head_dim))
        norms = [model.cosine if norm is None else norm for norm in (layer.query_norm, layer.key_norm)]
        triton_launch.launch(
            kernels.rotate_and_write, (qkv.shape[0], model.heads + model.kv_heads), qkv, q, self.attention.layer(number),
            metadata.batch.slots, metadata.batch.positions, *norms, model.cosine, model.sine, model.epsilon,
            self.attention.v_distance, HEADS=model.heads, KV_HEADS=model.kv_heads, DIM=model.head_dim,
            DIM_PAD=next_power_of_2(model.head_dim), ROTARY=model.cosine.shape[1],
            QUERY_NORM=layer.query_norm is not None, KEY_NORM=layer.key_norm is not None,
        )  # fmt: skip
        return q

    def activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, inner))
        tile = min(_ACTIVATED_AT_ONCE, next_power_of_2(inner))
        triton_launch.launch(
            kernels.activate, (rows, -(-inner // tile)), gate_up, out, INNER=inner, TILE=tile, GELU=activation == 1
        )
        return out
