"""Gaps between tokens as a weighted histogram: a span of steps is one entry, however many tokens it has."""

from math import log

import numpy as np
import numpy.typing as npt

_LEAST_S = 1e-5
_PER_E = 50.0  # bins for each factor of e: each is 2 % wide
_BINS = 900


class Gaps:
    def __init__(self) -> None:
        self._counts = [0.0] * _BINS

    def add(self, gap_s: float, count: float) -> None:
        at = int(log(gap_s / _LEAST_S) * _PER_E) if gap_s > _LEAST_S else 0
        self._counts[at if at < _BINS else _BINS - 1] += count

    def percentiles_ms(self, shares: tuple[float, ...]) -> list[float]:
        """NaN where there was no gap."""
        counts: npt.NDArray[np.float64] = np.maximum(np.array(self._counts), 0.0)
        total = counts.sum()
        if total <= 0:
            return [float("nan")] * len(shares)
        places = np.searchsorted(np.cumsum(counts), np.array(shares) * total)
        return [1000 * _LEAST_S * float(np.exp((place + 0.5) / _PER_E)) for place in np.minimum(places, _BINS - 1)]
