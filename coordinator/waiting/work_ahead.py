"""Prompt tokens that are not computed yet, by tenant, and what of them a new prompt has to wait for. Pure.

A tenant is sure of its share of all service while others have work too: its weight over the weights of all that have work,
at each level of the fair queue (priority class, organisation, user). So a prompt is computed after

    (tokens of its tenant + its own) / (share of its tenant * tokens per second of all workers)

at the latest, whatever others send. Another tenant's backlog does not count, however large: it only takes its own share. Of
its own tenant's, only prompts with a deadline count, because they go before those without.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.fairness.scheduling_class import Path


@dataclass(slots=True)
class _Node:
    weight: float
    tokens: int = 0
    urgent_tokens: int = 0
    """Of prompts with a deadline, or with a target for the first token."""
    busy_weight: float = 0.0
    """Of the children that have tokens."""


class WorkAhead:
    """A change costs one step for each level."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._root = _Node(1.0)
        self._nodes: dict[Path, _Node] = {}
        """Those that have tokens."""

    @property
    def tokens(self) -> int:
        return self._root.tokens

    def add(self, path: Path, tokens: int, *, urgent: bool) -> None:
        """So many more, or fewer if negative. `urgent`: of a prompt with a deadline."""
        if not tokens:
            return
        above = self._root
        above.tokens += tokens
        for depth in range(1, len(path) + 1):
            own = path[:depth]
            node = self._nodes.get(own)
            if node is None:
                node = self._nodes[own] = _Node(self._weight(own))
                above.busy_weight += node.weight
            node.tokens += tokens
            node.urgent_tokens += tokens if urgent else 0
            assert node.tokens >= node.urgent_tokens >= 0
            if not node.tokens:
                del self._nodes[own]
                above.busy_weight -= node.weight
            above = node

    def before(self, path: Path, tokens: int) -> float:
        """Tokens that all workers together compute until a new prompt of so many with a deadline is done, if its tenant gets
        no more than its share."""
        share, above = 1.0, self._root
        for depth in range(1, len(path) + 1):
            own = path[:depth]
            node = self._nodes.get(own)
            if node is None:
                weight = self._weight(own)
                share *= weight / (above.busy_weight + weight)
                node = _Node(weight)
            else:
                share *= node.weight / above.busy_weight
            above = node
        return (above.urgent_tokens + tokens) / share

    def reweigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._root.busy_weight = 0.0
        for node in self._nodes.values():
            node.busy_weight = 0.0
        for path, node in self._nodes.items():
            node.weight = self._weight(path)
            above = self._nodes[path[:-1]] if len(path) > 1 else self._root
            above.busy_weight += node.weight

    def _weight(self, path: Path) -> float:
        return self._weights.get("/".join(path), 1.0)
