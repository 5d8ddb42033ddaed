"""The tenants of a queue that were served lately, and how evenly. The figures are for people; no decision uses them. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from scheduler.waiting.queue import WaitQueue


class ServedTenant(NamedTuple):
    """One tenant in one priority class of one model."""

    priority_class: str
    organisation: str
    user: str
    cost_per_s: float  # dispatched over about the last ten seconds, answers as estimated
    waiting: int  # requests

    @property
    def tenant(self) -> str:
        return f"{self.organisation}/{self.user}" if self.user else self.organisation


def services(queue: WaitQueue, now: float) -> list[ServedTenant]:
    """The service to tenants that were served lately, or that wait."""
    found = []
    for path in {**queue.served, **queue.line.tenants}:
        served = queue.served.get(path)
        cost_per_s, waiting = served.per_s(now) if served else 0.0, queue.line.waiting(path)
        if waiting or cost_per_s >= 0.01:
            priority_class, organisation, user = path
            found.append(ServedTenant(priority_class, organisation, user, cost_per_s, waiting))
    return found


def jain(values: Iterable[float]) -> float:
    """Jain's index (Jain, Chiu & Hawe 1984): 1 where all have the same, 1/n where one of n has all."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def evenness(queue: WaitQueue, found: Iterable[ServedTenant]) -> dict[str, float]:
    """Jain's index of the cost served per weight for each priority class, over organisations with requests waiting. Those
    without any get what they ask for, which is no question of fairness."""
    served: dict[tuple[str, str], float] = {}
    waiting: set[tuple[str, str]] = set()
    for one in found:
        where = (one.priority_class, one.organisation)
        served[where] = served.get(where, 0.0) + one.cost_per_s
        if one.waiting:
            waiting.add(where)
    by_priority_class: dict[str, list[float]] = {}
    for priority_class, organisation in sorted(waiting):
        weight = queue.fair.weights.get(f"{priority_class}/{organisation}", 1.0)
        by_priority_class.setdefault(priority_class, []).append(served[priority_class, organisation] / weight)
    return {priority_class: jain(values) for priority_class, values in by_priority_class.items()}
