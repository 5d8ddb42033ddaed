"""Tokens that may not come next: all but those allowed, stop tokens of an answer that is too short, the ends of bad words."""

from collections.abc import Sequence

import torch

from proto.sampling import Sampling


class OutputLimits:
    def __init__(self, sampling: Sampling, vocab_size: int, output_tokens: Sequence[int]) -> None:
        """`output_tokens` are those of a resumed stream."""
        self._min_tokens = sampling.min_tokens
        self._stops = [token for token in sampling.stop_token_ids if token < vocab_size]
        self._bad_words = [word for word in sampling.bad_words if max(word) < vocab_size]
        self._longest = max((len(word) - 1 for word in self._bad_words), default=0)
        self._tail = list(output_tokens[-self._longest :]) if self._longest else []
        self._forbidden: torch.Tensor | None = None
        allowed = [token for token in sampling.allowed_token_ids if token < vocab_size]
        if allowed:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool)
            self._forbidden[allowed] = False

    def accept(self, token: int) -> None:
        if self._longest:
            self._tail = [*self._tail, token][-self._longest :]

    def apply_at(self, index: int) -> bool:
        """Whether they may change the logits of output token number `index`."""
        return bool(self._bad_words) or self._forbidden is not None or (index < self._min_tokens and bool(self._stops))

    def mask(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [vocab] for output token number `index`; a new tensor when anything changes. If no token would be left, the
        row stays unchanged: for example, if the only allowed token is a bad word, or if the grammar allows only the end of the
        answer."""
        if not self.apply_at(index):
            return row
        masked = row.clone()
        if self._forbidden is not None:
            masked[self._forbidden] = -torch.inf
        if index < self._min_tokens:
            masked[self._stops] = -torch.inf
        for *before, last in self._bad_words:
            if not before or self._tail[-len(before) :] == before:
                masked[last] = -torch.inf
        return masked if bool(torch.isfinite(masked).any()) else row
