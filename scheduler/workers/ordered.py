"""Workers in the order of a key that changes: the first few are found without looking at the others. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, float, int]  # two measures and the worker's incarnation, which makes it unique


class Ordered:
    """A sorted list. An insert moves the pointers after it; for some thousand workers, that costs less than examining one of
    them."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._rows: list[Key] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, incarnation: int) -> bool:
        return incarnation in self._keys

    def __iter__(self) -> Iterator[int]:
        """Iterates over incarnations, least key first. Do not change the list meanwhile."""
        return (row[2] for row in self._rows)

    def put(self, incarnation: int, first: float, second: float) -> None:
        """Add a worker, or give it another key."""
        key, before = (first, second, incarnation), self._keys.get(incarnation)
        if before == key:
            return
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]
        self._keys[incarnation] = key
        insort(self._rows, key)

    def least(self) -> float:
        """The first measure of the first worker; there is one."""
        return self._rows[0][0]

    def drop(self, incarnation: int) -> None:
        before = self._keys.pop(incarnation, None)
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]
