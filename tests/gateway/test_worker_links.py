"""A worker that comes back counts as lost once more, a new one does not, and what is remembered is bounded."""

import pytest

from gateway import worker_links
from gateway.worker_links import WorkerLinks


def test_only_who_was_there_before_returns() -> None:
    links = WorkerLinks()
    assert not links.returns(20)
    links.down(20)
    assert not links.returns(21)
    assert links.returns(20)
    assert not links.returns(20), "it has not been gone since"


def test_the_latest_losses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_links, "_REMEMBERED_MAX", 2)
    links = WorkerLinks()
    for epoch in (1, 2, 1, 3):
        links.down(epoch)
    assert [links.returns(epoch) for epoch in (1, 2, 3)] == [True, False, True]
