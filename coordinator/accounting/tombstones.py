"""A table whose entries are kept for a time, up to a number of them. Pure.

Entries lie in slices by when they were put in, and a slice is dropped as a whole, so that nothing is kept per entry but the
entry itself. A slice is a sixteenth of the time and of the number: small enough that growing its table does not take long.
"""

from collections import deque
from typing import Generic, TypeVar

V = TypeVar("V")

SLICES = 16


class Remembered(Generic[V]):
    """Keeps each entry for `keep_s` seconds after it was last put in. A later `put` drops expired entries."""

    def __init__(self, keep_s: float, most: int) -> None:
        self.keep_s = keep_s
        self.most = most
        self.dropped_early = 0  # entries that `most` pushed out before their time
        self._slices: deque[tuple[float, dict[str, V]]] = deque()
        """The time at which each slice was begun, and its entries; oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: str) -> bool:
        return any(key in entries for _, entries in self._slices)

    def get(self, key: str) -> V | None:
        """The value that was put in last under this key."""
        for _, entries in reversed(self._slices):
            found = entries.get(key)
            if found is not None:
                return found
        return None

    def put(self, key: str, value: V, now: float) -> None:
        slices, span_s = self._slices, self.keep_s / SLICES
        while slices and slices[0][0] + self.keep_s + span_s <= now:
            self._count -= len(slices.popleft()[1])
        if not slices or slices[-1][0] + span_s <= now or len(slices[-1][1]) * SLICES >= self.most:
            slices.append((now, {}))
        entries = slices[-1][1]
        self._count += key not in entries
        entries[key] = value
        while self._count > self.most:
            dropped = len(slices.popleft()[1])
            self._count -= dropped
            self.dropped_early += dropped
