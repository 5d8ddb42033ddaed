"""Draws tokens from logits. Per row: the grammar's mask → tokens that may not come, penalties and bias →
log-probabilities are taken → temperature → min_p → top_k → top_p → draw. A row pays only for what it asks for: a greedy one
without adjustments is an argmax.

The random number of a draw is a function of (seed, choice, token index) alone: Philox4x64 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") with the first two as key and the index as counter. So it depends neither on the batch nor on
what was drawn before, and a resumed stream draws what it would have drawn. The inverse of the cumulative distribution is
taken in order of token ids, not of probability: rounding that swaps two near-equal tokens then does not change the draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.sampling.device_draw import top_logprobs
from engine.sampling.draw import Logits, Weights, draw
from engine.sampling.output_limits import OutputLimits
from proto.sampling import Sampling, TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # stands for log 0, which JSON cannot say; vLLM reports the same


@dataclass(frozen=True)
class Sampled:
    """A drawn token; its log-probabilities when they were asked for."""

    token: int
    logprobs: TokenLogprobs | None


class Constraint(Protocol):
    """Where a choice stands in its grammar; `runtime.grammar.compiler.Matcher` is the real one."""

    def mask(self, row: Logits) -> Logits: ...
    def accept(self, token: int) -> None: ...


class SamplerState:
    """The state on which one choice's next draw depends besides the logits: its parameters and the tokens so far."""

    def __init__(
        self,
        sampling: Sampling,
        choice: int,
        vocab_size: int,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int] = (),
        start_index: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """`prompt_tokens` is read only when `repetition_penalty` is not 1; `output_tokens` are those of a resumed stream.

        Where no penalty needs those, `start_index` can stand for their number. `constraint` has taken them in already.
        """
        assert (constraint is not None) == bool(sampling.grammar)
        self.sampling = sampling
        self.constraint = constraint
        self.choice = choice
        self._vocab_size = vocab_size
        self.index = len(output_tokens) if start_index is None else start_index
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[list(prompt_tokens) + list(output_tokens)] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.bincount(
                torch.tensor(list(output_tokens), dtype=torch.int64), minlength=vocab_size
            ).float()
        bias = [(token, value) for token, value in sampling.logit_bias if token < vocab_size]
        self._bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in bias])
        self._limits = OutputLimits(sampling, vocab_size, output_tokens)
        self._changes = bool(bias) or self._seen is not None or self._counts is not None

    @property
    def has_penalties(self) -> bool:
        """Whether penalties or a bias change the logits of its draws."""
        return self._changes

    @property
    def forbids(self) -> bool:
        """Whether there may be tokens that must not be drawn next. The last token decides which ones they are."""
        return self.constraint is not None or self._limits.apply_at(self.index)

    def forbidden(self) -> torch.Tensor:
        """[vocab] on the CPU, to be added to logits: minus infinity for the tokens that must not be drawn next."""
        return self._limits.mask(self.in_form(torch.zeros(self._vocab_size)), self.index)

    def in_form(self, row: torch.Tensor) -> torch.Tensor:
        """Logits [vocab] on the CPU, minus infinity where a token does not continue the grammar."""
        return row if self.constraint is None else torch.from_numpy(self.constraint.mask(row.numpy()))

    @property
    def adjusts(self) -> bool:
        """Whether penalties, a bias or a token that may not come change the logits of the next draw."""
        return self._changes or self._limits.apply_at(self.index)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is that of the largest logit, and nothing else is asked for."""
        plain = not self.adjusts and self.constraint is None
        return self.sampling.temperature == 0.0 and plain and self.sampling.logprobs < 0

    def accept(self, token: int) -> None:
        """Counts `token` as the next output token."""
        self.index += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        self._limits.accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def apply_penalties(self, row: torch.Tensor) -> torch.Tensor:
        """Logits [vocab] after limits, penalties and bias; a new tensor when anything changes."""
        row = self._limits.mask(row, self.index)
        if not self._changes:
            return row
        sampling = self.sampling
        if self._seen is not None:
            penalty = sampling.repetition_penalty
            row = torch.where(self._seen, torch.where(row > 0, row / penalty, row * penalty), row)
        if self._counts is not None:
            row = row - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)
        if len(self._bias):
            row = row.index_add(0, self._bias_ids, self._bias)
        return row

    def adjustments(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """[vocab] each, on the CPU: the tokens seen, the counts of output tokens, the bias; None where nothing asks for it."""
        bias = None
        if len(self._bias):
            bias = torch.zeros(self._vocab_size).index_add_(0, self._bias_ids, self._bias)
        return self._seen, self._counts, bias

    def uniform(self) -> float:
        """The random number of the next draw, in [0, 1)."""
        generator = np.random.Philox(key=[self.sampling.seed, self.choice], counter=[0, self.index, 0, 0])
        return float(int(generator.random_raw()) >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled | None]:
    """One token for each row of `logits` [rows, vocab] float32; does not call `accept`.

    Returns None for a row without a finite maximum, because the model produced NaN or infinity, and for a row whose grammar
    allows no token. Such a row does not fail the other sequences.
    """
    assert logits.shape[0] == len(states), (logits.shape, len(states))
    if not states:
        return []
    finite, likeliest = _likeliest(logits)
    results = [Sampled(token, None) if ok else None for token, ok in zip(likeliest, finite, strict=True)]
    others = [row for row, state in enumerate(states) if finite[row] and not state.is_plain_greedy]
    if not others:
        return results
    # Row after row: a row's weights fit into the cache of a core, a batch's do not.
    scratch = np.empty(logits.shape[1])
    on_cpu = [logits[row] for row in others] if logits.device.type == "cpu" else logits[others].cpu().unbind()
    for row, values in zip(others, on_cpu, strict=True):
        results[row] = _sample_row(values, states[row], scratch)
    return results


def _likeliest(logits: torch.Tensor) -> tuple[list[bool], list[int]]:
    """Whether each row's maximum is finite, and where it is first. NaN counts as the maximum."""
    if logits.device.type != "cpu":
        highest, tokens = logits.max(dim=-1)
        return torch.isfinite(highest).tolist(), tokens.tolist()
    rows = logits.numpy()  # whose argmax is ten times as fast as that of torch
    likeliest = [int(row.argmax()) for row in rows]
    return [math.isfinite(row[token]) for row, token in zip(rows, likeliest, strict=True)], likeliest


