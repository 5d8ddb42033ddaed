"""A prefill worker that still looks for a decode worker's earlier incarnation must not cut itself off from the new one."""

from decode_worker.senders import Senders


def test_a_visitor_that_says_nothing_changes_nothing() -> None:
    senders: Senders[str] = Senders()
    senders.heard(7, "good")
    assert not senders.lost(7, "visitor")
    assert senders.link(7) == "good"


def test_answers_go_where_the_last_message_came_from() -> None:
    senders: Senders[str] = Senders()
    senders.heard(7, "old")
    senders.heard(7, "new")
    assert senders.link(7) == "new"
    assert not senders.lost(7, "old")
    assert senders.lost(7, "new") and senders.link(7) is None
