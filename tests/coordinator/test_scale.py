"""What one event costs does not grow with the number of workers: counted, not timed. See `python -m benchmarks coordinator`."""

import cProfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from benchmarks.coordinator_scale import LIMITS, ScaledCluster
from coordinator.events import Action, Event, PeerDown, PeerUp, Received, Tick
from proto.messages import CacheEvents, Role, StepDone
from proto.parts import Capacity
from proto.progress import DecodeProgress
from proto.status import KvHeld
from scheduler.cluster import STEPS_PER_EVENT
from scheduler.workers.candidates import EXAMINED_MAX
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker

SERVED = 200


class Watched(dict[int, Any]):
    """Counts the workers that come up when all are gone through."""

    counts: Counter[str]

    def __iter__(self):
        return self._counted(super().__iter__())

    def values(self):
        return self._counted(super().values())

    def items(self):
        return self._counted(super().items())

    def _counted(self, found):
        for one in found:
            self.counts["gone through"] += 1
            yield one


def work(monkeypatch: pytest.MonkeyPatch, pairs: int, limited_by: str) -> Counter[str]:
    """Per request, once workers are busy: workers asked for room, looked up in caches, and gone through with all others."""
    cluster = ScaledCluster(pairs, tenants=100, limited_by=limited_by)
    for _ in range(50 * pairs):
        cluster.submit()
    warm = 20 * pairs
    cluster.run(warm, refill=True)
    counts: Counter[str] = Counter()
    looked_up = Pool.cached_tokens
    core = cluster.cluster.core
    pool = core.cluster.pools["m"]
    for owner, name in ((pool, "prefill"), (pool, "decode"), (core.cluster, "workers")):
        watched = Watched(getattr(owner, name))
        watched.counts = counts
        setattr(owner, name, watched)

    def counted(fits: Callable[..., bool]) -> Callable[..., bool]:
        def counted_fits(*arguments: Any, **named: Any) -> bool:
            counts["fits"] += 1
            return fits(*arguments, **named)

        return counted_fits

    def counted_look_ups(*arguments: Any) -> int:
        counts["looked up"] += 1
        return looked_up(*arguments)

    with monkeypatch.context() as patch:
        for kind in (PrefillWorker, DecodeWorker):
            patch.setattr(kind, "fits", counted(kind.fits))
        patch.setattr(Pool, "cached_tokens", counted_look_ups)
        cluster.run(warm + SERVED, refill=True)
    return Counter({name: round(count / SERVED) for name, count in counts.items()})


@pytest.mark.parametrize("limited_by", LIMITS)
def test_work_per_request_flat_in_workers(monkeypatch: pytest.MonkeyPatch, limited_by: str) -> None:
    """Placement work per request does not grow with the number of workers."""
    few, many = work(monkeypatch, EXAMINED_MAX, limited_by), work(monkeypatch, 6 * EXAMINED_MAX, limited_by)
    assert few["fits"] > 0
    for name in ("fits", "looked up", "gone through"):
        assert many[name] <= max(1.2 * few[name], 2 * EXAMINED_MAX), (name, few, many)


def calls(pairs: int) -> float:
    """Function calls of the core per request, with thousands of tenants waiting."""
    cluster = ScaledCluster(pairs, tenants=1_000, limited_by="prefill")
    for _ in range(2_000 + 20 * pairs):
        cluster.submit()
    served = 300
    cluster.run(4 * pairs, refill=True)
    core = cluster.cluster.core
    profiler, handle = cProfile.Profile(), core.handle
    steps = 0

    def counted(event: Event, now: float) -> list[Action]:
        nonlocal steps
        steps += isinstance(event, Received) and isinstance(event.message, StepDone)
        profiler.enable()
        try:
            return handle(event, now)
        finally:
            profiler.disable()

    core.handle = counted  # type: ignore[method-assign]
    cluster.run(4 * pairs + served, refill=True)
    assert steps < 3 * served, "prompts of two chunks do not pile up half computed"
    return sum(row.callcount for row in profiler.getstats()) / served


def test_calls_per_request_flat_in_pairs() -> None:
    """Function calls per request with 64 pairs of workers are at most 1.5 times those with one."""
    few, many = calls(1), calls(64)
    assert many <= 1.5 * few, (few, many)


def test_stream_progress_schedules_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is freed by it, so nothing is scheduled."""
    scaled = ScaledCluster(4, tenants=10, limited_by="prefill")
    for _ in range(100):
        scaled.submit()
    asked: list[int] = []
    monkeypatch.setattr(
        "scheduler.placement.schedule._fill", lambda state, worker, *_: asked.append(worker.incarnation)
    )
    cluster = scaled.cluster
    for decode in cluster.decode:
        cluster.receive(decode, DecodeProgress(5, 0, 0))
        cluster.receive(decode, KvHeld(0, 0, 0))
    for prefill in cluster.prefill:
        cluster.receive(prefill, CacheEvents(b"", b""))
    assert not asked


def test_equal_worker_change_skips_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting request is examined when one of several equal workers leaves and joins again. A different worker makes each
    be examined once, a bounded number per event."""
    scaled = ScaledCluster(4, tenants=10, limited_by="prefill")
    for _ in range(500):
        scaled.submit()
    core, now = scaled.cluster.core, scaled.cluster.now
    examined: list[str] = []
    can_run = core.cluster.can_run
    monkeypatch.setattr(core.cluster, "can_run", lambda request: examined.append(request.id) or can_run(request))
    hellos = {
        incarnation: core.members.peers[incarnation]
        for incarnation in (*list(core.cluster.workers)[:1], *list(core.cluster.workers)[-1:])
    }
    assert {hello.role for hello in hellos.values()} == {Role.PREFILL, Role.DECODE}
    for incarnation, hello in hellos.items():
        core.handle(PeerDown(incarnation, "killed"), now)
        core.handle(PeerUp(incarnation, hello), now)
    assert not examined
    larger = Capacity(10**6, 16, 1000, 100_000)
    prefill = next(hello for hello in hellos.values() if hello.role is Role.PREFILL)
    core.handle(PeerUp(500, msgspec.structs.replace(prefill, incarnation=500, name="larger", capacity=larger)), now)
    while core.cluster.spread.jobs:
        before = len(examined)
        core.handle(Tick(), now)
        assert len(examined) - before <= STEPS_PER_EVENT
    assert len(set(examined)) == len(examined) > 400, "what waits may run there now, so each is looked at once"
