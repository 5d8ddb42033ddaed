"""Runs a model as transformers has it, with attention over the paged KV pool in place of its own."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.forward_batch import ForwardBatch, PoolViews, SeqChunk
from engine.attention.paged import forward_context


class TransformersRunner:
    backend = "torch"

    def __init__(self, model: Any, text_config: Any, pool: torch.Tensor, min_rows: int = 0) -> None:
        """`min_rows`: as of `PoolViews`."""
        self._model = model
        self._config = text_config
        self._device = pool.device
        self._views = PoolViews(pool, min_rows)
        self.is_batch_invariant = min_rows > 0
        # Where the model supports it, its output layer runs for the wanted rows only.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        plan = ForwardBatch(self._views, chunks, self._device)
        reset = forward_context.set(plan)
        try:
            rows = {"logits_to_keep": plan.wanted} if self._keeps_rows else {}
            output = self._model(input_ids=plan.input_ids, position_ids=plan.position_ids, use_cache=False, **rows)
        finally:
            forward_context.reset(reset)
        logits: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, plan.wanted]
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
