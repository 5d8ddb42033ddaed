"""Decode steps on the device, one ahead of what the host has seen.

A step's tokens stay on the device, where the next step forwards them; the host gets a copy, and sees the end of a stream one
step late. The forward pass reads only buffers in fixed places, so it is a CUDA graph for each number of rows; drawing follows
as plain calls. Nothing that is launched makes the host wait: only `collect` does.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.forward_batch import NO_SLOT, ForwardBatch, upload
from engine.gpu.adjustments import Adjustments
from engine.gpu.decoder import Decoder
from engine.gpu.replay import GraphReplay
from engine.gpu.step_input import Field, Join, StepInput, StepShape
from engine.pipeline import BlockCopies, DecodeRow
from engine.sampling.device_draw import DrawParameters, draw_rows, likeliest, top_logprobs
from engine.sampling.sampler import Sampled, SamplerState, as_logprobs

DEPTH: Final = 2


@dataclass(frozen=True)
class _Step:
    states: tuple[SamplerState, ...]
    tokens: torch.Tensor  # [2, rows] on the host: tokens, and whether their logits were finite
    logprobs: torch.Tensor | None  # of `top_logprobs`, on the host; None: not wanted
    done: torch.cuda.Event | None


class GpuPipeline:
    def __init__(self, decoder: Decoder, pool: torch.Tensor, context_tokens: int, rows_max: int) -> None:
        """`rows_max`: the most sequences at once."""
        self._decoder = decoder
        self._pool = pool
        self._block_size = pool.shape[3]
        self._slots_per_block = pool.shape[1] * 2 * self._block_size
        self._blocks_max = -(-context_tokens // self._block_size)
        self._input = StepInput(rows_max, context_tokens, self._block_size, pool.device)
        # One line more than sequences, for the rows that fill a batch up.
        self._tables = torch.zeros(rows_max + 1, self._blocks_max, dtype=torch.int32, device=pool.device)
        self._drawn = torch.zeros(rows_max + 1, dtype=torch.int64, device=pool.device)
        self._vocab_size = decoder.weights.head.weight.shape[0]
        # All CUDA graphs share this buffer; outputs of their own would take memory for each graph.
        self._logits = torch.zeros(rows_max, self._vocab_size, device=pool.device)
        self._adjustments: Adjustments | None = None
        self._under_way: deque[_Step] = deque()
        self.replay = GraphReplay(self._forward, rows_max)

    @property
    def padding_rows(self) -> int:
        return self.replay.padding_rows

    @torch.inference_mode()
    def launch(self, rows: Sequence[DecodeRow], copies: BlockCopies) -> None:
        assert len(self._under_way) < DEPTH
        for source, target in copies:
            self._pool[target].copy_(self._pool[source])
        shape = self._input.fill(rows)
        for join in shape.joins:
            self._join(join)
        self.replay.run(shape.rows)
        logits = self._without_forbidden(self._logits[: shape.rows], rows)
        self._under_way.append(self._draw(logits, shape, tuple(row.state for row in rows)))

    def _without_forbidden(self, logits: torch.Tensor, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """Mask the forbidden tokens of each row. The states know the latest tokens, because `run_ahead` collects before it
        launches such rows."""
        forbidding = [index for index, row in enumerate(rows) if row.state.forbids]
        if not forbidding:
            return logits
        forbidden = torch.stack([rows[index].state.forbidden() for index in forbidding])
        at, forbidden = (upload(one, logits.device) for one in (torch.tensor(forbidding), forbidden))
        return logits.index_add(0, at, forbidden)

    def collect(self) -> list[Sampled | None]:
        step = self._under_way.popleft()
        if step.done is not None:
            step.done.synchronize()
        tokens, finite = step.tokens.tolist()
        logprobs = [None] * len(tokens) if step.logprobs is None else step.logprobs.tolist()
        results: list[Sampled | None] = []
        for state, token, is_finite, line in zip(step.states, tokens, finite, logprobs, strict=True):
            if not is_finite:
                results.append(None)
                continue
            state.accept(token)
            results.append(Sampled(token, as_logprobs(line, state.sampling.logprobs)))
        return results

    def abandon(self) -> None:
        self._under_way.clear()
        self._input.forget()
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)

    def _join(self, join: Join) -> None:
        self._tables[join.slot, : join.blocks].copy_(self._input.buffer[join.first : join.first + join.blocks])
        self._drawn[join.slot].fill_(join.token)
        if join.state.has_penalties:
            if self._adjustments is None:
                self._adjustments = Adjustments(self._input.slots, self._vocab_size, self._pool.device)
            self._adjustments.join(join.slot, join.state)

    def _forward(self, rows: int) -> None:
        """Compute the logits of the step in the buffers. CUDA graphs capture this function."""
        slot, position, block = (
            self._input.integers(field, rows) for field in (Field.SLOT, Field.POSITION, Field.BLOCK)
        )
        self._tables.index_put_((slot, position // self._block_size), block.int())
        kv_slots = block * self._slots_per_block + position % self._block_size
        batch = ForwardBatch(
            token_ids=self._drawn[slot],
            positions=position,
            slots=torch.where(slot < self._input.slots, kv_slots, NO_SLOT),
            row_starts=torch.arange(rows + 1, dtype=torch.int32, device=slot.device),
            lengths=(position + 1).int(),
            tables=self._tables[slot],
            wanted=position,  # of no meaning here: all rows are
            counts=(1,) * rows,
            blocks=(self._blocks_max,) * rows,
        )
        self._decoder.forward(batch, self._logits[:rows])

    def _draw(self, logits: torch.Tensor, shape: StepShape, states: tuple[SamplerState, ...]) -> _Step:
        finite, tokens = likeliest(logits)
        adjusted = None
        if shape.adjusted:
            assert self._adjustments is not None
            rows, adjusted = (
                self._input.integers(field, shape.adjusted) for field in (Field.ADJUSTED_ROW, Field.ADJUSTED_SLOT)
            )
            logits = self._adjustments.apply(logits, rows, adjusted)
            tokens = logits.argmax(dim=-1)
        if shape.samples:
            tokens = draw_rows(logits, self._parameters(shape.rows), shape.filters)
        if adjusted is not None and self._adjustments is not None:
            self._adjustments.accept(adjusted, tokens[rows])
        self._drawn.index_copy_(0, self._input.integers(Field.SLOT, shape.rows), tokens)
        logprobs = (
            None
            if shape.logprobs < 0
            else self._to_host(top_logprobs(logits, tokens, min(shape.logprobs, self._vocab_size)))
        )
        on_host = self._to_host(torch.stack((tokens, finite.long())))
        done = None
        if self._pool.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _Step(states, on_host, logprobs, done)

    def _parameters(self, rows: int) -> DrawParameters:
        fractions = (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P, Field.UNIFORM)
        temperature, top_p, min_p, uniform = (self._input.fractions(field, rows) for field in fractions)
        return DrawParameters(temperature, self._input.integers(Field.TOP_K, rows), top_p, min_p, uniform)

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        if values.device.type != "cuda":
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
