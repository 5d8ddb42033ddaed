"""A fair queue that writes down what each tenant was charged in all."""

from collections import Counter
from collections.abc import Sequence

from scheduler.fairness.fair_node import Path
from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.tenant_queue import Entry
from scheduler.request import Request


class Billed(FairQueue[Request]):
    def __init__(self) -> None:
        super().__init__(1024.0)
        self.bill: Counter[Path] = Counter()

    def take(self, entry: Entry[Request], terms: Terms, keys: Sequence[int]) -> None:
        self.bill[entry.leaf.path] += terms.cost  # type: ignore[assignment]
        super().take(entry, terms, keys)

    def go_on(self, entry: Entry[Request], terms: Terms) -> None:
        self.bill[entry.leaf.path] += terms.cost  # type: ignore[assignment]
        super().go_on(entry, terms)

    def adjust(self, path: Path, cost: float) -> None:
        self.bill[path] += cost  # type: ignore[assignment]
        super().adjust(path, cost)
