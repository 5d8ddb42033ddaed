"""Which operations a GPU decoder runs on: Triton's where Triton is installed, else plain torch."""

from importlib.util import find_spec

import torch

from engine.gpu.ops import Ops, TorchOps


def make_ops(pool: torch.Tensor) -> Ops:
    if find_spec("triton") is None:
        return TorchOps(pool)
    from engine.gpu.triton_ops import TritonOps  # only here: it cannot be imported without Triton

    return TritonOps(pool)
