"""The garbage collector rests while a process loads, and works from then on, on what came since."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from runtime.process import garbage_collector as collector


class Ring:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_loaded_objects_are_not_collected() -> None:
    """Objects made while the collector rests are frozen; later garbage is collected."""
    gc.collect()
    with collector.at_rest():
        assert not gc.isenabled()
        for_good = weakref.ref(Ring())
    assert gc.isenabled() and gc.get_freeze_count() > 1000
    later = weakref.ref(Ring())
    gc.collect()
    assert for_good() is not None and later() is None


def test_collector_resumes_after_failed_load() -> None:
    """The garbage collector is enabled again if loading fails."""
    with pytest.raises(OSError), collector.at_rest():
        raise OSError("no such model")
    assert gc.isenabled()


def test_full_collections_wait_for_quiet() -> None:
    """Full collections wait for a quiet moment, or for a minute and a short backlog."""
    policy = collector.FullCollections(now=0.0, idle_s=0.2, every_s=60.0)
    busy = [policy.due(events, 20_000, events / 10) for events in range(1, 2000)]
    assert not any(busy), "under load, however long ago the last one was"
    assert not policy.due(1999, 20_000, 199.95)
    assert policy.due(1999, 20_000, 200.2), "quiet"
    assert not policy.due(2000, 10, 260.1), "not a minute since the last"
    assert policy.due(2001, 10, 260.3), "busy, but with few requests"


def test_full_collections_need_new_events() -> None:
    """A full collection is due only after new events."""
    policy = collector.FullCollections(now=0.0, idle_s=0.2, every_s=60.0)
    assert policy.due(1, 0, 60.0)
    assert not policy.due(1, 0, 1000.0), "nothing has happened since"
    assert policy.due(2, 0, 1000.4), "a new event may have left garbage"


def test_idle_process_collects_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle process collects cycles, though full collections by threshold are off."""
    monkeypatch.setattr(collector, "_LOOK_S", 0.0)
    before, seconds = gc.get_threshold(), iter(range(10_000))

    async def body() -> None:
        collecting = asyncio.create_task(collector.collect_seldom(lambda: (1, 20_000), lambda: float(next(seconds))))
        await asyncio.sleep(0)
        assert gc.get_threshold() == (*before[:2], collector.NEVER)
        garbage = weakref.ref(Ring())
        for _ in range(1000):
            await asyncio.sleep(0)
            if garbage() is None:
                break
        assert garbage() is None
        collecting.cancel()
        await asyncio.wait([collecting])

    asyncio.run(body())
    assert gc.get_threshold() == before
