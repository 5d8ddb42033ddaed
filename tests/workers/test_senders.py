"""A prefill worker that still looks for a decode worker's earlier incarnation must not cut itself off from the new one."""

from decode_worker.senders import Senders


def test_silent_visitor_changes_nothing() -> None:
    """A connection that never sent a message does not affect the known sender when it is lost."""
    senders: Senders[str] = Senders()
    senders.heard(7, "good")
    assert not senders.lost(7, "visitor")
    assert senders.link(7) == "good"


def test_answers_go_to_latest_link() -> None:
    """Answers go over the link from which the last message of a sender came."""
    senders: Senders[str] = Senders()
    senders.heard(7, "old")
    senders.heard(7, "new")
    assert senders.link(7) == "new"
    assert not senders.lost(7, "old")
    assert senders.lost(7, "new") and senders.link(7) is None
