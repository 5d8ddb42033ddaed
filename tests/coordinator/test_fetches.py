"""Whether a prefill worker fetches what its decode worker has of a prompt, and what the coordinator learns from it."""

from collections.abc import Callable

import pytest

from coordinator.event_log.timeline import Placed, Timeline
from prefill_worker.fetches import Fetches
from proto.kv import Fetch
from scheduler.workers.worker import FETCH_PAUSE_S
from tests.coordinator.logged_core import LoggedCore, as_logged, replay
from tests.coordinator.test_suffixes import BLOCK, World
from tests.coordinator.world import MODEL
from tests.uniform_cluster import FIRST_PREFILL, UniformCluster


def world(rate: float = 2000.0, *, fetches: bool = True) -> World:
    """One prefill and one decode worker, which computes nothing of prompts."""
    return World(rate=rate, core=LoggedCore, computes_suffixes=False, fetches=fetches)


def fetched(cluster: UniformCluster) -> int:
    return cluster.core.cluster.counters["prefixes_fetched"]


def test_answer_is_fetched_not_recomputed() -> None:
    """An earlier answer's KV is fetched from the decode worker, and only new tokens are computed."""
    cluster = world()
    cluster.turn("t0", "s", 800, 160)
    cluster.run(10.0)
    cluster.turn("t1", "s", 1000, 40)
    cluster.run(20.0)
    assert fetched(cluster) == 1
    had = (800 + 160 - 1) // BLOCK * BLOCK
    assert cluster.requests["t1"].cached_tokens == had, "the last token of an answer is never computed"
    assert cluster.computed()["t1"] == 1000 - had
    assert cluster.core.cluster.pools[MODEL].prefill[FIRST_PREFILL].fetch_token_s > 0, "it is measured"
    story = Timeline("t1")
    assert replay(as_logged(cluster.core).event_log()).run(story) is None
    [placed] = [entry for entry in story.finish() if isinstance(entry, Placed)]
    assert placed.fetched_tokens == had - 800 and 0 < placed.fetch_s < placed.compute_s, "explain says why"


def test_cheap_prefix_is_not_fetched() -> None:
    """Nothing is fetched if computing it is sooner, or if the worker does not fetch."""
    for cluster in (world(rate=1e6), world(fetches=False)):
        cluster.turn("t0", "s", 800, 32)
        cluster.run(10.0)
        cluster.turn("t1", "s", 1000, 40)
        cluster.run(20.0)
        assert not fetched(cluster) and cluster.requests["t1"].cached_tokens == 800


def test_failed_fetch_pauses_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose fetch failed is computed, and fetches pause for a while."""
    cluster = world()

    def fetch(prefill: int, decode: int, message: Fetch) -> None:
        fetches: Fetches = cluster.prefill[prefill].core.fetches
        expire: Callable[[], None] = lambda: fetches.expire((message.request_id, message.attempt))  # noqa: E731
        cluster.at(cluster.now + 3.0, expire)
        cluster.at(cluster.now + 3.0, cluster.prefill[prefill]._start_step)

    monkeypatch.setattr(cluster, "fetch", fetch)
    cluster.turn("t0", "s", 800, 160)
    cluster.run(10.0)
    cluster.turn("t1", "s", 1000, 40)
    cluster.run(20.0)
    assert fetched(cluster) == 1 == cluster.core.cluster.counters["fetches_failed"]
    assert cluster.computed()["t1"] == 200 and cluster.requests["t1"].state is not None
    cluster.turn("t2", "s", 1200, 160)
    cluster.run(30.0)
    assert fetched(cluster) == 1
    cluster.run(20.0 + FETCH_PAUSE_S)
    cluster.turn("t3", "s", 1500, 40)
    cluster.run(100.0)
    assert fetched(cluster) == 2
