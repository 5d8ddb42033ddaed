"""Who leads, from what the lease's row said and when."""

import random

import pytest

from runtime.lease.lease import LEASE_S, MARGIN, Lease, LeaseRow

ROW = LeaseRow(7, 3, "one")


def test_standby_waits_a_whole_lease() -> None:
    """A standby takes over only after it has seen the same row for the lease's time."""
    lease = Lease()
    assert not lease.may_take(ROW, 100.0)
    assert not lease.may_take(ROW, 100.0 + LEASE_S - 0.01)
    renewed = ROW._replace(renewals=4)
    assert not lease.may_take(renewed, 100.0 + LEASE_S)
    assert not lease.may_take(renewed, 100.0 + 2 * LEASE_S - 0.01)
    assert lease.may_take(renewed, 100.0 + 2 * LEASE_S)


def test_released_lease_is_taken_at_once() -> None:
    assert Lease().may_take(ROW._replace(holder=""), 0.0)


def test_leader_is_sure_until_the_margin() -> None:
    """A leader counts from the time at which it asked, and stops a margin before the lease's end."""
    lease = Lease()
    assert not lease.is_held(0.0)
    lease.granted(8, 50.0)
    assert lease.term == 8 and lease.is_held(50.0 + LEASE_S * (1 - MARGIN) - 0.01)
    assert not lease.is_held(50.0 + LEASE_S * (1 - MARGIN))
    lease.granted(8, 51.0)
    assert lease.is_held(50.0 + LEASE_S)
    lease.lose()
    assert not lease.is_held(51.0)


class Database:
    """The row, and what each coordinator has sent or is to hear: (when, who, step, its argument)."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.row = LeaseRow(0, 0, "")
        self.leases = [Lease() for _ in range(3)]
        self.terms = 0
        self._coming = [(0.0, who, "asks", 0.0, self.row) for who in range(3)]

    def run_until(self, now: float) -> None:
        while self._coming and min(self._coming)[0] <= now:
            event = min(self._coming)
            self._coming.remove(event)
            at, who, step, asked_at, about = event
            getattr(self, f"_{step}")(at, who, asked_at, about)

    def _then(
        self, at: float, delays: tuple[float, ...], who: int, step: str, asked_at: float, about: LeaseRow
    ) -> None:
        self._coming.append((at + self.source.choice(delays) + 1e-6, who, step, asked_at, about))

    def _asks(self, at: float, who: int, _asked_at: float, _about: LeaseRow) -> None:
        step = "renew" if self.leases[who].is_held(at) else "read"
        self._then(at, SENT_S, who, step, at, LeaseRow(self.leases[who].term, 0, ""))

    def _read(self, at: float, who: int, asked_at: float, _about: LeaseRow) -> None:
        self._then(at, ANSWERED_S, who, "seen", asked_at, self.row)

    def _seen(self, at: float, who: int, _asked_at: float, about: LeaseRow) -> None:
        may_take = self.leases[who].may_take(about, at)
        self._then(at, SENT_S if may_take else PAUSES_S, who, "take" if may_take else "asks", at, about)

    def _take(self, at: float, who: int, asked_at: float, about: LeaseRow) -> None:
        if about == self.row:
            self.row = LeaseRow(self.row.term + 1, 0, str(who))
            self.terms += 1
            self._then(at, ANSWERED_S, who, "granted", asked_at, self.row)
        else:
            self._then(at, PAUSES_S, who, "asks", at, about)

    def _renew(self, at: float, who: int, asked_at: float, about: LeaseRow) -> None:
        if about.term == self.row.term:
            self.row = self.row._replace(renewals=self.row.renewals + 1)
            self._then(at, ANSWERED_S, who, "granted", asked_at, self.row)
        else:
            self._then(at, PAUSES_S, who, "asks", at, about)

    def _granted(self, at: float, who: int, asked_at: float, about: LeaseRow) -> None:
        if self.source.random() < 0.9:  # else the answer is lost
            self.leases[who].granted(about.term, asked_at)
        self._then(at, PAUSES_S, who, "asks", at, about)


SENT_S = (0.0, 0.0, 0.0, 0.01, 0.01, 1.0)
ANSWERED_S = (0.0, 0.0, 0.0, 0.01, 0.01, 0.3, 3.0)
PAUSES_S = (0.1,) * 30 + (5.0,)


@pytest.mark.parametrize("seed", range(10))
def test_two_coordinators_never_lead_together(seed: int) -> None:
    """With any delays of requests and answers, pauses and lost answers, at most one of three is sure that it leads."""
    database, leaders = Database(random.Random(seed)), set()
    for step in range(20_000):
        now = step / 50
        database.run_until(now)
        held = [who for who, lease in enumerate(database.leases) if lease.is_held(now)]
        assert len(held) <= 1, (now, database.row)
        leaders.update(held)
    assert database.terms > 10 and len(leaders) == 3
