"""One forward pass over packed chunks of many sequences, over a paged KV pool."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.forward_batch import SeqChunk
from engine.pipeline import DecodePipeline

__all__ = ["Engine", "ModelInfo", "SeqChunk"]


@dataclass(frozen=True)
class ModelInfo:
    """The properties of a loaded model that other components need."""

    model_path: str
    model_type: str
    context_tokens: int
    vocab_size: int  # columns of the logits; at least the tokenizer's vocabulary
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int  # in tokens
    block_bytes: int  # all layers of a KV block
    eos_token_ids: tuple[int, ...]
    attention_tokens: int  # context at which attention costs a token as much as the weights, without sliding windows
    fingerprint: str  # equal exactly if one worker may decode on the other's KV, block sizes apart


class Runner(Protocol):
    """The code that computes a forward pass. `TransformersRunner` runs any model; `engine.cpu.decoder` and `engine.gpu.runner`
    those of the common shape."""

    backend: str
    numerics: str  # conditions of its results' last bits; equal for workers that compute the same bits
    is_batch_invariant: bool  # a token's bits depend neither on its neighbours nor on the cut of its prompt

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor: ...

    def checked(self, window: int | None, offset: int) -> AbstractContextManager[None]:
        """Sets the conditions of the check after load: within the context, sliding windows are `window` tokens if that is
        given, and the first token of a sequence has the position `offset`."""


class Engine:
    """A model and its KV pool. Made by `engine.model.loader.load_engine`; belongs to one thread."""

    def __init__(self, runner: Runner, info: ModelInfo, *pools: torch.Tensor) -> None:
        """`pools`: one, or with tensor parallelism that of each rank, which `kvtransfer.memory.pool.RankRows` describes."""
        self.info = info
        self.pools = pools
        self.pool = pools[0]  # [blocks, layers, 2, block_size, kv_heads, head_dim], block-major, zeroed at start
        self.blocks = self.pool.shape[0]  # that may be used at once
        self.tokens_forwarded = 0  # token positions, ever
        self.runner = runner

    def part(self, blocks: int) -> "Engine":
        """Returns an engine for one of two roles: the same model and pool, at most `blocks` blocks, and its own count of
        tokens."""
        assert 0 < blocks <= self.blocks
        part = Engine(self.runner, self.info, *self.pools)
        part.blocks = blocks
        return part

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        """Writes the chunks' K and V to their blocks; logits of the last token of each chunk that wants them, in order.

        Returns [chunks wanting logits, vocab_size] float32, on the model's device. A sequence appears at most once.
        """
        assert chunks, "a forward has at least one chunk"
        logits = self.runner.forward(chunks)
        self.tokens_forwarded += sum(len(chunk.tokens) for chunk in chunks)
        return logits

    @property
    def backend(self) -> str:
        return self.runner.backend

    @property
    def on_gpu(self) -> bool:
        return self.pool.is_cuda

    @property
    def numerics(self) -> str:
        return self.runner.numerics

    @property
    def is_batch_invariant(self) -> bool:
        """Returns whether the runner is batch-invariant, so that resumed streams are exact."""
        return self.runner.is_batch_invariant

    @property
    def pipeline(self) -> DecodePipeline | None:
        pipeline: DecodePipeline | None = getattr(self.runner, "pipeline", None)
        return pipeline

    def finish(self) -> None:
        """Wait until all that was enqueued on a GPU is done. Only then may other threads read what a forward wrote, because
        their streams are not ordered with this one."""
        if self.pool.is_cuda:
            torch.cuda.current_stream(self.pool.device).synchronize()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's KV, for copy on write."""
        for pool in self.pools:
            pool[target].copy_(pool[source])
        if len(self.pools) > 1:
            self.finish()  # the other ranks' streams are not ordered with this copy
