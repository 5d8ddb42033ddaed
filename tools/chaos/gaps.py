"""A fault, and the gaps in streams that are put down to it."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

HIT_S = 0.25  # a stream that a fault hits has stopped getting tokens by then
QUIET_S = 2.0
"""How long before a fault gaps are looked at for comparison, and how long after a coordinator's fault, which hits no
stream."""


@dataclass(eq=False)
class Fault:
    role: str
    kind: str
    name: str
    at: float
    detected_s: float | None = None
    stopped_s: float | None = None  # how long a stop was, once it is over
    back_s: float | None = None
    healed_at: float = 0.0
    alone: bool = True
    errors: list[str] = field(default_factory=list)
    difference: Counter[str] = field(default_factory=Counter)
    admitted_s: float | None = None
    """Time from a coordinator's fault until a request that came right after it had its first token."""
    worst_gap_s: float = 0.0
    earlier_gap_s: float = 0.0
    stall_s: float = 0.0  # the longest time for which the machine itself stood still meanwhile


def of_faults(seen: Iterable[tuple[float, float]], faults: Sequence[Fault]) -> None:
    """Writes into each fault the worst gap that it hit, and the worst gap before it. `seen` has (from, until) of gaps of all
    streams."""
    gaps = sorted((b, a) for a, b in seen)
    longest_s = max((b - a for b, a in gaps), default=0.0)

    def ended(since: float, until: float) -> list[tuple[float, float]]:
        return gaps[bisect_right(gaps, (since, inf)) : bisect_right(gaps, (until, inf))]

    for fault in faults:
        others = [f for f in faults if f is not fault and f.kind != "none"]
        window = QUIET_S if fault.kind == "none" or fault.role == "coordinator" else HIT_S
        end = max(fault.healed_at, fault.at + window)
        fault.alone = not any(o.at < end and o.healed_at + HIT_S > fault.at for o in others)
        quiet_since = max((o.healed_at + HIT_S for o in others if o.at < fault.at), default=0.0)
        until = fault.at + window
        during = [b - a for b, a in ended(fault.at, until + longest_s) if a < until]
        before = [b - a for b, a in ended(max(fault.at - QUIET_S, quiet_since), fault.at)]
        fault.worst_gap_s, fault.earlier_gap_s = max(during, default=0.0), max(before, default=0.0)
