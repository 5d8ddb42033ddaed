"""One token from one row of logits: temperature → min_p → top_k → top_p → the inverse of the cumulative distribution.

A draw is defined by sums in float64 that add one weight after another: in order of token ids for the draw, from the largest
weight down for top_p.
"""

import sys
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.sampling import Sampling

Logits = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

_SMALL: Final = 4096  # top_p first leaves out the weights below 1 / _SMALL of what it may leave out all together


def draw(logits: Logits, highest: float, sampling: Sampling, uniform: float, scratch: Weights) -> int:
    """The token for the random number `uniform` in [0, 1).

    `logits` [vocab] have the finite maximum `highest`; `scratch` [vocab] is overwritten.
    """
    # Subtracting the maximum first keeps tiny temperatures from overflowing. The largest weight is 1.
    np.subtract(logits, np.float64(highest), out=scratch, dtype=np.float64)
    if sampling.temperature != 1.0:
        np.divide(scratch, sampling.temperature, out=scratch)
    weights = np.exp(scratch, out=scratch)
    threshold = _threshold(weights, sampling)
    if threshold == 0.0:
        return _invert(weights, uniform)
    # To leave out a token changes no sum compared with adding a weight of 0 for it.
    kept = np.flatnonzero(weights >= threshold)
    return int(kept[_invert(weights[kept], uniform)])


def _threshold(weights: Weights, sampling: Sampling) -> float:
    """The smallest weight that stays; 0 when all do. Tokens of equal weight stay or go together."""
    threshold, left = sampling.min_p, weights
    if threshold > 0.0:
        left = _at_least(left, threshold)
    if 0 < sampling.top_k < len(left):
        threshold = float(np.partition(left, -sampling.top_k)[-sampling.top_k])
        left = _at_least(left, threshold)
    return _nucleus(left, sampling.top_p) if sampling.top_p < 1.0 else threshold


def _nucleus(weights: Weights, top_p: float) -> float:
    """The smallest of the largest weights that together reach `top_p` of the sum.

    Sorting the whole vocabulary takes longer than all other work, so only the larger weights are sorted. The second attempt
    leaves out weights that together are less than `top_p` allows. Then the sums of the larger weights are exact, and only the
    total was summed in another order. Such totals differ by rounding, which has a bound: twice count * eps / 2 of the total
    (Higham 2002, section 4.2). Four times that is taken, which also covers the product with `top_p`. Where the bound leaves it
    open which weight is the answer, all are sorted.
    """
    total = float(weights.sum())
    error = 4.0 * len(weights) * sys.float_info.epsilon * total
    for divisor in (_SMALL, len(weights)):
        larger = _descending(_at_least(weights, (1.0 - top_p) * total / divisor))
        limits = (top_p * total - error, top_p * total + error)
        first, last = np.searchsorted(_running_sums(larger), limits, side="left")
        if last < len(larger) and larger[first] == larger[last]:
            return float(larger[first])
    ordered = _descending(weights)
    sums = _running_sums(ordered)
    return float(ordered[np.searchsorted(sums, top_p * sums[-1], side="left")])


def _invert(weights: Weights, uniform: float) -> int:
    """The first index whose running sum is above `uniform` times the total; it has weight, since the sum grows there."""
    sums = _running_sums(weights)
    at = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    if at == len(sums):  # uniform * total was rounded up to the total: the last index with weight
        at = int(np.searchsorted(sums, sums[-1], side="left"))
    return at


def _at_least(weights: Weights, threshold: float) -> Weights:
    return weights[np.flatnonzero(weights >= threshold)]  # a mask as an index takes up to four times as long


def _descending(weights: Weights) -> Weights:
    return np.sort(weights)[::-1].copy()


def _running_sums(weights: Weights) -> Weights:
    """Equals np.cumsum to the bit, in a sixth of its time."""
    sums: Weights = torch.from_numpy(weights).cumsum(0).numpy()
    return sums
