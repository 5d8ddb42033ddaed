"""The work of a decode step on the engine thread: copies on write, one forward pass, one draw for each sequence."""

import time
from dataclasses import dataclass, field
from typing import Any

from decode_worker.batch import Draw, StepPlan
from decode_worker.suffixes import Slice
from engine.engine import Engine, SeqChunk
from engine.pipeline import DecodePipeline, DecodeRow
from engine.sampling.first_tokens import ComputedPrompt, draw_first_tokens
from engine.sampling.sampler import Sampled, SamplerState, sample
from proto.messages import TokenItem


@dataclass(frozen=True)
class DecodeStepResult:
    drawn: list[Draw] | None  # by the oldest step in flight; None: too early to wait for it
    step_ms: float
    first_tokens: list[TokenItem] | None = field(default_factory=list)
    """The first tokens of the prompt that a slice has completed, one per choice; None if none could be drawn."""


def run_step(
    engine: Engine, plan: StepPlan[SamplerState] | None, part: Slice[SamplerState] | None = None, constraint: Any = None
) -> DecodeStepResult:
    """One forward pass for the streams of `plan` and a slice of a prompt; at least one of the two. `constraint`: of the
    slice's grammar."""
    started, rows = time.perf_counter(), plan.rows if plan is not None else ()
    for source, target in plan.copies if plan is not None else ():
        engine.copy_block(source, target)
    chunks = [SeqChunk((row.token,), row.position, row.table, True) for row in rows]
    if part is not None:
        chunks.append(SeqChunk(part.tokens, part.start, part.suffix.blocks, part.is_last))
    logits = engine.forward(chunks)
    states = [row.running.state for row in rows]
    sampled = sample(logits[: len(rows)], states) if rows else []
    for state, token in zip(states, sampled, strict=True):
        if token is not None:
            state.accept(token.token)
    first: list[TokenItem] | None = []
    if part is not None and part.is_last:
        prompt = ComputedPrompt(part.suffix.order, part.suffix.tokens, part.suffix.cached_tokens, constraint)
        [first] = draw_first_tokens([prompt], logits[len(rows) :])
    if part is not None:
        engine.finish()
    return DecodeStepResult(
        _draws(sampled) if plan is not None else None, (time.perf_counter() - started) * 1000, first
    )


def run_ahead(
    engine: Engine, pipeline: DecodePipeline, plan: StepPlan[SamplerState] | None, collects: bool
) -> DecodeStepResult:
    """Starts the planned step, if any, then waits for the step before it, if `collects`. If a draw depends on the earlier
    step's tokens, waits for that step first."""
    started = time.perf_counter()
    try:
        drawn = None
        if collects and plan is not None and any(row.running.state.forbids for row in plan.rows):
            drawn, collects = _draws(pipeline.collect()), False
        if plan is not None:
            rows = [
                DecodeRow(row.running, row.token, row.position, row.table, row.running.state, row.index)
                for row in plan.rows
            ]
            pipeline.launch(rows, plan.copies)
            engine.tokens_forwarded += len(rows)
        if collects:
            drawn = _draws(pipeline.collect())
    except BaseException:
        pipeline.abandon()
        raise
    return DecodeStepResult(drawn, (time.perf_counter() - started) * 1000)


def _draws(sampled: list[Sampled | None]) -> list[Draw]:
    return [None if token is None else (token.token, token.logprobs) for token in sampled]
