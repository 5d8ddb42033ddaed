"""Room in a pair's window. Pure."""

from collections import deque


class WindowRing:
    """A ring of `sub_blocks` sub-blocks. Contiguous ranges of it are taken and given back in the same order."""

    def __init__(self, sub_blocks: int) -> None:
        self._sub_blocks = sub_blocks
        self._held: deque[tuple[int, int]] = deque()  # (first sub-block, sub-blocks), the oldest first

    def take(self, count: int) -> int | None:
        """Take a contiguous range of `count` sub-blocks. Returns its first sub-block, or None if there is no room now."""
        first = self._place(count)
        if first is not None:
            self._held.append((first, count))
        return first

    def give_back(self) -> None:
        """Give back the range that was taken first."""
        self._held.popleft()

    def take_back(self) -> None:
        """Undo the last `take`."""
        self._held.pop()

    def _place(self, count: int) -> int | None:
        assert count > 0
        if not self._held:
            return 0 if count <= self._sub_blocks else None
        oldest, (last, length) = self._held[0][0], self._held[-1]
        end = last + length
        if end <= oldest:  # it has gone round
            return end if end + count <= oldest else None
        if end + count <= self._sub_blocks:
            return end
        return 0 if count <= oldest else None
