"""A worker that comes back counts as lost once more, a new one does not, and what is remembered is bounded."""

import asyncio

import pytest

from gateway.streams import worker_links
from gateway.streams.types import StreamLimits
from gateway.streams.worker_links import WorkerLinks
from tests.gateway.fakes import ANSWER, DECODER, Site
from tests.gateway.http_words import completion, on_site
from tests.helpers import until


def test_only_lost_worker_counts_as_returning() -> None:
    """A worker returns only if its connection was lost, and once for each loss."""
    links = WorkerLinks()
    assert not links.returns(20)
    links.down(20)
    assert not links.returns(21)
    assert links.returns(20)
    assert not links.returns(20), "it has not been gone since"


def test_latest_worker_losses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest lost workers are remembered, and the oldest are forgotten."""
    monkeypatch.setattr(worker_links, "_REMEMBERED_MAX", 2)
    links = WorkerLinks()
    for incarnation in (1, 2, 1, 3):
        links.down(incarnation)
    assert [links.returns(incarnation) for incarnation in (1, 2, 3)] == [True, False, True]


def test_returning_worker_prompts_a_question() -> None:
    """What was sent on the old connection is lost. Without the return nobody would ask."""

    async def test(site: Site) -> None:
        site.cluster.hold = True
        backend = site.gateway.backend
        backend.worker_up(DECODER)
        backend.worker_down(DECODER)
        answer = asyncio.create_task(completion(site))
        await until(lambda: len(site.cluster.submits) == 1)
        await asyncio.sleep(0.2)
        assert len(site.cluster.submits) == 1, "a worker that went before the stream began is none of its losses"
        site.cluster.hold = False
        backend.worker_up(DECODER)
        assert (await answer)["choices"][0]["text"] == ANSWER
        assert [submit.attempt for submit, _ in site.cluster.submits] == [1, 1]

    on_site(test, limits=StreamLimits(stall_s=0.05))
