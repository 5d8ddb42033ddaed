"""Prepacked weights on the CPU: fast for a few rows, and the same numbers however many run together.

A float32 matrix product of 4 to 64 rows is bound by reading the weights, yet the general routine behind `F.linear` is up to
three times slower there than for one row; oneDNN's kernel over weights in its own blocked layout stays nearly flat. It also
gives each row the same bits whatever else is in the product, from two rows on, where `F.linear` chooses among routines that
round differently. One row alone may have its long sums divided in another way; where it has, it is computed twice. A stream's
tokens then do not depend on its neighbours. Larger models keep the plain form, which workers of one host can share through the
page cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MAX_PACKED_BYTES = 4 << 30
"""Models with more bytes than this in their linear layers are not packed: the copy would double their memory."""
LARGEST = 512
"""Rows of the largest product."""
_COMPILED_OPERATIONS = 1 << 30
"""A product of more multiplications than this is first computed when it comes: 20 to 50 ms each on a core."""
_ROWS_HINT = 16
"""What the blocked layout is chosen for; measured best or equal for 4 to 64 rows among hints of 4, 16 and 256."""


class PackedLinear(nn.Module):
    """Drop-in for a `nn.Linear` that is not trained: the same weight and bias, and the weight once more in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        two = torch.randn(2, self.in_features, generator=torch.Generator().manual_seed(0))
        self._fewest = 1 if torch.equal(self._kernel(two[:1]), self._kernel(two)[:1]) else 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return F.linear(x, self.weight, self.bias)
        out = (
            self._product(rows)
            if rows.shape[0] <= LARGEST
            else torch.cat([*map(self._product, torch.split(rows, LARGEST))])
        )
        return out.view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Of at most `LARGEST` rows; those that are added are copies, so that no row's numbers are unusual."""
        rows = x.shape[0]
        more = max(bucket_size(rows), self._fewest) - rows
        return self._kernel(torch.cat((x, x[:more])))[:rows] if more else self._kernel(x)

    def _kernel(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def bucket_size(rows: int) -> int:
    """The rows of the product that computes so many: at most a quarter more, or three.

    oneDNN compiles a routine for each number of rows and keeps the last 1,024: with any number that comes a worker on a small
    model grew by a gigabyte. There are 26 such numbers.
    """
    assert 0 < rows <= LARGEST
    step = max(4, (1 << (rows - 1).bit_length()) >> 3) if rows > 2 else 1
    return -(-rows // step) * step


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


@torch.inference_mode()
def warm_up(model: nn.Module) -> None:
    """Has oneDNN compile its routines now: a worker then neither stops for a millisecond nor grows by 0.3 MiB for each that
    comes later. Belongs to the thread that will compute, since a routine is for a number of threads."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    shapes = {(layer.in_features, layer.out_features, layer.bias is None): layer for layer in packed}
    for rows in sorted({bucket_size(rows) for rows in range(1, LARGEST + 1)}):
        for layer in shapes.values():
            if rows * layer.in_features * layer.out_features <= _COMPILED_OPERATIONS:
                layer(torch.zeros(rows, layer.in_features))


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
        got = PackedLinear(linear)(x)
    except RuntimeError:
        return False
    return torch.allclose(got, F.linear(x, linear.weight, linear.bias), rtol=1e-4, atol=1e-3)
