"""The operations between a decoder's matrix products, in plain torch: what the Triton kernels are compared with."""

from typing import Protocol

import torch

from engine import triton_launch
from engine.attention.interface import AttentionBackend, AttentionMetadata
from engine.attention.torch_backend import TorchAttention
from engine.cpu.recognise import ACTIVATIONS
from engine.gpu.weights import DecoderWeights, LayerWeights


class Ops(Protocol):
    """`TorchOps`, or `engine.gpu.triton_ops.TritonOps`."""

    @property
    def attention(self) -> AttentionBackend: ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, its RMSNorm), for x [rows, hidden]. x may be overwritten."""

    def rotate_and_write(
        self, number: int, layer: LayerWeights, model: DecoderWeights, qkv: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Norms, if the layer has norms of heads, and rotates the queries and keys of qkv [rows, (heads + 2 kv_heads) * dim].
        K and V go to the pool; returns the queries [rows, heads, dim]."""

    def activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        """activation(gate) * up, for [rows, 2 * inner] → [rows, inner]."""


class TorchOps:
    def __init__(self, pool: torch.Tensor) -> None:
        self.attention: AttentionBackend = TorchAttention(pool)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta is not None:
            x = x + delta
        return x, rms_norm(x, weight, epsilon)

    def rotate_and_write(
        self, number: int, layer: LayerWeights, model: DecoderWeights, qkv: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, model.head_dim)
        q, k, v = torch.split(heads, [model.heads, model.kv_heads, model.kv_heads], dim=1)
        if layer.query_norm is not None:
            q = rms_norm(q, layer.query_norm, model.epsilon)
        if layer.key_norm is not None:
            k = rms_norm(k, layer.key_norm, model.epsilon)
        positions = metadata.batch.positions
        cosine, sine = model.cosine[positions, None], model.sine[positions, None]
        self.attention.write(number, _rotated(k, cosine, sine), v, metadata)
        return _rotated(q, cosine, sine)

    def activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def make_ops(pool: torch.Tensor) -> Ops:
    """Triton's operations. Plain torch would gather the longest context for each row of a decode step. Raises KernelFailed."""
    triton_launch.prepare()
    from engine.gpu.triton_ops import TritonOps  # only here: it cannot be imported without Triton

    return TritonOps(pool)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Zhang and Sennrich 2019, arXiv:1910.07467."""
    values = x.float()
    return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, dim] with as many of its first dimensions rotated as the tables have (Su et al. 2021,
    arXiv:2104.09864)."""
    rotary = cosine.shape[-1]
    turned, rest = x[..., :rotary].float(), x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
