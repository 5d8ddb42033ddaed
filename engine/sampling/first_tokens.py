"""The first token of each choice of an answer, drawn from the logits of its prompt's last token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.sampling.finish import finish_reason
from engine.sampling.sampler import SamplerState, sample
from proto.messages import Prefill, TokenItem


class ComputedPrompt(NamedTuple):
    order: Prefill
    tokens: Sequence[int]  # of the prompt; last, those of the answer that an earlier attempt has sent
    cached_tokens: int
    constraint: Any = None


def draw_first_tokens(prompts: Sequence[ComputedPrompt], logits: torch.Tensor) -> list[list[TokenItem] | None]:
    """A token for each choice of each prompt, from `logits` [prompts, vocab]; None where one could not be drawn."""
    rows: list[int] = []
    states: list[SamplerState] = []
    for row, prompt in enumerate(prompts):
        for choice in range(prompt.order.choices):
            rows.append(row)
            states.append(first_state(prompt, choice + prompt.order.first_choice, logits.shape[1]))
    drawn = sample(logits[rows], states) if states else []
    first: list[list[TokenItem] | None] = [[] for _ in prompts]
    for row, state, token in zip(rows, states, drawn, strict=True):
        order, items = prompts[row].order, first[row]
        if token is None or items is None:
            first[row] = None
            continue
        items.append(
            TokenItem(
                order.request_id,
                order.attempt,
                state.choice,
                order.resumed_tokens,
                (token.token,),
                finish_reason(token.token, order.resumed_tokens + 1, order.sampling),
                (token.logprobs,) if token.logprobs else (),
                prompts[row].cached_tokens,
            )
        )
    return first


def first_state(prompt: ComputedPrompt, choice: int, vocab_size: int) -> SamplerState:
    """The sampler as it stands before the first token of this attempt: resumed tokens are output, not prompt."""
    split = len(prompt.tokens) - prompt.order.resumed_tokens
    return SamplerState(
        prompt.order.sampling, choice, vocab_size, prompt.tokens[:split], prompt.tokens[split:],
        constraint=prompt.constraint,
    )  # fmt: skip
