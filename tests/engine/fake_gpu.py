"""Tensors that claim to be on a GPU, in a torch that was built without: for running the code around kernels.

A copy from the host that is not told to be `non_blocking` fails. Indexing in Python wants the device itself in such a torch, so
it is spelled out in operations that do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

_GPU = torch.device("cuda", 0)
_WAITS = "a copy from the host for which the host waits"


class _Spelled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _getitem(*args)
        if func is torch.Tensor.__getitem__ and type(args[0]) is torch.Tensor:  # a buffer of the host
            with unset_fake_temporarily():
                return func(*args)
        if func is torch.Tensor.contiguous and args[0].device.type == "cuda":
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.copy_ and args[0].device.type == "cuda":
            assert args[0].shape == args[1].shape, "a copy to the device"
            assert args[1].device.type == "cuda" or kwargs.get("non_blocking"), _WAITS
            return args[0]
        if func is torch.Tensor.to and args[0].device.type == "cpu" and args[1:] == (_GPU,):
            assert kwargs.get("non_blocking"), _WAITS
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=_GPU)
        if func is torch.tensor:
            assert kwargs.get("device") != _GPU, _WAITS
        return func(*args, **kwargs)


def _getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    at = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is ...:  # as torch's own code has it, with one index behind
            at = tensor.dim() - 1
        elif one is None:
            tensor, at = tensor.unsqueeze(at), at + 1
        elif isinstance(one, int):
            tensor = tensor.select(at, one)
        elif isinstance(one, slice):
            start, stop, step = one.indices(tensor.shape[at])
            assert step == 1
            tensor, at = tensor.narrow(at, start, max(0, stop - start)), at + 1
        else:
            assert one.dtype in (torch.int64, torch.int32), "an index by a mask has a size that the host does not know"
            shape = tensor.shape[:at] + one.shape + tensor.shape[at + 1 :]
            tensor, at = tensor.index_select(at, one.reshape(-1)).view(shape), at + one.dim()
    return tensor


class FakeGpu:
    """To be entered as often as one likes: `with gpu.on():`."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._mode, _Spelled():
            yield
