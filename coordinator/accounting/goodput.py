"""Goodput by priority class and policy version: requests that came, finished, and kept their class's targets. Pure."""

from collections.abc import Container
from typing import NamedTuple

import msgspec

from coordinator.policy.versions import PolicyInForce


class GoodputCounts(msgspec.Struct, gc=False):
    offered: int = 0
    """Requests that came, except those that were refused for what they are or for their tenant's limits."""
    finished: int = 0
    kept: int = 0  # Finished within both targets. A class without targets keeps them always.
    ttft_ms: float = 0.0  # sum of the times to first token of finished requests
    tpot_ms: float = 0.0  # sum of their mean times per later token

    def add(self, took: "Times", target: "Times") -> None:
        self.finished += 1
        self.kept += took.keep(target)
        self.ttft_ms += took.ttft_ms
        self.tpot_ms += took.tpot_ms


class Times(NamedTuple):
    """The times of one request, as this coordinator sees it; a target of 0 is none."""

    ttft_ms: float
    tpot_ms: float  # mean, from the first token to the end, interruptions included

    def keep(self, target: "Times") -> bool:
        return all(not limit or took <= limit for took, limit in zip(self, target, strict=True))


class Goodput:
    def __init__(self) -> None:
        self.by_class: dict[str, GoodputCounts] = {}
        self.policy = PolicyInForce()
        self.by_arm: dict[str, GoodputCounts] = {"active": GoodputCounts()}
        """Counts by arm of requests that came since the policy or its trial last changed."""
        self._since = 0.0

    def put_in_force(self, policy: PolicyInForce, now: float) -> None:
        if policy != self.policy:
            self.policy, self._since = policy, now
            arms = ("active", "baseline", "candidate") if policy.trial else ("active",)
            self.by_arm = {arm: GoodputCounts() for arm in arms}

    def offered(self, path: tuple[str, str, str]) -> None:
        self._of_class(path[0]).offered += 1
        self.by_arm[self.policy.arm(path[1])].offered += 1

    def finished(self, path: tuple[str, str, str], took: Times, target: Times, arrived: float) -> None:
        self._of_class(path[0]).add(took, target)
        if arrived >= self._since:
            self.by_arm[self.policy.arm(path[1])].add(took, target)

    def forget_others(self, priority_classes: Container[str]) -> None:
        """Drop the counts of classes that a new tenants file lacks."""
        self.by_class = {name: counts for name, counts in self.by_class.items() if name in priority_classes}

    def _of_class(self, priority_class: str) -> GoodputCounts:
        return self.by_class.get(priority_class) or self.by_class.setdefault(priority_class, GoodputCounts())
