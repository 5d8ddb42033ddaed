"""Runs a model as transformers has it, with attention over the paged KV pool in place of its own."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.forward_batch import SeqChunk, pack
from engine.attention.interface import AttentionBackend
from engine.attention.paged import PagedForward, forward_context


class TransformersRunner:
    is_batch_invariant = False

    def __init__(self, model: Any, text_config: Any, pool: torch.Tensor, attention: AttentionBackend) -> None:
        self._model = model
        self._config = text_config
        self._pool = pool
        self._attention = attention
        self.backend = f"transformers ({attention.name} attention)"
        device = torch.cuda.get_device_name(pool.device) if pool.is_cuda else torch.backends.cpu.get_cpu_capability()
        self.numerics = f"torch {torch.__version__}, {attention.name} attention, {device}"
        # Where the model supports it, its output layer runs for the wanted rows only.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        batch = pack(chunks, self._pool)
        reset = forward_context.set(PagedForward(self._attention, self._attention.plan(batch)))
        try:
            rows = {"logits_to_keep": batch.wanted} if self._keeps_rows else {}
            inputs = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None]}
            output = self._model(**inputs, use_cache=False, **rows)
        finally:
            forward_context.reset(reset)
        logits: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, batch.wanted]
        return logits.float()

    @contextmanager
    def short_windows(self, window: int) -> Iterator[None]:
        with short_windows(self._model, self._config, window):
            yield


@contextmanager
def short_windows(model: Any, text_config: Any, window: int) -> Iterator[None]:
    """Sets every sliding window of the model to `window` for a while."""
    owners = [text_config, *model.modules()]
    saved = [
        (owner, owner.sliding_window) for owner in owners if isinstance(getattr(owner, "sliding_window", None), int)
    ]
    for owner, _ in saved:
        owner.sliding_window = window
    try:
        yield
    finally:
        for owner, before in saved:
            owner.sliding_window = before
