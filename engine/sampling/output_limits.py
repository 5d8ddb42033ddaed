"""Tokens that may not come next: all but those allowed, stop tokens of an answer that is too short, the ends of bad words."""

from collections.abc import Sequence

import torch

from proto.sampling import Sampling


class OutputLimits:
    def __init__(self, sampling: Sampling, vocab_size: int, output_tokens: Sequence[int]) -> None:
        """`output_tokens` are those of a resumed stream."""
        self._vocab_size = vocab_size
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

    @property
    def needs_output(self) -> bool:
        """Whether they depend on the tokens before."""
        return self._longest > 0

    def forbidden(self, index: int) -> torch.Tensor | None:
        """[vocab], True for tokens that may not be output token number `index`; None: all may."""
        if not self.apply_at(index):
            return None
        found = torch.zeros(self._vocab_size, dtype=torch.bool) if self._forbidden is None else self._forbidden.clone()
        if index < self._min_tokens:
            found[self._stops] = True
        for *before, last in self._bad_words:
            if not before or self._tail[-len(before) :] == before:
                found[last] = True
        return found

    def mask(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [vocab] for output token number `index`; a new tensor when anything changes. Where nothing would be left, as
        when all that is allowed is a bad word, the row stays as it is."""
        forbidden = self.forbidden(index)
        return row if forbidden is None else without(row[None], forbidden[None])[0]


def without(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocab] without the tokens that `forbidden` [rows, vocab] names; rows of which nothing is left stay."""
    masked = logits.masked_fill(forbidden, -torch.inf)
    return torch.where(torch.isfinite(masked).any(dim=-1, keepdim=True), masked, logits)
