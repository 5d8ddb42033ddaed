"""Adds up many runs; and the child process that does a share of them and writes its sums line by line."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from simulation.faults.plan import FAULTS
from simulation.run import SeedResult, run_seed

LINE_SEEDS = 16
"""Number of runs between two lines of a child."""


@dataclass
class Sum:
    """The sums of a number of runs; sums can be added."""

    seeds: int = 0
    events: int = 0
    tokens: int = 0
    virtual_s: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was broken)."""

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        self.events += result.events
        self.tokens += result.tokens
        self.virtual_s += result.virtual_s
        _count(self.injected, result.injected)
        _count(self.outcomes, result.outcomes)
        if result.failure is not None:
            self.failed.append((result.seed, f"{type(result.failure).__name__}: {result.failure}"))

    def merge(self, other: "Sum") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.tokens += other.tokens
        self.virtual_s += other.virtual_s
        _count(self.injected, other.injected)
        _count(self.outcomes, other.outcomes)
        self.failed += other.failed


def _count(into: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        into[str(name)] = into.get(str(name), 0) + count


def sums(seeds: Iterable[int], kinds: frozenset[str] = frozenset(FAULTS)) -> Iterator[Sum]:
    """Yields a sum for each few runs; ends after a run that failed."""
    part = Sum()
    for seed in seeds:
        part.add(run_seed(seed, kinds))
        if part.seeds == LINE_SEEDS or part.failed:
            yield part
            if part.failed:
                return
            part = Sum()
    if part.seeds:
        yield part


def child(arguments: list[str]) -> int:
    """Runs every STRIDE-th seed and writes sums as JSON, one to a line. The arguments are `FIRST COUNT STRIDE KINDS`."""
    first, count, stride = map(int, arguments[:3])
    kinds = frozenset(filter(None, arguments[3].split(",")))
    try:
        for part in sums(range(first, first + count, stride), kinds):
            sys.stdout.write(msgspec.json.encode(part).decode() + "\n")
            sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def from_line(line: str) -> Sum:
    return msgspec.json.decode(line, type=Sum)


def as_json(total: Sum) -> dict[str, Any]:
    return dict(msgspec.to_builtins(total))
