"""A forward pass by vLLM's model runner, for rows that the worker has composed.

vLLM keeps a batch of requests between steps and changes it by what its scheduler says . Here a row of a step
is such a request: rows are named by their place in the step, and before each step their tokens, positions and block tables are
written into the batch directly. Attention metadata, CUDA graphs and the model are vLLM's own. It keeps the logits for
its sampler, which is not called: they are taken from there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from engine.attention.forward_batch import SeqChunk, rows_of_logits
from engine.vllm.ranks import Ranks

_GREEDY = SamplingParams(temperature=0.0)


class VllmRunner:
    def __init__(
        self,
        model_runner: Any,
        blocks: int,
        others: Ranks | None = None,
        *,
        numerics: str = "",
        is_batch_invariant: bool = False,
    ) -> None:
        """`model_runner` is vLLM's own, for a GPU or a CPU, with a pool of `blocks` blocks for one group of layers. `others`
        are the ranks that compute the same rows."""
        self.backend = "vllm"
        self.numerics = numerics
        self.is_batch_invariant = is_batch_invariant
        self._runner = model_runner
        self._others = others
        self._blocks = blocks
        config = model_runner.scheduler_config
        self._tokens_max, self._rows_max = config.max_num_batched_tokens, config.max_num_seqs
        self._context_tokens = model_runner.max_model_len
        self._chunks: Sequence[SeqChunk] = ()
        self._block_size = model_runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        model_runner._update_states = self._write_rows

    def forward(self, chunks: Sequence[SeqChunk]) -> torch.Tensor:
        """Logits [chunks that want them, vocab] float32. Raises ValueError as `forward_batch.pack` does."""
        for chunk in chunks:
            self._check(chunk)
        if self._others is not None:
            self._others.send(chunks)
        wanted: dict[int, torch.Tensor] = {}
        for first, part in self._parts(chunks):
            wanted |= {first + row: logits for row, logits in self._forward_part(part).items()}
        if not wanted:
            return torch.empty(0)
        return torch.stack([wanted[row] for row in sorted(wanted)])

    @contextmanager
    def checked(self, window: int | None, offset: int) -> Iterator[None]:
        """vLLM's models are not compared with others."""
        yield

    def _check(self, chunk: SeqChunk) -> None:
        end = chunk.start + len(chunk.tokens)
        needed = -(-end // self._block_size)
        if not chunk.tokens or chunk.start < 0:
            raise ValueError("a chunk is empty")
        if len(chunk.tokens) > self._tokens_max or end > self._context_tokens:
            raise ValueError(f"a chunk of {len(chunk.tokens)} tokens that ends at {end} is longer than was announced")
        if len(chunk.blocks) < needed:
            raise ValueError(f"{len(chunk.blocks)} blocks do not cover {end} tokens")
        if min(chunk.blocks[:needed]) < 0 or max(chunk.blocks[:needed]) >= self._blocks:
            raise ValueError("a block table names a block that the pool does not have")

    def _parts(self, chunks: Sequence[SeqChunk]) -> Iterator[tuple[int, list[SeqChunk]]]:
        """The chunks in as many passes as vLLM's buffers need: one, unless a step has more tokens or rows than was announced.
        Yields (index of the first chunk, chunks)."""
        first, part, tokens = 0, list[SeqChunk](), 0
        for index, chunk in enumerate(chunks):
            if part and (tokens + len(chunk.tokens) > self._tokens_max or len(part) == self._rows_max):
                yield first, part
                first, part, tokens = index, [], 0
            part.append(chunk)
            tokens += len(chunk.tokens)
        yield first, part

    def _forward_part(self, chunks: Sequence[SeqChunk]) -> dict[int, torch.Tensor]:
        """Logits [vocab] of the chunks that want them, by index."""
        self._chunks = chunks
        counts = {str(row): len(chunk.tokens) for row, chunk in enumerate(chunks)}
        order = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        self._runner.execute_model(order)
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        rows = [int(name) for name in self._runner.input_batch.req_ids]  # vLLM may have put decode rows first
        if any(chunk.on_logits is not None for chunk in chunks):
            self._show_all(chunks, rows, state.hidden_states)
        logits = state.logits.float()
        return {row: logits[place] for place, row in enumerate(rows) if chunks[row].wants_logits}

    def _show_all(self, chunks: Sequence[SeqChunk], rows: Sequence[int], hidden: torch.Tensor) -> None:
        for on_logits, start, row, count in rows_of_logits([chunks[row] for row in rows]):
            on_logits(start, self._runner.model.compute_logits(hidden[row : row + count]).float())

    def _write_rows(self, order: SchedulerOutput) -> None:
        """Put this step's rows into the batch. It takes the place of the method of vLLM's runner that follows its scheduler."""
        runner, batch = self._runner, self._runner.input_batch
        self._set_rows(len(self._chunks))
        table = batch.block_table
        for name, place in batch.req_id_to_index.items():
            chunk = self._chunks[int(name)]
            end = chunk.start + len(chunk.tokens)
            batch.token_ids_cpu[place, chunk.start : end] = chunk.tokens
            batch.num_computed_tokens_cpu[place] = chunk.start
            batch.num_tokens_no_spec[place] = end
            table.add_row((list(chunk.blocks[: -(-end // self._block_size)]),), place)
        runner._may_reorder_batch(order)

    def _set_rows(self, count: int) -> None:
        """Have rows "0" to `count - 1` in the batch."""
        runner, batch = self._runner, self._runner.input_batch
        before = batch.num_reqs
        if before == count:
            return
        for row in range(count, before):
            batch.remove_request(str(row))
            del runner.requests[str(row)]
        for row in range(before, count):
            state = CachedRequestState(
                req_id=str(row), prompt_token_ids=[0], mm_features=[], sampling_params=_GREEDY, generator=None,
                block_ids=([0],), num_computed_tokens=0, output_token_ids=[],
            )  # fmt: skip
            runner.requests[state.req_id] = state
            batch.add_request(state)
        batch.condense()
        batch.refresh_metadata()
