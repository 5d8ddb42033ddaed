"""Memory in huge pages, if the kernel supports `MADV_HUGEPAGE`.

A decode step reads all weights once. If pages are of 4 KiB, that takes a hundred thousand address translations, and a step of
one stream takes half as long again.
"""

import contextlib
import mmap
from math import prod
from typing import Final

import torch

_ALIGNMENT: Final = 64
ARENA_BYTES: Final = 128 << 20


class HugePages:
    """Hands out tensors side by side. Their memory goes back when all of one arena are gone."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._arena_bytes = arena_bytes
        self._arena: mmap.mmap | None = None
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._empty(tuple(tensor.shape), tensor.dtype)
        found.copy_(tensor)
        return found

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = prod(shape)
        wanted = count * dtype.itemsize
        if self._arena is None or self._used + wanted > len(self._arena):
            self._arena, self._used = _arena(max(self._arena_bytes, wanted)), 0
        found = torch.frombuffer(self._arena, dtype=dtype, count=count, offset=self._used)
        self._used += -(-wanted // _ALIGNMENT) * _ALIGNMENT
        return found.view(shape)


def _arena(size: int) -> mmap.mmap:
    arena = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena
