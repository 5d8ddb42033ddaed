"""What a decode step does on the engine thread: copies on write, one forward pass, one draw for each sequence."""

import time
from dataclasses import dataclass

from decode_worker.batch import Draw, StepPlan
from engine.engine import Engine, SeqChunk
from engine.pipeline import DecodePipeline, DecodeRow
from engine.sampling.sampler import Sampled, SamplerState, sample


@dataclass(frozen=True)
class StepResult:
    drawn: list[Draw] | None
    """Of the oldest step in flight; None where it is too early to wait for it."""
    step_ms: float


def run_step(engine: Engine, plan: StepPlan[SamplerState]) -> StepResult:
    started = time.perf_counter()
    for source, target in plan.copies:
        engine.copy_block(source, target)
    logits = engine.forward([SeqChunk((row.token,), row.position, row.table, True) for row in plan.rows])
    states = [row.running.state for row in plan.rows]
    sampled = sample(logits, states)
    for state, token in zip(states, sampled, strict=True):
        if token is not None:
            state.accept(token.token)
    return StepResult(_draws(sampled), (time.perf_counter() - started) * 1000)


def run_ahead(
    engine: Engine, pipeline: DecodePipeline, plan: StepPlan[SamplerState] | None, collects: bool
) -> StepResult:
    """Starts a step, if there is one, and then waits for the one before it, if that is in flight; first waits where a draw
    depends on its tokens."""
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
    return StepResult(drawn, (time.perf_counter() - started) * 1000)


def _draws(sampled: list[Sampled | None]) -> list[Draw]:
    return [None if token is None else (token.token, token.logprobs) for token in sampled]
