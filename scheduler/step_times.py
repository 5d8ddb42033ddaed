"""How long the last steps of one role took, for those who predict with a profile of these times.

Some steps of each size are kept, by powers of two: a batch of 64 that ran an hour ago is still known when all batches now have
2. One step of a size is taken in `SPACING_S`, on a time grid that no worker's reports are in step with. So the sample is
spread over workers and at least half a minute, for any number of workers.
"""

from collections import deque
from math import inf

import msgspec

from proto.messages import Role
from proto.status import StepTimes

SIZES = 16  # classes: 1, 2 to 3, 4 to 7 and so on; the last one has all larger sizes, too
KEPT = 32  # steps of each class that are kept
SPACING_S = 1.07


class _Row(msgspec.Struct, frozen=True, gc=False):
    at: float
    steps: int
    size: float
    reads: float
    ms: float


class StepTimeSample:
    def __init__(self) -> None:
        self._rows: list[deque[_Row]] = [deque(maxlen=KEPT) for _ in range(SIZES)]
        self._next_at = [-inf] * SIZES
        self._takes_next = [True] * SIZES

    def add(self, steps: int, size: float, reads: float, ms: float, now: float) -> None:
        """The mean of so many steps. `size` is 1 at least."""
        at = min(int(size).bit_length(), SIZES) - 1
        if self._takes_next[at]:
            self._takes_next[at] = False
            self._rows[at].append(_Row(now, steps, size, reads, ms))
        elif now >= self._next_at[at]:
            # Take the next step instead: a step that is under way at a given moment is more likely a long one.
            self._takes_next[at] = True
            next_at = self._next_at[at] + SPACING_S
            self._next_at[at] = next_at if next_at > now else now + SPACING_S

    def report(self, model: str, role: Role, now: float) -> StepTimes:
        rows = [row for rows in self._rows for row in rows]
        return StepTimes(
            model,
            role,
            tuple(1000 * max(now - row.at, 0.0) for row in rows),
            tuple(row.steps for row in rows),
            tuple(row.size for row in rows),
            tuple(row.reads for row in rows),
            tuple(row.ms for row in rows),
        )
