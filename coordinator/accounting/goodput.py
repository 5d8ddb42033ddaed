"""Goodput by priority class: how many requests came, finished, and kept their class's targets. Pure."""

from collections.abc import Container
from typing import NamedTuple

import msgspec


class Tally(msgspec.Struct, gc=False):
    offered: int = 0
    """Requests that came, except those that were refused for what they are or for their tenant's limits."""
    finished: int = 0
    kept: int = 0
    """Finished within both targets. A class without targets keeps them always."""


class Times(NamedTuple):
    """Of one request, as this coordinator sees it; targets of 0 are none."""

    ttft_ms: float
    tpot_ms: float
    """Mean, from the first token to the end, interruptions included."""

    def keep(self, target: "Times") -> bool:
        return all(not limit or took <= limit for took, limit in zip(self, target, strict=True))


class Goodput:
    def __init__(self) -> None:
        self.by_class: dict[str, Tally] = {}

    def offered(self, priority_class: str) -> None:
        self._tally(priority_class).offered += 1

    def finished(self, priority_class: str, took: Times, target: Times) -> None:
        tally = self._tally(priority_class)
        tally.finished += 1
        tally.kept += took.keep(target)

    def forget_others(self, priority_classes: Container[str]) -> None:
        """A new tenants file has only these."""
        self.by_class = {name: tally for name, tally in self.by_class.items() if name in priority_classes}

    def _tally(self, priority_class: str) -> Tally:
        return self.by_class.get(priority_class) or self.by_class.setdefault(priority_class, Tally())
