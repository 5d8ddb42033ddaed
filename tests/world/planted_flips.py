"""Bugs of changes of role."""

import pytest

from coordinator.recovery import draining, flips
from coordinator.state import State
from engine.kv.allocator import BlockAllocator
from proto.drain import Drained
from proto.messages import Role
from scheduler.workers.worker import Worker
from tests.world.planted import Planted
from worker.changeover import Changeover
from worker.service import Service

BUGS = Planted()
bug = BUGS.add


@bug
def a_worker_changes_its_role_with_streams_on_it(m: pytest.MonkeyPatch) -> None:
    """It does not wait until it holds nothing."""
    m.setattr(Service, "may_flip", lambda self, empty: self.flips_to is not None and self.is_ready)


@bug
def one_role_of_a_mixed_worker_goes_before_the_other(m: pytest.MonkeyPatch) -> None:
    """The change is made as soon as one of them holds nothing."""

    def look(self: Changeover) -> None:
        if self._is_ready and not self.is_decided and any(half.could_flip for half in self._halves):
            self.is_decided = True
            for half in self._halves:
                half.flip()

    def dismiss(state: State) -> None:
        for worker in state.cluster.draining.values():
            if not (worker.dismissed or worker.allocations or worker.steps):
                worker.dismissed = True
                state.send(worker.incarnation, Drained())

    m.setattr(Changeover, "look", look)
    m.setattr(draining, "dismiss", dismiss)


@bug
def the_last_worker_of_a_role_leaves_it(m: pytest.MonkeyPatch) -> None:
    """Nobody looks whether another one serves in it."""
    m.setattr(flips, "_is_last", lambda state, worker: False)


@bug
def two_leave_a_role_at_once(m: pytest.MonkeyPatch) -> None:
    """Each counts on the other, which is drained as well."""

    def is_last(state: State, worker: Worker) -> bool:
        pool = state.cluster.pools[worker.hello.model]
        side = pool.prefill if worker.hello.role is Role.PREFILL else pool.decode
        return all(other is worker for other in side.values())

    m.setattr(flips, "_is_last", is_last)


@bug
def a_worker_that_changes_its_role_gets_more(m: pytest.MonkeyPatch) -> None:
    """It is told to change and goes on to be placed on."""
    begin = draining.begin

    def begins(state: State, worker: Worker, hand_over_ms: float) -> None:
        begin(state, worker, hand_over_ms)
        if worker.incarnation in state.members.flipping:
            worker.draining = False

    m.setattr(draining, "begin", begins)


@bug
def a_worker_that_lost_its_coordinator_waits_for_ever_to_change(m: pytest.MonkeyPatch) -> None:
    """It says at each registration that it is drained, and nobody knows why."""
    m.setattr(Service, "keep_role", lambda self: setattr(self, "flips_to", None))


@bug
def what_was_cached_in_the_old_role_is_found_and_written_to(m: pytest.MonkeyPatch) -> None:
    """The new role takes all blocks for free, and their old names still stand."""
    close = BlockAllocator.close

    def all_are_free(self: BlockAllocator) -> None:
        close(self)
        self.pool.free[:] = range(self.total)

    m.setattr(BlockAllocator, "close", all_are_free)


@bug
def a_worker_that_cannot_is_drained_for_ever(m: pytest.MonkeyPatch) -> None:
    """Its coordinator does not place on it again."""
    m.setattr(draining, "end", lambda state, worker: None)
