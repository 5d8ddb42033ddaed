"""What a decode step does on the engine thread: copies on write, one forward pass, one draw for each sequence."""

import time
from dataclasses import dataclass

from decode_worker.batch import Draw, StepPlan
from engine.engine import Engine, SeqChunk
from engine.sampling.sampler import SamplerState, sample


@dataclass(frozen=True)
class StepResult:
    drawn: list[Draw]
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
    drawn = [(token.token, token.logprobs) if token is not None else None for token in sampled]
    return StepResult(drawn, (time.perf_counter() - started) * 1000)
