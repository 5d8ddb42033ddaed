"""Starts Triton kernels. The one place where that happens, so that a test can run the code around them without a GPU."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """On the current stream. Nothing is started for an empty grid."""
    if all(grid):
        kernel[grid](*arguments, **constants)
