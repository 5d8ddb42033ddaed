"""Runs a model as transformers has it, with attention over the paged KV pool in place of its own."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.forward_batch import ForwardBatch, PoolViews, SeqChunk, rows_of_logits
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
        self._body = _Body(model.base_model) if self._keeps_rows and model.base_model is not model else None

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        plan = ForwardBatch(self._views, chunks, self._device)
        pieces = list(rows_of_logits(chunks))
        if self._body is None or not pieces:
            logits = self._run(plan, torch.arange(plan.tokens, device=self._device) if pieces else plan.wanted)
            for on_logits, start, row, count in pieces:
                on_logits(start, logits[row : row + count])
            return logits[plan.wanted] if pieces else logits
        with self._body.kept():
            logits = self._run(plan, plan.wanted)
            for on_logits, start, row, count in pieces:
                on_logits(start, self._run(plan, torch.arange(row, row + count, device=self._device)))
        return logits

    def _run(self, plan: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] float32; of all tokens where the model can only give all."""
        reset = forward_context.set(plan)
        try:
            keep = {"logits_to_keep": rows} if self._keeps_rows else {}
            output = self._model(input_ids=plan.input_ids, position_ids=plan.position_ids, use_cache=False, **keep)
        finally:
            forward_context.reset(reset)
        logits: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, rows]
        return logits.float()

    @contextmanager
    def short_windows(self, window: int) -> Iterator[None]:
        with short_windows(self._model, self._config, window):
            yield


class _Body:
    """A model without its output layer, whose result can be kept, so that the output layer can run for other rows of it."""

    def __init__(self, body: Any) -> None:
        self._forward = body.forward
        self._keeps = False
        self._output: Any = None
        body.forward = self._cached

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The first result in here is that of all others."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._output = False, None

    def _cached(self, *args: Any, **options: Any) -> Any:
        if not self._keeps:
            return self._forward(*args, **options)
        if self._output is None:
            self._output = self._forward(*args, **options)
        return self._output


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
