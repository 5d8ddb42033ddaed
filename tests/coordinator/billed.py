"""A fair queue that writes down what each tenant was charged in all."""

from collections import Counter
from collections.abc import Iterable

from coordinator.fairness.fair_queue import FairQueue, Popped
from coordinator.fairness.offers import Offer, Terms
from coordinator.fairness.scheduling_class import Path
from coordinator.fairness.tenant_queue import Entry
from coordinator.request import Request


class Billed(FairQueue[Request]):
    def __init__(self) -> None:
        super().__init__(1024.0)
        self.bill: Counter[Path] = Counter()

    def pop(self, keys: Iterable[int], offer: Offer[Request]) -> Popped[Request]:
        found = super().pop(keys, offer)
        if found.entry is not None:
            self.bill[found.entry.leaf.path] += found.cost  # type: ignore[assignment]
        return found

    def go_on(self, entry: Entry[Request], terms: Terms) -> None:
        self.bill[entry.leaf.path] += terms.cost  # type: ignore[assignment]
        super().go_on(entry, terms)

    def adjust(self, path: Path, cost: float) -> None:
        self.bill[path] += cost  # type: ignore[assignment]
        super().adjust(path, cost)
