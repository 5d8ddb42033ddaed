"""When a worker that is to end may go."""

import pytest

from proto.drain import Drained, Draining, Flip
from proto.status import ProcessRole
from runtime.worker.service import FLIP_AFTER_S, Service


def test_it_goes_when_it_holds_nothing_and_nothing_can_come() -> None:
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


def test_what_a_person_asked_for_is_repeated_until_it_is_undone() -> None:
    service = Service()
    service.ordered(Draining(3000.0), 10.0)
    assert service.hand_over_ms(11.0) == 2000.0 and service.hand_over_ms(20.0) == 0.0
    assert not service.may_go(up=False, empty=True)
    service.ordered(Draining(None), 12.0)
    assert service.hand_over_ms(12.0) is None


def test_one_that_is_to_end_stays_so_whatever_a_person_says() -> None:
    service = Service()
    service.leave(1.0, 0.0)
    service.ordered(Draining(None), 0.0)
    assert service.hand_over_ms(0.5) == 500.0


def test_a_drain_that_was_undone_dismisses_nobody() -> None:
    service = Service()
    service.ordered(Draining(0.0), 10.0)
    service.ordered(Drained(), 10.0)
    service.ordered(Draining(None), 11.0)
    service.leave(20.0, 12.0)
    assert not service.may_go(up=True, empty=True), "something may be on its way to it"
    service.ordered(Drained(), 13.0)
    assert service.may_go(up=True, empty=True)


def test_it_changes_its_role_when_it_is_ready_holds_nothing_and_may_go() -> None:
    service = Service()
    service.ordered(Flip(ProcessRole.PREFILL, 500.0), 1.0)
    assert service.flips_to is ProcessRole.PREFILL and service.hand_over_ms(1.0) == 500.0
    service.ordered(Drained(), 1.2)
    assert not service.may_flip(empty=True), "what it needs in the new role is not there yet"
    service.is_ready = True
    assert not service.may_flip(empty=False) and service.may_flip(empty=True)
    assert not service.may_go(up=True, empty=True), "the process stays"
    assert service.flip_overdue_s(1.5 + FLIP_AFTER_S) == 0.0


@pytest.mark.parametrize("what", ["the link is lost", "the order is taken back", "it is to end"])
def test_an_order_to_change_the_role_can_become_void(what: str) -> None:
    service = Service()
    service.ordered(Flip(ProcessRole.PREFILL, 500.0), 1.0)
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
