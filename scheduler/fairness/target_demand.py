"""The class of TPOT targets that gives a decode worker to one that waits without room. Pure.

Each class has as many workers as it needs, or its share by weight if all need more than there are. A class gives a worker if
the others carry its load, or if it still has at least as many for its weight as the other class then has. No class with
a load gives its last one. So an assignment that changes nothing for demand that stays the same is reached after a few steps,
and two classes never take a worker from each other in turn.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FULL = 0.85  # the part of its workers' throughput that a class may need and still give one of them away


@dataclass(slots=True)
class TargetLoad:
    """The workers of one class of targets, and their load."""

    workers: int = 0
    load: float = 0.0  # the throughput of its streams, in workers that run as many as its target allows

    def carries(self, workers: int) -> bool:
        """Whether so many workers would do for its streams."""
        return self.load <= FULL * workers


def who_gives(
    short: Iterable[int], demands: Mapping[int, TargetLoad], weights: Mapping[int, float]
) -> tuple[int, int] | None:
    """Returns the class that gets a worker and the one that gives it; None: all stay as they are. `short`: classes that
    wait without room."""
    waiting = set(short)

    def held(target: int, change: int = 0) -> float:
        workers = demands[target].workers if target in demands else 0
        return (workers + change) / weights.get(target, 1.0)

    for target in sorted(waiting, key=held):
        giving = [
            other
            for other, demand in demands.items()
            if other != target
            and demand.workers
            and (
                (other not in waiting and demand.carries(demand.workers - 1))
                or (demand.workers > 1 and (held(other, -1) >= held(target, 1) or not held(target)))
            )
        ]
        if giving:
            return target, max(giving, key=lambda other: (other not in waiting, held(other)))
    return None
