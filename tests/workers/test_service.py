"""When a worker that is to end may go."""

import pytest

from proto.drain import Drained, Draining, Flip
from proto.messages import Role
from worker.service import FLIP_AFTER_S, Service


def test_leaving_worker_goes_when_empty() -> None:
    """A worker that leaves goes once it holds nothing and nothing can come."""
    service = Service()
    assert service.hand_over_ms(0.0) is None
    service.ordered(Drained(), 0.0)
    assert not service.may_go(up=True, empty=True), "nobody has asked it to"
    service.link_lost()
    assert service.leave(20.0, 5.0) == Draining(20_000.0)
    assert not service.may_go(up=True, empty=True), "something may be on its way"
    service.ordered(Drained(), 6.0)
    assert not service.may_go(up=True, empty=False) and service.may_go(up=True, empty=True)
    service.link_lost()
    assert service.may_go(up=False, empty=True) and not service.may_go(up=True, empty=True)


def test_operator_drain_lasts_until_undone() -> None:
    """A drain that an operator asked for lasts until it is undone."""
    service = Service()
    service.ordered(Draining(3000.0), 10.0)
    assert service.hand_over_ms(11.0) == 2000.0 and service.hand_over_ms(20.0) == 0.0
    assert not service.may_go(up=False, empty=True)
    service.ordered(Draining(None), 12.0)
    assert service.hand_over_ms(12.0) is None


def test_leaving_worker_ignores_undone_drain() -> None:
    """A worker that is to end goes on draining if an operator undoes the drain."""
    service = Service()
    service.leave(1.0, 0.0)
    service.ordered(Draining(None), 0.0)
    assert service.hand_over_ms(0.5) == 500.0


def test_undone_drain_permits_no_exit() -> None:
    """A worker that leaves after an undone drain waits for a new Drained message."""
    service = Service()
    service.ordered(Draining(0.0), 10.0)
    service.ordered(Drained(), 10.0)
    service.ordered(Draining(None), 11.0)
    service.leave(20.0, 12.0)
    assert not service.may_go(up=True, empty=True), "something may be on its way to it"
    service.ordered(Drained(), 13.0)
    assert service.may_go(up=True, empty=True)


def test_role_change_waits_until_empty() -> None:
    """A worker changes its role when it is drained, ready for the new role and holds nothing."""
    service = Service()
    service.ordered(Flip(Role.PREFILL, 500.0), 1.0)
    assert service.flips_to is Role.PREFILL and service.hand_over_ms(1.0) == 500.0
    service.ordered(Drained(), 1.2)
    assert not service.may_flip(empty=True), "what it needs in the new role is not there yet"
    service.is_ready = True
    assert not service.may_flip(empty=False) and service.may_flip(empty=True)
    assert not service.may_go(up=True, empty=True), "the process stays"
    assert service.flip_overdue_s(1.5 + FLIP_AFTER_S) == 0.0


@pytest.mark.parametrize("what", ["the link is lost", "the order is taken back", "it is to end"])
def test_role_change_order_can_lapse(what: str) -> None:
    """An order to change the role lapses when the link is lost, it is taken back or the worker is to end."""
    service = Service()
    service.ordered(Flip(Role.PREFILL, 500.0), 1.0)
    service.is_ready = True
    if what == "the link is lost":
        service.link_lost()
    elif what == "the order is taken back":
        service.ordered(Draining(None), 1.1)
    else:
        service.leave(20.0, 1.1)
    service.ordered(Drained(), 1.2)
    assert not service.may_flip(empty=True) and service.flips_to is None
    assert (service.hand_over_ms(1.2) is None) is (what != "it is to end")
