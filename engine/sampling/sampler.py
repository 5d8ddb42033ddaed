"""Draws tokens from logits. Per row, in vLLM's order: penalties and bias → log-probabilities are taken → temperature → min_p →
top_k → top_p → draw.

The random number of a draw is a function of (seed, choice, token index) alone: Philox4x64 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") with the first two as key and the index as counter. So it depends neither on the batch nor on
what was drawn before, and a resumed stream draws what it would have drawn. The inverse of the cumulative distribution is
taken in order of token ids, not of probability: rounding that swaps two near-equal tokens then does not change the draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.sampling import Sampling, TokenLogprobs

FloatArray = npt.NDArray[np.float64]
_LOWEST_LOGPROB = -9999.0
"""Stands for log 0, which JSON cannot say; vLLM reports the same."""


@dataclass(frozen=True)
class Sampled:
    """A drawn token; its log-probabilities when they were asked for."""

    token: int
    logprobs: TokenLogprobs | None


class SamplerState:
    """What one choice's next draw depends on besides the logits: its parameters and the tokens so far."""

    def __init__(
        self,
        sampling: Sampling,
        choice: int,
        vocab_size: int,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int] = (),
        start_index: int | None = None,
    ) -> None:
        """`prompt_tokens` is read only when `repetition_penalty` is not 1; `output_tokens` are those of a resumed stream.

        Where no penalty needs those, `start_index` can stand for their number.
        """
        self.sampling = sampling
        self.choice = choice
        self.index = len(output_tokens) if start_index is None else start_index
        """Output tokens so far, which is also the index of the next one."""
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
        self.adjusts = bool(bias) or self._seen is not None or self._counts is not None
        """Whether penalties or a bias change the logits."""

    def accept(self, token: int) -> None:
        """Counts `token` as the next output token."""
        self.index += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def apply_penalties(self, row: torch.Tensor) -> torch.Tensor:
        """Logits [vocab] after penalties and bias; a new tensor when anything changes."""
        if not self.adjusts:
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

    def uniform(self) -> float:
        """The random number of the next draw, in [0, 1)."""
        generator = np.random.Philox(key=[self.sampling.seed, self.choice], counter=[0, self.index, 0, 0])
        return float(int(generator.random_raw()) >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled | None]:
    """One token for each row of `logits` [rows, vocab]; does not call `accept`.

    None for a row without a finite maximum, where NaN or infinity came out of the model: that is one sequence's misfortune,
    and no reason to fail those beside it.
    """
    assert logits.shape[0] == len(states), (logits.shape, len(states))
    if not states:
        return []
    highest, likeliest = logits.max(dim=-1)
    finite, greedy = torch.isfinite(highest).tolist(), likeliest.tolist()
    results: list[Sampled | None] = []
    for row, state in enumerate(states):
        sampling = state.sampling
        if not finite[row]:
            results.append(None)
            continue
        if sampling.temperature == 0.0 and not state.adjusts and sampling.logprobs < 0:
            results.append(Sampled(greedy[row], None))
            continue
        apply_penalties = state.apply_penalties(logits[row].cpu())
        token = int(apply_penalties.argmax()) if sampling.temperature == 0.0 else _draw(apply_penalties, state)
        results.append(Sampled(token, _logprobs(apply_penalties, token, sampling.logprobs)))
    return results


def _draw(row: torch.Tensor, state: SamplerState) -> int:
    """A token by the inverse of the cumulative distribution, in float64, over the tokens that truncation leaves."""
    cumulative = np.cumsum(_truncated(row, state.sampling))
    # The first token whose sum is above the target; it has weight, since the sum grows there.
    at = int(np.searchsorted(cumulative, state.uniform() * cumulative[-1], side="right"))
    if at == len(cumulative):  # u * total rounded up to the total: the last token with weight
        at = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return at


def _truncated(row: torch.Tensor, sampling: Sampling) -> FloatArray:
    """Weights [vocab] (not normalised, the largest is 1) after temperature, min_p, top_k and top_p; 0 where a token is out.

    Each truncation is a threshold, so tokens of equal weight stay or go together.
    """
    logits = row.double().numpy()
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    weights: FloatArray = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p] = 0.0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1.0:
        ordered = np.sort(weights[weights > 0.0])[::-1]
        cumulative = np.cumsum(ordered)
        last = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left"))
        weights[weights < ordered[last]] = 0.0
    return weights


def _logprobs(row: torch.Tensor, token: int, top: int) -> TokenLogprobs | None:
    """Of the drawn token, and of the `top` likeliest, best first; None when `top` is negative."""
    if top < 0:
        return None
    normaliser = torch.logsumexp(row, 0)
    own = max(float(row[token] - normaliser), _LOWEST_LOGPROB)
    values, ids = torch.topk(row, min(top, len(row)))
    pairs = zip(ids.tolist(), (values - normaliser).tolist(), strict=True)
    return TokenLogprobs(own, tuple((token_id, max(value, _LOWEST_LOGPROB)) for token_id, value in pairs))
