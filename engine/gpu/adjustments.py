"""Penalties and biases of running sequences, on the device: what `SamplerState.apply_penalties` does for one row on a CPU."""

import torch

from engine.attention.forward_batch import upload
from engine.sampling.sampler import SamplerState


class Adjustments:
    """The terms that change the logits of each slot's sequence. Created when the first sequence needs it, because it takes 86
    MB for a vocabulary of 150,000 and 64 slots."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(slots, vocab_size, device=device)
        self._bias = torch.zeros(slots, vocab_size, device=device)
        self._penalties = torch.zeros(slots, 3, device=device)  # repetition, frequency, presence

    def join(self, slot: int, state: SamplerState) -> None:
        sampling = state.sampling
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._put(self._penalties[slot], torch.tensor(penalties))
        for target, found in zip((self._seen, self._counts, self._bias), state.adjustments(), strict=True):
            if found is None:
                target[slot].zero_()
            else:
                self._put(target[slot], found)

    def _put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        target.copy_(upload(values, target.device))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [all rows, vocab] in which these rows are changed; a new tensor."""
        values = logits[rows]
        repetition, frequency, presence = self._penalties[slots].unsqueeze(-1).unbind(1)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self._seen[slots], repeated, values)
        counts = self._counts[slots]
        values = values - frequency * counts - presence * (counts > 0) + self._bias[slots]
        return logits.index_copy(0, rows, values)

    def accept(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts the tokens [slots] that were drawn."""
        self._seen.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.bool))
        self._counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.float32), accumulate=True)
