"""The forward pass of a decoder-only transformer (Touvron et al. 2023, arXiv:2302.13971) with fused weights.

The code does not depend on tensor contents and reads no tensor on the host. So it can be captured as a CUDA graph, and the
host never waits for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.attention.forward_batch import ForwardBatch
from engine.gpu.ops import Ops
from engine.gpu.weights import DecoderWeights, Product


class Decoder:
    def __init__(self, weights: DecoderWeights, ops: Ops) -> None:
        self.weights = weights
        self._ops = ops
        self._calls = [layer.call for layer in weights.layers]

    def forward(self, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Writes the logits of all rows to `out` [tokens, vocab] float32."""
        out.copy_(_times(self.hidden(batch), self.weights.head))

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes K and V of the batch to the pool; [tokens, hidden], as the output layer reads it."""
        model, ops = self.weights, self._ops
        metadata = ops.attention.plan(batch)
        x, delta = F.embedding(batch.token_ids, model.embedding), None
        for number, (layer, call) in enumerate(zip(model.layers, self._calls, strict=True)):
            x, normed = ops.add_norm(x, delta, layer.attention_norm, model.epsilon)
            q = ops.rotate_and_write(number, layer, model, _times(normed, layer.qkv), metadata)
            attended = ops.attention.read(number, call, q, metadata)
            x, normed = ops.add_norm(x, _times(attended.flatten(1), layer.out), layer.mlp_norm, model.epsilon)
            delta = _times(ops.activate(_times(normed, layer.gate_up), model.activation), layer.down)
        return ops.add_norm(x, delta, model.norm, model.epsilon)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _times(hidden, self.weights.head).float()

    @contextmanager
    def checked(self, window: int | None, offset: int) -> Iterator[None]:
        saved, weights = self._calls, self.weights
        self._calls = [replace(call, window=window) if window and call.window else call for call in saved]
        self.weights = replace(weights, cosine=weights.cosine[offset:], sine=weights.sine[offset:])
        try:
            yield
        finally:
            self._calls, self.weights = saved, weights


def _times(x: torch.Tensor, product: Product) -> torch.Tensor:
    return F.linear(x, product.weight, product.bias)
