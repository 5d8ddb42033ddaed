"""One forward pass over packed chunks of many sequences, over a paged KV pool."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.forward_batch import ForwardBatch, PoolViews, SeqChunk
from engine.attention.paged import forward_context

__all__ = ["Engine", "ModelInfo", "SeqChunk"]


@dataclass(frozen=True)
class ModelInfo:
    """What others must know of a loaded model."""

    model_path: str
    model_type: str
    context_tokens: int
    vocab_size: int
    """Columns of the logits; at least the tokenizer's vocabulary."""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Of weights and KV: `float32`, `bfloat16`, `float16`."""
    block_size: int
    """Tokens per KV block."""
    block_bytes: int
    """Bytes of one KV block, all layers."""
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Equal between two workers exactly when one may decode on the other's KV, block sizes apart."""


class Engine:
    """A model and its KV pool. Made by `engine.model.loader.load_engine`; belongs to one thread."""

    def __init__(self, model: Any, info: ModelInfo, pool: torch.Tensor, min_rows: int = 0) -> None:
        """`min_rows`: as of `PoolViews`."""
        self.info = info
        self.pool = pool
        """[blocks, layers, 2, block_size, kv_heads, head_dim], block-major, zeroed at start."""
        self.blocks = pool.shape[0]
        self.tokens_forwarded = 0
        """Token positions ever forwarded."""
        self._model = model
        self._views = PoolViews(pool, min_rows)
        # Where the model supports it, its output layer runs for the wanted rows only.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        """Writes the chunks' K and V to their blocks; logits of the last token of each chunk that wants them, in order.

        Returns [chunks wanting logits, vocab_size] float32, on the model's device. A sequence appears at most once.
        """
        assert chunks, "a forward has at least one chunk"
        plan = ForwardBatch(self._views, chunks, self.pool.device)
        reset = forward_context.set(plan)
        try:
            rows = {"logits_to_keep": plan.wanted} if self._keeps_rows else {}
            output = self._model(input_ids=plan.input_ids, position_ids=plan.position_ids, use_cache=False, **rows)
        finally:
            forward_context.reset(reset)
        self.tokens_forwarded += plan.tokens
        logits: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, plan.wanted]
        return logits.float()

    @property
    def is_steady(self) -> bool:
        """Whether a token's numbers do not depend on how it is computed: a resumed stream is then exact."""
        return self._views.min_rows > 0

    def finish(self) -> None:
        """Wait until all that was enqueued on a GPU is done. From then on other threads, on streams of their own, may read what
        a forward wrote; before, nothing orders the two."""
        if self.pool.is_cuda:
            torch.cuda.current_stream(self.pool.device).synchronize()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's KV, for copy on write."""
        self.pool[target].copy_(self.pool[source])
