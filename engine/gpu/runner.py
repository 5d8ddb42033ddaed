"""Runs a recognised model on a GPU: prompts as they come, decode steps by a pipeline of CUDA graphs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch

from engine.attention.forward_batch import SeqChunk, pack, rows_of_logits
from engine.gpu.decoder import Decoder
from engine.gpu.ops import Ops
from engine.gpu.pipeline import GpuPipeline
from engine.gpu.weights import DecoderWeights

_WARM_UP_TOKENS: Final = (1, 2, 64, 128, 1024, 1088)  # 1, 2, 16 and 17 tiles of queries, beside single tokens


class GpuRunner:
    is_batch_invariant = False  # the products of the vendor's library round by the number of rows

    def __init__(
        self, weights: DecoderWeights, pool: torch.Tensor, ops: Ops, context_tokens: int, decode_rows: int = 0
    ) -> None:
        """`decode_rows`: the most sequences that decode at once; 0: there is no pipeline."""
        self._pool, self._context_tokens = pool, context_tokens
        self._decoder = Decoder(weights, ops)
        self.backend = f"gpu ({ops.attention.name} kernels)"
        device = torch.cuda.get_device_name(pool.device) if pool.is_cuda else "cpu"
        self.numerics = f"gpu, torch {torch.__version__}, {ops.attention.name} kernels, {device}"
        self.pipeline = GpuPipeline(self._decoder, pool, context_tokens, decode_rows) if decode_rows else None

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        if max(chunk.start + len(chunk.tokens) for chunk in chunks) > self._context_tokens:
            raise ValueError("a chunk is outside of the context")
        batch = pack(chunks, self._pool)
        hidden = self._decoder.hidden(batch)
        for on_logits, start, row, count in rows_of_logits(chunks):
            on_logits(start, self._decoder.logits(hidden[row : row + count]))
        return self._decoder.logits(hidden[batch.wanted])

    def checked(self, window: int | None, offset: int) -> AbstractContextManager[None]:
        return self._decoder.checked(window, offset)

    def capture(self) -> None:
        """Capture the CUDA graphs. Called after the check of the model, because a graph keeps the windows that it was captured
        with. Raises RuntimeError and KernelFailed."""
        if self.pipeline is not None and self._pool.is_cuda:
            self.warm_up()
            self.pipeline.replay.capture()
            self.backend = f"{self.backend[:-1]}, {self.pipeline.replay.graphs} CUDA graphs)"

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run prompts of the sizes at which Triton or the vendor's library may choose other kernels, so that no kernel is
        compiled while requests wait. Leaves zeros in the pool."""
        size, room = self._pool.shape[3], len(self._pool) * self._pool.shape[3]
        for tokens in sorted({min(one, self._context_tokens, room) for one in _WARM_UP_TOKENS}):
            blocks = range(-(-tokens // size))
            self.forward([SeqChunk([0] * tokens, 0, blocks, True)])
            self._pool[: len(blocks)].zero_()
