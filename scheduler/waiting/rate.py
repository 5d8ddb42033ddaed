"""An amount per second, over about the last ten seconds. Pure."""

from math import exp

_TAU_S = 10.0


class Rate:
    """Exponentially weighted, right from the first second on."""

    __slots__ = ("_amount", "_at", "_since")

    def __init__(self, now: float) -> None:
        self._amount, self._at, self._since = 0.0, now, now

    def add(self, amount: float, now: float) -> None:
        self._amount = self._amount * exp((self._at - now) / _TAU_S) + amount
        self._at = now

    def per_s(self, now: float) -> float:
        seen_s = max(now - self._since, 1.0)
        return self._amount * exp((self._at - now) / _TAU_S) / (_TAU_S * (1 - exp(-seen_s / _TAU_S)))
