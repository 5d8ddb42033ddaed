"""Chooses the batch and the line to run next. Pure.

Tenants take turns, and each tenant's oldest batch goes first. If a line is refused for now, for example by a quota or a full
queue, its batch waits for the time given in the refusal and then tries one line. Each answer doubles the number of its lines
that may run at once (slow start). So a cluster without capacity gets few requests.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Batch:
    tenant: str
    left: deque[int]  # Numbers of lines that neither run nor have a result
    window: int  # How many may run at once
    running: int = 0
    not_before: float = 0.0


class LineQueue:
    def __init__(self, lines_max: int) -> None:
        """`lines_max`: how many lines run at once, of all batches."""
        self.lines_max = lines_max
        self.running = 0
        self._batches: dict[str, _Batch] = {}
        self._tenants: OrderedDict[str, list[str]] = OrderedDict()  # batches, oldest first; the tenant in turn first

    def __contains__(self, batch_id: str) -> bool:
        return batch_id in self._batches

    def add(self, batch_id: str, tenant: str, lines: Iterable[int]) -> None:
        self._batches[batch_id] = _Batch(tenant, deque(lines), self.lines_max)
        self._tenants.setdefault(tenant, []).append(batch_id)

    def remove(self, batch_id: str) -> None:
        """Remove a batch. None of its lines may still be running."""
        batch = self._batches.pop(batch_id)
        self.running -= batch.running
        self._tenants[batch.tenant].remove(batch_id)
        if not self._tenants[batch.tenant]:
            del self._tenants[batch.tenant]

    def next(self, now: float) -> tuple[str, int] | None:
        """(batch, line) to run now."""
        if self.running >= self.lines_max:
            return None
        for tenant, batch_ids in self._tenants.items():
            for batch_id in batch_ids:
                batch = self._batches[batch_id]
                if batch.left and batch.running < batch.window and batch.not_before <= now:
                    self._tenants.move_to_end(tenant)
                    batch.running += 1
                    self.running += 1
                    return batch_id, batch.left.popleft()
        return None

    def answered(self, batch_id: str) -> None:
        """A line has its result."""
        batch = self._ended(batch_id)
        batch.window = min(2 * batch.window, self.lines_max)

    def put_back(self, batch_id: str, line: int, not_before: float) -> None:
        """A line is to run again, and its batch waits until then."""
        batch = self._ended(batch_id)
        batch.left.appendleft(line)
        batch.window = 1
        batch.not_before = max(batch.not_before, not_before)

    def is_done(self, batch_id: str) -> bool:
        batch = self._batches[batch_id]
        return not batch.left and not batch.running

    def _ended(self, batch_id: str) -> _Batch:
        batch = self._batches[batch_id]
        batch.running -= 1
        self.running -= 1
        return batch
