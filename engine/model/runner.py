"""Runs a model as transformers has it, with attention over the paged KV pool in place of its own."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.forward_batch import ForwardBatch, SeqChunk, pack, rows_of_logits
from engine.attention.interface import AttentionBackend
from engine.attention.paged import PagedForward, forward_context


class TransformersRunner:
    is_batch_invariant = False

    def __init__(self, model: Any, text_config: Any, pool: torch.Tensor, attention: AttentionBackend) -> None:
        self._model = model
        self._config = text_config
        self._pool = pool
        self._attention = attention
        self._offset = 0  # position of a sequence's first token
        self.backend = f"transformers ({attention.name} attention)"
        device = torch.cuda.get_device_name(pool.device) if pool.is_cuda else torch.backends.cpu.get_cpu_capability()
        self.numerics = f"torch {torch.__version__}, {attention.name} attention, {device}"
        # Where the model supports it, its output layer runs for the wanted rows only.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._body = _Body(model.base_model) if self._keeps_rows and model.base_model is not model else None

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        batch = pack(chunks, self._pool)
        pieces = list(rows_of_logits(chunks))
        if self._body is None or not pieces:
            logits = self._run(
                batch, torch.arange(len(batch.token_ids), device=self._pool.device) if pieces else batch.wanted
            )
            for on_logits, start, row, count in pieces:
                on_logits(start, logits[row : row + count])
            return logits[batch.wanted] if pieces else logits
        with self._body.kept():
            logits = self._run(batch, batch.wanted)
            for on_logits, start, row, count in pieces:
                on_logits(start, self._run(batch, torch.arange(row, row + count, device=self._pool.device)))
        return logits

    def _run(self, batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] float32; of all tokens where the model can only give all."""
        reset = forward_context.set(PagedForward(self._attention, self._attention.plan(batch)))
        try:
            keep = {"logits_to_keep": rows} if self._keeps_rows else {}
            inputs = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None] + self._offset}
            output = self._model(**inputs, use_cache=False, **keep)
        finally:
            forward_context.reset(reset)
        logits: torch.Tensor = output.logits[0] if self._keeps_rows else output.logits[0, rows]
        return logits.float()

    @contextmanager
    def checked(self, window: int | None, offset: int) -> Iterator[None]:
        self._offset = offset
        try:
            with short_windows(self._model, self._config, window):
                yield
        finally:
            self._offset = 0


class _Body:
    """A model without its output layer, whose result can be kept, so that the output layer can run for other rows of it."""

    def __init__(self, body: Any) -> None:
        self._forward = body.forward
        self._keeps = False
        self._output: Any = None
        body.forward = self._cached

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the first result within the context and return it for all later calls."""
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
def short_windows(model: Any, text_config: Any, window: int | None) -> Iterator[None]:
    """Sets every sliding window of the model to `window` for a while; None leaves them."""
    owners = [] if window is None else [text_config, *model.modules()]
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
