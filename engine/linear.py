"""Prepacked weights for small batches on the CPU.

A float32 matrix product of 4 to 64 rows is bound by reading the weights, yet the general routine behind `F.linear` is up to
three times slower there than for one row; oneDNN's kernel over weights in its own blocked layout stays nearly flat. For one
to three rows (a matrix-vector product) and for long prompts `F.linear` is as fast or faster. So both forms are kept, as long
as the second copy is small; larger models keep the plain one, which workers of one host can share through the page cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MAX_PACKED_BYTES = 4 << 30
"""Models with more bytes than this in their linear layers are not packed: the copy would double their memory."""
MIN_ROWS, MAX_ROWS = 4, 128
"""The packed form serves products of this many rows."""
_ROWS_HINT = 16
"""What the blocked layout is chosen for; measured best or equal for 4 to 64 rows among hints of 4, 16 and 256."""


class PackedLinear(nn.Module):
    """Drop-in for a `nn.Linear` that is not trained: the same weight and bias, and the weight once more in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MIN_ROWS <= x.numel() // self.in_features <= MAX_ROWS:
            return self.packed(x)
        return F.linear(x, self.weight, self.bias)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """The product over the blocked layout, for any number of rows."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replaces every plain float32 `nn.Linear` of the model by a PackedLinear, where this torch can do it and does it right.

    Returns the bytes of the packed copies; 0 when the model is too large or the operators are not there.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.float32 and not child._forward_hooks
    ]
    total_bytes = sum(child.weight.numel() * 4 for _, _, child in found)
    if not found or total_bytes > MAX_PACKED_BYTES or not packing_works():
        return 0
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return total_bytes


def packing_works() -> bool:
    """Whether the oneDNN operators exist here and agree with F.linear. They are not public, so nothing else is assumed."""
    operators: Any = torch.ops.mkldnn
    if not hasattr(operators, "_reorder_linear_weight") or not hasattr(operators, "_linear_pointwise"):
        return False
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(48, 80).requires_grad_(False)
    linear.weight.copy_(torch.randn(80, 48, generator=generator))
    x = torch.randn(1, 7, 48, generator=generator)
    try:
        got = PackedLinear(linear).packed(x)
    except RuntimeError:
        return False
    return torch.allclose(got, F.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-3)
