"""Writes on a thread, so that a disk, a terminal or the reader of a pipe that stands still holds up nothing else."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, TypeVar

T = TypeVar("T")
WAITING_BYTES_MAX: Final = 4 << 20  # for one file, pipe or terminal
FLUSH_S: Final = 1.0
FLUSH_ALL_S: Final = 5.0
_LOOK_S: Final = 60.0


class BackgroundWriter(Generic[T]):
    """Writes what is `put`, in its order, with `write(piece)` on a thread of its own. If too much waits, the oldest is dropped
    and counted, so that the last words of a process are kept. `note(lines)` makes the piece that says so in its place."""

    dropped_lines: ClassVar[int] = 0

    def __init__(
        self, write: Callable[[T], object], *, note: Callable[[int], T] | None = None, size: Callable[[Any], int] = len
    ) -> None:
        self._write = write
        self._note = note
        self._size = size
        self._waiting: deque[tuple[T, int]] = deque()  # (piece, lines)
        self._waiting_bytes = 0
        self._left_out = 0  # lines dropped since the last note
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="background-writer", daemon=True).start()

    def put(self, piece: T, lines: int = 1) -> None:
        """Never waits. Used on any thread. `lines` is how many lines of a log the piece has."""
        with self._changed:
            self._waiting.append((piece, lines))
            self._waiting_bytes += self._size(piece)
            while self._waiting_bytes > WAITING_BYTES_MAX:
                dropped = self._take()[1]
                self._left_out += dropped
                BackgroundWriter.dropped_lines += dropped
            self._changed.notify_all()

    def _take(self) -> tuple[T, int]:
        piece, lines = self._waiting.popleft()
        self._waiting_bytes -= self._size(piece)
        return piece, lines

    def flush(self) -> bool:
        """Wait until all is written: at most `FLUSH_S` for a piece, and `FLUSH_ALL_S` for all. Returns whether it is."""
        latest = time.monotonic() + FLUSH_ALL_S
        with self._changed:
            while self._waiting or self._busy:
                if time.monotonic() > latest or not self._changed.wait(FLUSH_S):
                    break
            return not (self._waiting or self._busy)

    def close(self) -> bool:
        """Flushes as `flush` does; afterwards nothing must be put."""
        done = self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._write(piece)
            except (OSError, ValueError):  # a full disk, a closed pipe, or text that the terminal cannot show
                BackgroundWriter.dropped_lines += 1

    def _next(self) -> T | None:
        """Wait for the next piece; None: it is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not (self._waiting or self._closed):
                self._changed.wait(_LOOK_S)
            if not self._waiting:
                return None
            self._busy = True
            left_out, self._left_out = self._left_out, 0
            return self._note(left_out) if left_out and self._note is not None else self._take()[0]