def _sample_row(row: torch.Tensor, state: SamplerState, scratch: Weights) -> Sampled | None:
    """`row` [vocab] on the CPU, with a finite maximum."""
    sampling = state.sampling
    # The grammar comes first: limits leave a row as it is where nothing would be left of it.
    adjusted = state.apply_penalties(state.in_form(row))
    values = adjusted.numpy()
    token = int(values.argmax())
    highest = float(values[token])
    if highest == -math.inf:
        return None
    if sampling.temperature != 0.0 and math.isfinite(highest):  # a penalty can take a huge logit beyond float32
        token = draw(values, highest, sampling, state.uniform(), scratch)
    return Sampled(token, _logprobs(adjusted, token, sampling.logprobs))


def _logprobs(row: torch.Tensor, token: int, top: int) -> TokenLogprobs | None:
    """Log probabilities of the drawn token, and of the `top` likeliest, best first; None when `top` is negative."""
    if top < 0:
        return None
    top = min(top, len(row))
    line = top_logprobs(row[None], torch.tensor([token], device=row.device), top)
    return as_logprobs(line[0].tolist(), top)


def as_logprobs(line: list[float] | None, top: int) -> TokenLogprobs | None:
    """A row of `top_logprobs`, which may have more than the `top` likeliest; None when `top` is negative."""
    if line is None or top < 0:
        return None
    half = (len(line) - 1) // 2
    values, ids = line[1 : half + 1], line[half + 1 :]
    pairs = zip(ids[:top], values[:top], strict=True)
    return TokenLogprobs(
        max(line[0], _LOWEST_LOGPROB), tuple((int(token_id), max(value, _LOWEST_LOGPROB)) for token_id, value in pairs)
    )
