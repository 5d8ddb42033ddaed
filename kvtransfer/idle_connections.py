"""The idle pairs that are given up when the buffers of all of them exceed their bound. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairUse:
    peer_incarnation: int
    pair_bytes: int
    used_at: float
    """When its last session ended, or it was made."""
    is_idle: bool


def to_give_up(pairs: Iterable[PairUse], needed_bytes: int, budget_bytes: int) -> list[int]:
    """Peers whose pairs go, so that one more of `needed_bytes` fits: idle ones only, the least recently used first, and no
    more than it takes. Where that is not enough, the new one is made all the same: a busy pair is never given up."""
    uses = list(pairs)
    over = sum(use.pair_bytes for use in uses) + needed_bytes - budget_bytes
    found = []
    for use in sorted((use for use in uses if use.is_idle), key=lambda use: use.used_at):
        if over <= 0:
            break
        found.append(use.peer_incarnation)
        over -= use.pair_bytes
    return found
