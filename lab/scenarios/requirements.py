"""Compares the figures of a run with what its scenario requires. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.cluster.run import WINDOW_S
from lab.scenarios.scenario import Requirement


@dataclass(frozen=True)
class Checked:
    """A requirement and what came of it."""

    name: str  # like `chat: ttft_ms.p90`
    limit: str  # like `at most 1,000`
    value: float | None  # the figure, or its worst window; None: nothing was measured
    holds: bool


def check(requirements: Sequence[Requirement], found: Mapping[str, Any]) -> Iterator[Checked]:
    """Raises `ValueError`, which names the requirement of a group or figure that does not exist."""
    for number, one in enumerate(requirements):
        group = _groups(found).get(one.of)
        if group is None:
            raise ValueError(f"require.{number}.of: there is no {one.of!r}; there are {', '.join(_groups(found))}")
        value: Any = group
        for part in one.figure.split("."):
            if value is not None and (not isinstance(value, Mapping) or part not in value):
                raise ValueError(f"require.{number}.figure: {one.of!r} has no figure {one.figure!r}")
            value = None if value is None else value[part]
        if one.figure.endswith("_by_window"):
            value = _worst(one, [float(each) for each in value[int(one.from_s / WINDOW_S) :]])
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"require.{number}.figure: {one.figure!r} is not a number")
        yield Checked(f"{one.of}: {one.figure}", one.limit(), value, holds(one, value))


def holds(one: Requirement, value: float | None) -> bool:
    return value is not None and _excess(one, value) <= 0


def _groups(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    tenants = {one["tenant"]: one for one in found["tenants"]}
    return {"all": found["all"], "run": found, **found["workers"], **found["classes"], **tenants, **found["traffic"]}


def _worst(one: Requirement, values: Sequence[float]) -> float | None:
    """Returns the window that is furthest over a limit, or nearest to it."""
    return max(values, key=lambda value: _excess(one, value), default=None)


def _excess(one: Requirement, value: float) -> float:
    """Returns how far a figure is over its limits; negative: within them."""
    low = -float("inf") if one.at_least is None else one.at_least
    high = float("inf") if one.at_most is None else one.at_most
    return max(low - value, value - high)
