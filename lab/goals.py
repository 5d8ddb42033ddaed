"""Limits for each priority class. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lab.advise import Slo

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Goals:
    default: Slo
    by_class: Mapping[str, Slo] = field(default_factory=dict)

    @property
    def percentile(self) -> float:
        """The share of all requests together that should keep the limits."""
        return self.default.percentile

    def limits(self, classes: Sequence[str]) -> tuple[Floats, Floats]:
        """Returns the limits of the first token and of later ones, for requests of these classes."""
        slos = [self.by_class.get(name, self.default) for name in classes]
        return np.array([slo.ttft_ms for slo in slos]), np.array([slo.tpot_ms for slo in slos])
