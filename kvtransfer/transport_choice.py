"""The transports that a sender proposes to each receiver: best first, without those that failed there lately. Pure.

A transport that broke with a peer is left out for `demote_ms`, and twice as long after each further break, up to
`demote_max_ms`; then it is tried again. Transfers that go well for as long as it was last left out clear its record. Where all
are left out, all are proposed: a poor way is better than none.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

PEERS_MAX = 1024
"""Peers remembered; of more, those heard of longest ago are forgotten."""


@dataclass(slots=True)
class _Record:
    breaks: int
    """Breaks in a row."""
    until: float
    """Not proposed before."""
    period_s: float
    reason: str


@dataclass(slots=True)
class TransportChoice:
    """`transports` are those allowed, best first."""

    transports: tuple[str, ...]
    demote_ms: int
    demote_max_ms: int
    _records: "OrderedDict[int, dict[str, _Record]]" = field(default_factory=OrderedDict)

    def proposal(self, peer_incarnation: int, now: float) -> tuple[str, ...]:
        records = self._records.get(peer_incarnation, {})
        return tuple(t for t in self.transports if t not in records or records[t].until <= now) or self.transports

    def broke(self, peer_incarnation: int, transport: str, reason: str, now: float) -> None:
        records = self._records.setdefault(peer_incarnation, {})
        self._records.move_to_end(peer_incarnation)
        if len(self._records) > PEERS_MAX:
            self._records.popitem(last=False)
        breaks = records[transport].breaks + 1 if transport in records else 1
        period_s = min(self.demote_ms * 2 ** min(breaks - 1, 30), self.demote_max_ms) / 1e3
        records[transport] = _Record(breaks, now + period_s, period_s, reason)

    def worked(self, peer_incarnation: int, transport: str, now: float) -> None:
        """A transfer went well by it."""
        records = self._records.get(peer_incarnation, {})
        if transport in records and now >= records[transport].until + records[transport].period_s:
            del records[transport]

    def better_is_due(self, peer_incarnation: int, transport: str, now: float) -> bool:
        """Whether one that is better than this was left out, and may be tried again."""
        return any(
            record.until <= now and self.transports.index(name) < self.transports.index(transport)
            for name, record in self._records.get(peer_incarnation, {}).items()
        )

    def why_not_better(self, peer_incarnation: int, transport: str, now: float) -> str:
        """The reason why better ones than this are not proposed; empty if there is none."""
        records = self._records.get(peer_incarnation, {})
        better = self.transports[: self.transports.index(transport)]
        left_out = [(name, records[name]) for name in better if name in records and records[name].until > now]
        return "; ".join(f"{n}: broke {r.breaks} times, last: {r.reason}" for n, r in left_out)
