"""Turns the priority classes' weights and floors into the weights of the fair queue's first ring."""

from collections.abc import Mapping

from runtime.tenancy.priority_classes import PriorityClass


def ring_weights(priority_classes: Mapping[str, PriorityClass]) -> dict[str, float]:
    """Weights that give each priority class its share by weight, or its floor where that is more. Raises ValueError if
    floors leave nothing to share.

    Classes at their floor are taken out, and the rest is shared by weight among the others, until no other class falls below
    its floor.
    """
    if sum(priority_class.floor_share for priority_class in priority_classes.values()) >= 1:
        raise ValueError("the priority classes' floor_share add up to 1 or more")
    floored: dict[str, float] = {}
    while True:
        rest = 1 - sum(floored.values())
        total = sum(priority_class.weight for name, priority_class in priority_classes.items() if name not in floored)
        shares = {
            name: rest * priority_class.weight / total
            for name, priority_class in priority_classes.items()
            if name not in floored
        }
        below = {
            name: priority_classes[name].floor_share
            for name, share in shares.items()
            if share < priority_classes[name].floor_share
        }
        if not below:
            return {name: floored.get(name, shares.get(name, 0.0)) for name in priority_classes}
        floored |= below
