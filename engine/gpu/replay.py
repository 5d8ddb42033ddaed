"""A function of the number of rows, over fixed buffers: captured as one CUDA graph for each bucket of rows, and replayed.

Before the capture, and on a CPU, the function is called instead.
"""

from collections.abc import Callable
from typing import Final

import torch

_SMALL: Final = (1, 2, 4)
_STEP: Final = 8


def buckets(rows_max: int) -> tuple[int, ...]:
    """Numbers of rows for which there is a graph: 1, 2, 4, then every eighth."""
    found = [rows for rows in (*_SMALL, *range(_STEP, rows_max, _STEP)) if rows < rows_max]
    return (*found, rows_max)


class GraphReplay:
    def __init__(self, function: Callable[[int], None], rows_max: int) -> None:
        self._function = function
        self._buckets = buckets(rows_max)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.padding_rows = 0  # rows that only filled a bucket up

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture on a GPU, from the largest on, so that the smaller ones use its memory. Raises RuntimeError."""
        memory = torch.cuda.graph_pool_handle()
        for rows in reversed(self._buckets):
            self._function(rows)  # compiles kernels, and lets libraries allocate, which a graph cannot
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._function(rows)
            self._graphs[rows] = graph

    def run(self, rows: int) -> None:
        """Run the function for the smallest bucket of at least `rows` rows. Only the first `rows` rows of its output are
        valid."""
        bucket = next(bucket for bucket in self._buckets if bucket >= rows)
        self.padding_rows += bucket - rows
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._function(bucket)
