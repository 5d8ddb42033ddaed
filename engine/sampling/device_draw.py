"""Draws one token for each row of logits on their device, with no value read on the host: what `draw` does row by row on a CPU.

The steps and their order are those of `sampler` and `draw`, and so are the numbers, up to the rounding of sums in float64. The
thresholds of top_k and top_p are found bit by bit, without sorting a vocabulary: floats are ordered as integers are, and how
many logits, or how much weight, lies at or above a number can be summed at once.
"""

from dataclasses import dataclass
from typing import Final

import torch

_SIGN: Final = -(1 << 31)


@dataclass(frozen=True)
class DrawParameters:
    """[rows] each, on the device of the logits."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor  # float64


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether the largest logit of each row is finite, where it is first)."""
    highest, tokens = logits.max(dim=-1)
    return torch.isfinite(highest), tokens


def draw_rows(logits: torch.Tensor, parameters: DrawParameters, filters: bool) -> torch.Tensor:
    """Tokens [rows] of logits [rows, vocab] float32. Rows of temperature 0 get their largest logit. `filters`: whether any row
    has a top_k, top_p or min_p."""
    highest, greedy = logits.max(dim=-1, keepdim=True)
    is_greedy = (parameters.temperature == 0.0)[:, None]
    temperature = torch.where(is_greedy, 1.0, parameters.temperature[:, None])
    weights = torch.exp((logits.double() - highest.double()) / temperature)
    if filters:
        weights = torch.where(ordered(logits) >= _threshold(logits, weights, parameters)[:, None], weights, 0.0)
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:].contiguous()
    at = torch.searchsorted(sums, parameters.uniform[:, None] * total, right=True)
    last = torch.searchsorted(sums, total)  # where uniform * total was rounded up to the total
    # A penalty can take a huge logit beyond float32. Whatever the logits are, the token is in the vocabulary.
    is_sure = is_greedy | torch.isfinite(highest).logical_not()
    return torch.where(is_sure, greedy, torch.minimum(at, last))[:, 0]


def ordered(logits: torch.Tensor) -> torch.Tensor:
    """int32 numbers in the order of the float32 ones."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _threshold(logits: torch.Tensor, weights: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """The smallest logit of each row that stays, as `ordered` has it. First min_p, then top_k, then top_p."""
    keys = ordered(logits)
    weights = torch.where(weights >= parameters.min_p[:, None], weights, 0.0)
    stays = weights > 0.0
    top_k = torch.where(parameters.top_k > 0, parameters.top_k, keys.shape[1]).clamp(max=keys.shape[1])
    least = _largest(keys, stays.double(), torch.minimum(top_k, stays.sum(-1)).double())
    weights = torch.where(keys >= least[:, None], weights, 0.0)
    nucleus = _largest(keys, weights, parameters.top_p * weights.sum(-1))
    return torch.where(parameters.top_p < 1.0, nucleus, least)


def _largest(keys: torch.Tensor, amounts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest number for each row such that the amounts of keys at or above it are together at least `wanted`."""
    # From the highest bit on: a bit is set if what is left above is still enough. The sign comes first, and is turned over.
    found = torch.full_like(wanted, _SIGN, dtype=torch.int64)
    for bit in range(31, -1, -1):
        candidate = found + (1 << bit)
        above = torch.where(keys >= candidate[:, None], amounts, 0.0).sum(-1)
        found = torch.where(above >= wanted, candidate, found)
    return found


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Log probabilities of each row: [token's log-probability, `top` largest ones, their token ids], as float64 [rows, 1 + 2
    * top]."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    values, ids = torch.topk(logits, top, dim=-1)
    own = logits.gather(1, tokens[:, None])
    return torch.cat((own - normaliser, values - normaliser, ids.double()), dim=-1)
