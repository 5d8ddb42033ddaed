"""Chooses the idle pairs to drop when the buffers of all pairs exceed their limit. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairUse:
    peer_incarnation: int
    pair_bytes: int
    used_at: float
    is_idle: bool


def to_give_up(pairs: Iterable[PairUse], needed_bytes: int, budget_bytes: int) -> list[int]:
    """Returns the peers whose pairs to drop, so that one more pair of `needed_bytes` fits. Only idle pairs are dropped, the
    least recently used first, and no more than needed. If that is not enough, the new pair is made anyway: a busy pair is
    never dropped."""
    uses = list(pairs)
    over = sum(use.pair_bytes for use in uses) + needed_bytes - budget_bytes
    found = []
    for use in sorted((use for use in uses if use.is_idle), key=lambda use: use.used_at):
        if over <= 0:
            break
        found.append(use.peer_incarnation)
        over -= use.pair_bytes
    return found
