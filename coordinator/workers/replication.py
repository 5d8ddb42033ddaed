"""When to compute a prefix on one more prefill worker, though another one has it: as in the ski-rental problem. Pure.

A request that waits for the worker with its prefix pays with time. To compute the prefix elsewhere costs once, and later
requests need not wait for it. So what requests have waited for a prefix is added up, and once it comes to the cost of
computing it, the next request computes it where it is. That is never worse than twice the best choice in hindsight (Karlin et
al., 1988). Older waits count less. Where the prefixes that requests wait for are more than half a worker can keep, one more
copy would drive out another prefix, so waits do not count at all.
"""

from collections import OrderedDict
from math import exp
from typing import NamedTuple

_TAU_S = 10.0
_KEPT_S = 2 * _TAU_S
_PREFIXES_MAX = 4096


class _Wait(NamedTuple):
    waited_s: float
    at: float
    tokens: int


class Waits:
    """Seconds that requests have waited lately for a prefix, by its last block."""

    def __init__(self) -> None:
        self._waits: OrderedDict[bytes, _Wait] = OrderedDict()
        """Oldest first."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waits)

    def of(self, prefix: bytes, room_tokens: int, now: float) -> float:
        """`room_tokens`: KV that the worker which may compute it can keep."""
        found = self._waits.get(prefix)
        if found is None or 2 * self._tokens > room_tokens:
            return 0.0
        return found.waited_s * exp((found.at - now) / _TAU_S)

    def add(self, prefix: bytes, tokens: int, seconds: float, now: float) -> None:
        before = self._waits.pop(prefix, _Wait(0.0, now, 0))
        waited_s = before.waited_s * exp((before.at - now) / _TAU_S) + seconds
        self._waits[prefix] = _Wait(waited_s, now, tokens)
        self._tokens += tokens - before.tokens
        oldest = next(iter(self._waits.values()))
        while oldest.at < now - _KEPT_S or len(self._waits) > _PREFIXES_MAX:
            self._tokens -= self._waits.popitem(last=False)[1].tokens
            oldest = next(iter(self._waits.values()))

    def computed(self, prefix: bytes) -> None:
        """It is computed once more, so that waits are counted anew."""
        found = self._waits.get(prefix)
        if found is not None:
            self._waits[prefix] = found._replace(waited_s=0.0)
