"""Decides whether this process leads, from rows of the lease that the database returned, and when. Pure.

The row has a term, which grows with each new leader, and a count of renewals. A standby may take the lease once it has seen the
same row for `LEASE_S`. It measures that with its own monotonic clock from the answer in which it first saw the row. A leader is
sure of its lease until `LEASE_S` after it *asked* for the last renewal that was granted, less a margin. So it stops before
anyone may take over, whatever the clocks of both hosts and of the database say, as long as they run equally fast.
"""

from math import inf
from typing import Final, NamedTuple

LEASE_S: Final = 2.0
MARGIN: Final = 0.2  # Part of the lease by which its holder stops earlier
RENEW: Final = 0.2  # Part of the lease between two renewals


class LeaseRow(NamedTuple):
    term: int
    renewals: int
    holder: str  # empty: nobody leads


class Lease:
    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.term = 0  # in which this process leads, or did
        self.sure_until = -inf
        self._seen: LeaseRow | None = None
        self._seen_at = -inf

    def may_take(self, row: LeaseRow, now: float) -> bool:
        """Whether a standby that read this row may try to take the lease."""
        if row != self._seen:
            self._seen, self._seen_at = row, now
        return not row.holder or now - self._seen_at >= self.lease_s

    def granted(self, term: int, asked_at: float) -> None:
        """The database took note of this process as the leader; it was asked at that time."""
        self.term, self.sure_until = term, asked_at + self.lease_s * (1 - MARGIN)

    def lose(self) -> None:
        self.sure_until = -inf

    def is_held(self, now: float) -> bool:
        return now < self.sure_until
