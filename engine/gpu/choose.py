"""Makes the operations that a GPU decoder runs on: Triton's. Plain torch would gather the longest context for each row of a
decode step."""

import torch

from engine import triton_launch
from engine.gpu.ops import Ops


def make_ops(pool: torch.Tensor) -> Ops:
    """Raises KernelFailed."""
    triton_launch.prepare()
    from engine.gpu.triton_ops import TritonOps  # only here: it cannot be imported without Triton

    return TritonOps(pool)
