"""Who leads, from what the lease's row said and when."""

import random

import pytest

from coordinator.postgres.lease import LEASE_S, MARGIN_S, Lease, LeaseRow

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
    assert lease.term == 8 and lease.is_held(50.0 + LEASE_S - MARGIN_S - 0.01)
    assert not lease.is_held(50.0 + LEASE_S - MARGIN_S)
    lease.granted(8, 51.0)
    assert lease.is_held(50.0 + LEASE_S)
    lease.lose()
    assert not lease.is_held(51.0)


@pytest.mark.parametrize("seed", range(20))
def test_two_coordinators_never_lead_together(seed: int) -> None:
    """With any delays of requests and answers, pauses and lost answers, at most one of three is sure that it leads."""
    source = random.Random(seed)
    row = LeaseRow(0, 0, "")
    leases = [Lease() for _ in range(3)]
    under_way: list[
        tuple[float, int, str, float, LeaseRow | None]
    ] = []  # (when, who, what, asked at, the row it is about)
    busy, changes, leaders = [0.0] * 3, 0, set()
    for step in range(20_000):
        now = step / 50
        for event in sorted(one for one in under_way if one[0] <= now):
            under_way.remove(event)
            _, who, what, asked_at, about = event
            lease, answer_at = leases[who], now + source.choice((0.0, 0.02, 0.3, 3.0))
            match what:
                case "read":
                    under_way.append((answer_at, who, "seen", asked_at, row))
                case "seen" if about is not None and lease.may_take(about, now):
                    under_way.append((now + source.choice((0.0, 0.3, 3.0)), who, "take", now, about))
                case "take" if about == row:
                    row = LeaseRow(row.term + 1, 0, str(who))
                    changes += 1
                    under_way.append((answer_at, who, "granted", asked_at, row))
                case "renew" if about is not None and about.term == row.term:
                    row = row._replace(renewals=row.renewals + 1)
                    under_way.append((answer_at, who, "granted", asked_at, row))
                case "granted" if about is not None and source.random() < 0.9:
                    lease.granted(about.term, asked_at)
        held = [who for who, lease in enumerate(leases) if lease.is_held(now)]
        assert len(held) <= 1, (now, row)
        leaders.update(held)
        for who, lease in enumerate(leases):
            if now >= busy[who]:
                busy[who] = now + source.choice((0.2, 0.4, 0.4, 5.0))
                what = "renew" if lease.is_held(now) else "read"
                about = LeaseRow(lease.term, 0, "")
                under_way.append((now + source.choice((0.0, 0.02, 1.0)), who, what, now, about))
    assert changes > 10 and len(leaders) == 3
