"""The transports that a sender proposes to each receiver: best first, without those that failed there lately. Pure.

A transport that broke with a peer is left out for `demote_ms`, then tried again. Each further break doubles the time, up to
`demote_max_ms`. The record is cleared by a transfer that succeeds once the transport has been back for as long as it was last
left out. If all are left out, all are proposed: a poor transport is better than none.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

PEERS_MAX = 1024  # beyond it, the peer whose last break is oldest is forgotten


@dataclass(slots=True)
class _Record:
    breaks: int  # in a row
    until: float  # not proposed before
    period_s: float
    reason: str


@dataclass(slots=True)
class TransportChoice:
    """`transports` are the allowed transports, best first."""

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
        """Record a transfer that succeeded over this transport."""
        records = self._records.get(peer_incarnation, {})
        if transport in records and now >= records[transport].until + records[transport].period_s:
            del records[transport]

    def better_is_due(self, peer_incarnation: int, transport: str, now: float) -> bool:
        """Returns whether a better transport than this one was left out and may be tried again."""
        return any(
            record.until <= now and self.transports.index(name) < self.transports.index(transport)
            for name, record in self._records.get(peer_incarnation, {}).items()
        )

    def why_not_better(self, peer_incarnation: int, transport: str, now: float) -> str:
        """Returns why better transports than this one are not proposed; empty if there is no reason."""
        records = self._records.get(peer_incarnation, {})
        better = self.transports[: self.transports.index(transport)]
        left_out = [(name, records[name]) for name in better if name in records and records[name].until > now]
        return "; ".join(f"{n}: broke {r.breaks} times, last: {r.reason}" for n, r in left_out)
