"""The choice of the next chunk: the coordinator's fair queue, or where one tenant sends everything, that tenant's queue alone.

If there is one tenant, the rings of the fair queue decide nothing. Only the production `TenantQueue` of each queue key is
left, and the smallest of their first entries is next. `tests/tuning/test_order.py` compares both.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from coordinator.events import Limits
from scheduler.fairness.fair_node import FairNode, Path
from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.tenant_queue import Entry, TenantQueue
from scheduler.limits import ring_weights
from scheduler.waiting.answer_lengths import OutputLength
from tuning.simulator.job import SimulatedRequest


class FairOrder(Protocol):
    def push(self, job: SimulatedRequest, key: int) -> None: ...

    def first(self, keys: Sequence[int]) -> SimulatedRequest | None:
        """The next job under these keys."""

    def take(self, job: SimulatedRequest, keys: Sequence[int], tokens: int, last: bool, key: int) -> None:
        """Charges a chunk of the job that is first under `keys`; the job waits for its next chunk under `key`."""

    def go_on(self, job: SimulatedRequest, tokens: int, last: bool) -> None:
        """Charge one more chunk of a job that has just had one."""

    def move(self, job: SimulatedRequest, key: int) -> None: ...

    def remove(self, job: SimulatedRequest) -> None: ...

    def same_organisation(self, one: SimulatedRequest, other: SimulatedRequest) -> bool: ...

    def has_late(self, keys: Sequence[int]) -> bool: ...

    def ended(self, job: SimulatedRequest, emitted: int) -> None:
        """Replaces the charge for its expected answer by the tokens that were emitted."""


class OneTenant:
    def __init__(self, overtaken_max: int) -> None:
        self._node = FairNode(("one",), 1.0, None, 0)
        self._rows: dict[int, TenantQueue[SimulatedRequest]] = {}
        self._overtaken_max = overtaken_max
        self._joins = 0

    def push(self, job: SimulatedRequest, key: int) -> None:
        self._joins += 1
        queue = self._row(key)
        job.entry = entry = Entry(job, queue, job.due, job.chunks, self._joins)
        queue.join(entry)

    def _row(self, key: int) -> TenantQueue[SimulatedRequest]:
        queue = self._rows.get(key)
        if queue is None:
            queue = self._rows[key] = TenantQueue(self._node, key, self._overtaken_max)
        return queue

    def first(self, keys: Sequence[int]) -> SimulatedRequest | None:
        rows, found = self._rows, None
        for key in keys:
            queue = rows.get(key)
            if queue is not None and queue.size:
                entry = queue.first()
                if found is None:
                    found, order = entry, None
                else:
                    order = order or found.queue.order(found)
                    other = queue.order(entry)
                    if other < order:
                        found, order = entry, other
        return None if found is None else found.item

    def take(self, job: SimulatedRequest, keys: Sequence[int], tokens: int, last: bool, key: int) -> None:
        entry: Entry[SimulatedRequest] = job.entry
        queue = entry.queue
        queue.overtake(entry)
        for other_key in keys:
            other = self._rows.get(other_key)
            if other is not None and other is not queue:
                other.overtake(entry)
        self._go_on(entry, last, key)

    def go_on(self, job: SimulatedRequest, tokens: int, last: bool) -> None:
        entry: Entry[SimulatedRequest] = job.entry
        entry.queue.overtake(entry)
        self._go_on(entry, last, entry.queue.key)

    def _go_on(self, entry: Entry[SimulatedRequest], last: bool, key: int) -> None:
        if last:
            entry.queue.leave(entry)
            entry.item.entry = None
        else:
            self._move(entry, key, max(entry.chunks - 1, 1))

    def _move(self, entry: Entry[SimulatedRequest], key: int, chunks: int) -> None:
        self._joins += 1
        entry.queue.leave(entry)
        queue = self._row(key)
        entry.queue, entry.chunks, entry.joined = queue, chunks, self._joins
        queue.join(entry)

    def move(self, job: SimulatedRequest, key: int) -> None:
        self._move(job.entry, key, job.entry.chunks)

    def remove(self, job: SimulatedRequest) -> None:
        job.entry.queue.leave(job.entry)
        job.entry = None

    def same_organisation(self, one: SimulatedRequest, other: SimulatedRequest) -> bool:
        return True

    def has_late(self, keys: Sequence[int]) -> bool:
        return False

    def ended(self, job: SimulatedRequest, emitted: int) -> None:
        """Does nothing: there is no other tenant whose turn depends on the charge."""


class ManyTenants:
    def __init__(self, limits: Limits, attention_tokens: int) -> None:
        self._attention_tokens = attention_tokens
        weights = {**ring_weights(limits.priority_classes), **limits.weights}
        self._fair: FairQueue[SimulatedRequest] = FairQueue(limits.quantum_tokens, weights, limits.overtaken_max)
        self._prices = limits.prices
        self._lengths: dict[Path, OutputLength] = {}

    def push(self, job: SimulatedRequest, key: int) -> None:
        job.entry = self._fair.push(job, job.path, key, job.due, job.chunks)

    def first(self, keys: Sequence[int]) -> SimulatedRequest | None:
        entry = self._fair.first(keys)
        return None if entry is None else entry.item

    def take(self, job: SimulatedRequest, keys: Sequence[int], tokens: int, last: bool, key: int) -> None:
        self._fair.take(job.entry, self._terms(job, tokens, last, key), keys)
        if last:
            job.entry = None

    def go_on(self, job: SimulatedRequest, tokens: int, last: bool) -> None:
        self._fair.go_on(job.entry, self._terms(job, tokens, last, job.entry.key))
        if last:
            job.entry = None

    def _terms(self, job: SimulatedRequest, tokens: int, last: bool, key: int) -> Terms:
        cost = self._prices.chunk(tokens, job.dispatched, self._attention_tokens)
        if last:
            length = self._lengths.setdefault(job.path, OutputLength())
            job.output_charged = self._prices.output(min(float(job.output_max), length.tokens))
            cost += job.output_charged
        return Terms(cost, last, key)

    def move(self, job: SimulatedRequest, key: int) -> None:
        self._fair.move(job.entry, key)

    def remove(self, job: SimulatedRequest) -> None:
        self._fair.remove(job.entry)
        job.entry = None

    def same_organisation(self, one: SimulatedRequest, other: SimulatedRequest) -> bool:
        return one.path[:2] == other.path[:2]

    def has_late(self, keys: Sequence[int]) -> bool:
        return self._fair.has_late(keys)

    def ended(self, job: SimulatedRequest, emitted: int) -> None:
        self._fair.adjust(job.path, self._prices.output(emitted) - job.output_charged)
        self._lengths.setdefault(job.path, OutputLength()).learn(emitted)


def order_for(jobs: Iterable[SimulatedRequest], limits: Limits, attention_tokens: int) -> FairOrder:
    paths = {job.path for job in jobs}
    return OneTenant(limits.overtaken_max) if len(paths) < 2 else ManyTenants(limits, attention_tokens)
