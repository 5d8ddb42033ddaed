"""Workers in the order of a key that changes: the first few are found without looking at the others. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, float, int]
"""Two measures and the worker's epoch, which makes it unique."""


class Ordered:
    """A sorted list. To insert moves the pointers behind: for some thousand workers that is less than a look at one of them."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._rows: list[Key] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._keys

    def __iter__(self) -> Iterator[int]:
        """Epochs, least key first. Not to be changed meanwhile."""
        return (row[2] for row in self._rows)

    def put(self, epoch: int, first: float, second: float) -> None:
        """Add a worker, or give it another key."""
        key, before = (first, second, epoch), self._keys.get(epoch)
        if before == key:
            return
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]
        self._keys[epoch] = key
        insort(self._rows, key)

    def drop(self, epoch: int) -> None:
        before = self._keys.pop(epoch, None)
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]
