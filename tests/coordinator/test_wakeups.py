"""Nobody has to be asked who was not, and to ask changes nothing."""

import pytest

from coordinator.core import Core
from coordinator.events import Action, Event, Limits, Tick
from proto.messages import Step
from scheduler.placement import schedule, steps
from scheduler.placement.pairs import Side
from scheduler.placement.steps import NoRoom, Run, TurnOutcome, Wait, decide
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Worker
from tests.coordinator.logged_core import replay
from tests.coordinator.test_replay import contended_world, random_world
from tests.coordinator.world import MODEL, Harness, submit
from tests.helpers import first


class AsksAgain:
    """After each event, asks every worker that can be given a step about the first request under each key open to it."""

    asked = 0

    def before(self, core: Core, event: Event, now: float) -> None:
        pass

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        for model, pool in core.cluster.pools.items():
            assert pool.wakeups.for_all or not pool.wakeups.due
            for incarnation in () if pool.wakeups.go_on_at_once else pool.wakeups.idle:
                self.ask(pool, core.cluster.queues[model], pool.prefill[incarnation], now)

    def ask(self, pool: Pool, queue: WaitQueue, worker: Worker, now: float) -> None:
        for key in pool.wakeups.open_keys(worker, queue):
            request = queue.first((key,))
            if request is not None:
                self.asked += 1
                found = decide(request, worker, pool, queue, is_first=not worker.steps, now=now)
                assert not isinstance(found, Run), (request.id, worker.incarnation, found)


@pytest.mark.parametrize("seed", first(2, range(12)))
def test_no_ready_worker_misses_work(seed: int) -> None:
    """A worker that can take a step never finds work if it is asked again after an event."""
    for core in (random_world(seed), contended_world(seed)):
        again = AsksAgain()
        assert replay(core.event_log()).run(again) is None, "it acts as if nobody had been asked"


def test_moves_per_turn_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn moves a bounded number of requests, and the next event goes on."""
    h = Harness.make(prefill=2, limits=Limits(queue_requests_max=1000))

    def wait(request: Request, worker: Worker, pool: Pool, *_: object, **__: object) -> TurnOutcome:
        return Wait(Side(pool.prefill[11])) if worker.incarnation == 10 else NoRoom(in_decode=False)

    with monkeypatch.context() as nobody_is_asked:
        nobody_is_asked.setattr("scheduler.placement.schedule.compose", lambda *_: None)
        for number in range(steps.MOVES_PER_TURN_MAX + 10):
            h.receive(1, submit(f"r{number}"))
    monkeypatch.setattr(steps, "decide", wait)
    monkeypatch.setattr("scheduler.placement.schedule._steal", lambda *_: False)
    pool = h.core.cluster.pools[MODEL]
    pool.wakeups.request_came()
    h.post(Tick())
    assert len(pool.prefill[11].bound) == steps.MOVES_PER_TURN_MAX and pool.wakeups.for_all
    h.post(Tick())
    assert len(pool.prefill[11].bound) == steps.MOVES_PER_TURN_MAX + 10 and not pool.wakeups.for_all


def test_steps_per_event_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event gives a bounded number of steps, and a tick that is due at once goes on."""
    h = Harness.make(prefill=9, decode=2, limits=Limits(step_tokens=16))
    with monkeypatch.context() as nobody_is_asked:
        nobody_is_asked.setattr("scheduler.placement.schedule.compose", lambda *_: None)
        for number in range(9):
            h.receive(1, submit(f"r{number}", 16))
    monkeypatch.setattr(schedule, "STEPS_PER_EVENT_MAX", 4)
    h.core.cluster.pools[MODEL].wakeups.request_came()
    given = []
    for at_once in (True, True, False):
        h.post(Tick())
        given.append(len(h.take(Step)))
        assert (h.core.next_deadline() == h.now) is at_once
    assert given == [4, 4, 1]
