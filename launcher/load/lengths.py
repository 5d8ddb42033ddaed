"""Arrival times and lengths of a synthetic load, drawn from a generator that is handed in."""

import re
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

TOKENS_MAX = 1 << 20
_FIXED = re.compile(r"(?:fixed:)?(\d{1,7})")
_UNIFORM = re.compile(r"uniform:(\d{1,7})-(\d{1,7})")
_LOGNORMAL = re.compile(r"lognormal:(\d{1,7}(?:\.\d+)?),(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, each at least 1. `first` and `second` depend on the kind: the length; the two ends; or
    the median and the standard deviation of the logarithm."""

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float
    second: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError`."""
        if found := _FIXED.fullmatch(text):
            made = cls("fixed", int(found[1]), 0)
        elif found := _UNIFORM.fullmatch(text):
            made = cls("uniform", int(found[1]), int(found[2]))
        elif found := _LOGNORMAL.fullmatch(text):
            made = cls("lognormal", float(found[1]), float(found[2]))
        else:
            raise ValueError("is not a length like 128, uniform:64-512 or lognormal:200,0.8")
        if made.first < 1 or made.first > TOKENS_MAX or (made.kind == "uniform" and made.second < made.first):
            raise ValueError(f"has a length under 1, over {TOKENS_MAX}, or its ends in the wrong order")
        if made.kind == "lognormal" and made.second > 5:
            raise ValueError("has a sigma over 5")
        return made

    def draw(self, source: np.random.Generator) -> int:
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return int(source.integers(int(self.first), int(self.second) + 1))
        return max(1, min(TOKENS_MAX, round(float(source.lognormal(np.log(self.first), self.second)))))


def arrival_kind(cv: float) -> str:
    """Returns the process whose gaps have this coefficient of variation."""
    return {0.0: "constant", 1.0: "poisson"}.get(cv, "gamma")


def arrival_times(
    kind: str, rate: float, cv: float, duration_s: float, most: int, source: np.random.Generator
) -> list[float]:
    """Returns sorted times in seconds in [0, duration_s): a renewal process whose gaps have mean 1/rate and, for gamma, this
    coefficient of variation."""
    shape = 1 / cv**2 if cv else 0.0
    times: list[float] = []
    at = 0.0
    while len(times) < most:
        if kind == "constant":
            gap = 1 / rate
        elif kind == "gamma":
            gap = float(source.gamma(shape, 1 / (rate * shape)))
        else:
            gap = float(source.exponential(1 / rate))
        at += gap
        if at >= duration_s:
            break
        times.append(at)
    return times
