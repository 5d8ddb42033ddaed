"""A worker that comes back counts as lost once more, and what is remembered is bounded."""

import asyncio
from dataclasses import replace

import pytest

from gateway import backend as module
from gateway.streams.types import StreamLimits
from tests.gateway.fakes import ANSWER, DECODER, Site
from tests.gateway.http_words import completion, on_site
from tests.helpers import until


def test_latest_worker_losses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest lost workers are remembered until they return, and the oldest are forgotten."""
    monkeypatch.setattr(module, "_ENDED_WORKERS_MAX", 2)

    async def test(site: Site) -> None:
        backend = site.gateway.backend
        for incarnation in (1, 2, 1, 3):
            backend.worker_down(replace(DECODER, incarnation=incarnation))
        assert list(backend._ended_workers) == [1, 3]
        backend.worker_up(replace(DECODER, incarnation=3))
        assert list(backend._ended_workers) == [1]

    on_site(test)


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
