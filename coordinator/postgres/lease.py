"""Decides whether this coordinator leads, from rows of the lease that the database returned, and when. Pure.

The row has a term, which grows with each new leader, and a count of renewals. A standby may take the lease once it has seen the
same row for `LEASE_S`. It measures that with its own monotonic clock from the answer in which it first saw the row. A leader is
sure of its lease until `LEASE_S` after it *asked* for the last renewal that was granted, less a margin. So it stops before
anyone may take over, whatever the clocks of both hosts and of the database say, as long as they run equally fast.
"""

from math import inf
from typing import Final, NamedTuple

LEASE_S: Final = 2.0
MARGIN_S: Final = 0.4
RENEW_S: Final = 0.4  # between two renewals
POLL_S: Final = 0.1  # between two looks of a standby


class LeaseRow(NamedTuple):
    term: int
    renewals: int
    holder: str  # empty: nobody leads


class Lease:
    def __init__(self) -> None:
        self.term = 0  # in which this coordinator leads, or did
        self.sure_until = -inf
        self._seen: LeaseRow | None = None
        self._seen_at = -inf

    def may_take(self, row: LeaseRow, now: float) -> bool:
        """Whether a standby that read this row may try to take the lease."""
        if row != self._seen:
            self._seen, self._seen_at = row, now
        return not row.holder or now - self._seen_at >= LEASE_S

    def granted(self, term: int, asked_at: float) -> None:
        """The database took note of this coordinator as the leader; it was asked at that time."""
        self.term, self.sure_until = term, asked_at + LEASE_S - MARGIN_S

    def lose(self) -> None:
        self.sure_until = -inf

    def is_held(self, now: float) -> bool:
        return now < self.sure_until
