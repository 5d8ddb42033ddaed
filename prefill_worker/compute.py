"""What a prefill step does on the engine thread: one forward pass, and the first tokens of prompts it completes."""

import time
from collections.abc import Sequence

from engine.engine import Engine, SeqChunk
from engine.finish import finish_reason
from engine.sampler import SamplerState, sample
from prefill_worker.core import StepResult
from prefill_worker.prompts import Prompt
from proto.messages import Chunk, TokenItem


def run_step(engine: Engine, work: Sequence[tuple[Prompt, Chunk]]) -> StepResult:
    started = time.perf_counter()
    completing = [prompt for prompt, chunk in work if chunk.start + chunk.length == prompt.order.prompt_tokens]
    logits = engine.forward(
        [
            SeqChunk(
                tokens=prompt.tokens[chunk.start : chunk.start + chunk.length],
                start=chunk.start,
                blocks=prompt.blocks,
                wants_logits=chunk.start + chunk.length == prompt.order.prompt_tokens,
            )
            for prompt, chunk in work
        ]
    )
    rows: list[int] = []
    states: list[SamplerState] = []
    for row, prompt in enumerate(completing):
        for choice in range(prompt.order.choices):
            rows.append(row)
            states.append(first_state(prompt, choice + prompt.order.first_choice, logits.shape[1]))
    drawn = sample(logits[rows], states) if states else []
    first: dict[tuple[str, int], list[TokenItem]] = {prompt.key: [] for prompt in completing}
    broken: set[tuple[str, int]] = set()
    for row, state, token in zip(rows, states, drawn, strict=True):
        order = completing[row].order
        if token is None:
            broken.add(completing[row].key)
            continue
        first[completing[row].key].append(
            TokenItem(
                order.request_id,
                order.attempt,
                state.choice,
                order.resumed_tokens,
                (token.token,),
                finish_reason(token.token, order.resumed_tokens + 1, order.sampling),
                (token.logprobs,) if token.logprobs else (),
                completing[row].cached_tokens,
            )
        )
    engine.finish()  # a step that completes no prompt draws nothing, and so has not waited for its KV yet
    return StepResult((time.perf_counter() - started) * 1000, first, frozenset(broken))


def first_state(prompt: Prompt, choice: int, vocab_size: int) -> SamplerState:
    """The sampler as it stands before the first token of this attempt: resumed tokens are output, not prompt."""
    split = len(prompt.tokens) - prompt.order.resumed_tokens
    return SamplerState(prompt.order.sampling, choice, vocab_size, prompt.tokens[:split], prompt.tokens[split:])
