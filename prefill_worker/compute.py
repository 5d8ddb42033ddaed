"""The work of a prefill step on the engine thread: one forward pass, and the first tokens of prompts it completes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from engine.engine import Engine, SeqChunk
from engine.sampling.first_tokens import ComputedPrompt, draw_first_tokens
from engine.sampling.prompt_logprobs import PromptScorer
from prefill_worker.core import PrefillStepResult
from prefill_worker.prompts import Key, PrefillRequest
from proto.limits import MAX_PROMPT_LOGPROBS
from proto.messages import Chunk, TokenItem
from proto.progress import PromptLogprobs


def run_step(
    engine: Engine, work: Sequence[tuple[PrefillRequest, Chunk]], on_final: Callable[[list[int]], None]
) -> PrefillStepResult:
    """Run one step. `on_final` is called with the blocks that are now full, or that end a complete prompt."""
    started = time.perf_counter()
    scorers = {
        prompt.key: PromptScorer(
            prompt.tokens[: len(prompt.tokens) - prompt.order.resumed_tokens],
            chunk.start,
            prompt.order.sampling.prompt_logprobs,
        )
        for prompt, chunk in work
        if prompt.order.sampling.prompt_logprobs >= 0
    }
    completing = [prompt for prompt, chunk in work if chunk.start + chunk.length == prompt.order.prompt_tokens]
    logits = engine.forward(
        [
            SeqChunk(
                tokens=prompt.tokens[chunk.start : chunk.start + chunk.length],
                start=chunk.start,
                blocks=prompt.blocks,
                wants_logits=chunk.start + chunk.length == prompt.order.prompt_tokens,
                on_logits=scorers.get(prompt.key),
            )
            for prompt, chunk in work
        ]
    )
    ready, undrawn = [], {}
    for row, prompt in enumerate(completing):
        if prompt.can_be_drawn:
            ready.append((prompt, row))
        else:
            undrawn[prompt.key] = logits[row : row + 1].clone()
    first, broken = _draw([prompt for prompt, _ in ready], logits[[row for _, row in ready]])
    engine.finish()  # a step that completes no prompt draws nothing, and so has not waited for its KV yet
    for prompt, chunk in work:
        on_final(final_blocks(prompt, chunk, engine.info.block_size))
    scores = {key: score_messages(key, scorer) for key, scorer in scorers.items()}
    return PrefillStepResult((time.perf_counter() - started) * 1000, first, broken, undrawn, scores)


def draw_late(prompts: Sequence[PrefillRequest]) -> PrefillStepResult:
    """The first tokens of prompts whose grammar was compiled after their last chunk was computed."""
    started = time.perf_counter()
    first, broken = _draw(prompts, torch.cat([prompt.logits for prompt in prompts]))
    return PrefillStepResult((time.perf_counter() - started) * 1000, first, broken)


def _draw(prompts: Sequence[PrefillRequest], logits: torch.Tensor) -> tuple[dict[Key, list[TokenItem]], frozenset[Key]]:
    """A first token for each choice of prompts with `logits` [prompts, vocab], and prompts where none could be drawn."""
    computed = [ComputedPrompt(p.order, p.tokens, p.cached_tokens, p.constraint) for p in prompts]
    drawn = zip(prompts, draw_first_tokens(computed, logits), strict=True)
    first = {prompt.key: items for prompt, items in drawn}
    broken = frozenset(key for key, items in first.items() if items is None)
    return {key: items or [] for key, items in first.items()}, broken


def score_messages(key: tuple[str, int], scorer: PromptScorer) -> list[PromptLogprobs]:
    """Scores of the prompt tokens behind those of one chunk."""
    return [
        PromptLogprobs(
            *key,
            rows.start,
            rows.top_ids.shape[1],
            *map(_packed, (rows.logprobs, rows.ranks, rows.top_ids, rows.top_logprobs)),
        )
        for rows in scorer.joined(MAX_PROMPT_LOGPROBS)
    ]


def final_blocks(prompt: PrefillRequest, chunk: Chunk, block_size: int) -> list[int]:
    """Returns the prompt's blocks that this chunk was the last to write to."""
    end = chunk.start + chunk.length
    is_last = end == prompt.order.prompt_tokens
    return prompt.blocks[chunk.start // block_size : len(prompt.blocks) if is_last else end // block_size]


def _packed(numbers: npt.NDArray[Any]) -> bytes:
    """Little-endian."""
    return numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
