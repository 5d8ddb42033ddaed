"""Log-probabilities of a prompt's own tokens: what the model, at each of its tokens, gave to the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class PromptRows:
    """Log probabilities of consecutive tokens of a prompt: float32 and int32 arrays [rows] or [rows, top]."""

    start: int  # position of the first in the prompt, from 1
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass
class PromptScorer:
    """Takes the logits of one chunk, some rows at a time, and keeps a few numbers of each."""

    prompt: Sequence[int]
    start: int  # position of the chunk's first token
    top: int
    found: list[PromptRows] = field(default_factory=list)

    def __call__(self, first: int, logits: torch.Tensor) -> None:
        """`logits` [rows, vocab] float32 of the chunk's tokens from number `first` on."""
        position = self.start + first + 1
        targets = torch.tensor(self.prompt[position : position + len(logits)], dtype=torch.int64, device=logits.device)
        if not len(targets):
            return
        rows = logits[: len(targets)]
        normaliser = torch.logsumexp(rows, dim=-1, keepdim=True)
        own = rows.gather(1, targets[:, None])
        values, ids = torch.topk(rows, min(self.top, rows.shape[1]), dim=-1)
        self.found.append(
            PromptRows(
                position,
                (own - normaliser)[:, 0].cpu().numpy(),
                ((rows > own).sum(dim=-1, dtype=torch.int32) + 1).cpu().numpy(),
                ids.to(torch.int32).cpu().numpy(),
                (values - normaliser).cpu().numpy(),
            )
        )

    def joined(self, rows_max: int) -> list[PromptRows]:
        """All of it, in pieces of at most so many rows."""
        if not self.found:
            return []
        names = ("logprobs", "ranks", "top_ids", "top_logprobs")
        arrays = {name: np.concatenate([getattr(rows, name) for rows in self.found]) for name in names}
        first = self.found[0].start
        return [
            PromptRows(first + at, *(array[at : at + rows_max] for array in arrays.values()))
            for at in range(0, len(arrays["ranks"]), rows_max)
        ]
