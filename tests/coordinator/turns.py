"""One turn of the fair queue, as `placement.steps.compose` takes it: candidates come up until one gets a chunk."""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.tenant_queue import Entry

T = TypeVar("T")


class MoveTo(NamedTuple):
    """The entry waits under another key."""

    key: int


class Popped(NamedTuple, Generic[T]):
    entry: Entry[T] | None
    cost: float


Answer = Terms | MoveTo | None
"""None: nothing under the entry's key can run in this turn."""


def pop(queue: FairQueue[T], keys: Iterable[int], offer: Callable[[T], Answer]) -> Popped[T]:
    keys = list(keys)
    while (entry := queue.first(keys)) is not None:
        answer = offer(entry.item)
        if isinstance(answer, Terms):
            queue.take(entry, answer, keys)
            return Popped(entry, answer.cost)
        if answer is None:
            keys.remove(entry.key)
        else:
            queue.move(entry, answer.key)
    return Popped(None, 0.0)
