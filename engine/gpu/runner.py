"""Runs a recognised model on a GPU: prompts as they come, decode steps by a pipeline of CUDA graphs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from engine.attention.forward_batch import SeqChunk, pack
from engine.gpu.decoder import Decoder
from engine.gpu.ops import Ops
from engine.gpu.pipeline import GpuPipeline
from engine.gpu.weights import DecoderWeights


class GpuRunner:
    """A `Runner`."""

    is_batch_invariant = False
    """The products of the vendor's library round by the number of rows."""

    def __init__(
        self, weights: DecoderWeights, pool: torch.Tensor, ops: Ops, context_tokens: int, decode_rows: int = 0
    ) -> None:
        """`decode_rows`: the most sequences that decode at once; 0: there is no pipeline."""
        self._pool = pool
        self._decoder = Decoder(weights, ops)
        self.backend = f"gpu ({ops.attention.name} kernels)"
        self.pipeline = GpuPipeline(self._decoder, pool, context_tokens, decode_rows) if decode_rows else None

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        return self._decoder.forward(pack(chunks, self._pool))

    def short_windows(self, window: int) -> AbstractContextManager[None]:
        return self._decoder.short_windows(window)

    def capture(self) -> None:
        """After the check of the model: a graph keeps the windows that it was captured with. Raises RuntimeError."""
        if self.pipeline is not None and self._pool.is_cuda:
            self.pipeline.replay.capture()
            self.backend = f"{self.backend[:-1]}, {self.pipeline.replay.graphs} CUDA graphs)"
