"""Which workers of a pool may take a request next, and for which requests there is room: without a look at all workers. Pure.

Prefill workers that can take a step are kept in the order of what they have to do, decode workers in the order of how full they
are, and both by prefix. So a decision looks at a few workers, however many there are; where there are few, it looks at all.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from coordinator.fairness.held_shares import HeldShares
from coordinator.request import Request
from coordinator.score import Weights
from coordinator.workers.circuit_breakers import NOBODY, Breakers
from coordinator.workers.ordered import Ordered
from coordinator.workers.prefix_index import Locality, hashes_per_block
from coordinator.workers.replication import Waits
from coordinator.workers.room_classes import RoomClasses
from coordinator.workers.token_targets import TokenTargets
from coordinator.workers.wakeups import Wakeups
from coordinator.workers.worker import Worker
from proto.messages import Role, Submit

EXAMINED_MAX = 8
"""Workers of each side that are compared for one request; where there are no more, all of them."""
_LEAST_FULL, _HOLDERS, _ALIKE = 4, 4, 4
"""Where there are more: so many of the least full decode workers, so many that have the prompt's beginning, and so many that
run only streams with the same target."""
TOKENS_PER_S = 1000.0
"""Of a prefill worker, while none of its pool has been measured."""


class Candidates:
    """Whoever changes a worker tells this (`changed`, `freed`)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.locality = Locality()
        self.breakers = Breakers()
        self.prefill: dict[int, Worker] = {}
        self.decode: dict[int, Worker] = {}
        self.rooms = RoomClasses()
        self.wakeups = Wakeups(self.prefill, self.rooms)
        self.shares = HeldShares()
        self.targets = TokenTargets()
        self._finish = Ordered()
        """Prefill workers, the one first that would be done first with a prompt of usual length."""
        self._usual_tokens = 1024.0
        self.waits = Waits()
        self.bound = 0
        """Requests that are bound to a prefill worker."""
        self.hosts: dict[int, None] = {}
        """Prefill workers to which requests are bound, longest first."""
        self.suspects: dict[str, Request] = {}
        """Those with a suspicion, by id."""
        self.claims: dict[str, Request] = {}
        """Those that lost their prefill worker and keep their room in decode, by id."""
        self._least_full = Ordered()
        """Decode workers that take work and have a sequence free; of equals, the one that was chosen longest ago."""
        self._stamp = 0
        self._block_sizes: list[int] = []
        self._mean_tokens_per_s = 0.0
        """Of the prefill workers measured; 0: to be counted anew."""

    def changed(self, worker: Worker) -> None:
        """What it holds or has to do has changed, or whether it takes work."""
        if worker.room is None:
            if worker.draining:
                self._finish.drop(worker.incarnation)
            else:
                done_s = (worker.tokens_before + self._usual_tokens) / self.rate(worker)
                self._finish.put(worker.incarnation, done_s, worker.tokens_forwarded)
            self.wakeups.steps_changed(worker)
            return
        self.targets.changed(worker)
        if worker.draining or worker.free_seqs <= 0:
            self._least_full.drop(worker.incarnation)
        else:
            self._stamp += 1
            self._least_full.put(worker.incarnation, worker.room.wholes - worker.capacity.kv_blocks, self._stamp)

    def first_to_finish(self) -> list[Worker]:
        """A few prefill workers that would be done first with a prompt that came to them now."""
        return [self.prefill[incarnation] for incarnation in islice(self._finish, EXAMINED_MAX)]

    def could_place(self, submit: Submit) -> bool:
        """Likewise, on workers that take work."""
        sides = (self.prefill, self.decode)
        return all(any(not w.draining and w.could_ever_take(submit) for w in side.values()) for side in sides)

    def may_pair(self, prefill: Worker, decode: Worker, now: float) -> bool:
        breakers, one, other = self.breakers, prefill.incarnation, decode.incarnation
        if not breakers.pairs:
            return True
        return (
            breakers.allows((one, other), now, lambda key: key in decode.holdings)
            and breakers.allows_worker((one, NOBODY), now, lambda key: key in prefill.holdings, len(self.prefill))
            and breakers.allows_worker((NOBODY, other), now, lambda key: key in decode.holdings, len(self.decode))
        )

    def has_pair(self, prefill: Worker, now: float) -> bool:
        """Whether anything may be placed on it, as far as its pairs go."""
        return any(not decode.draining and self.may_pair(prefill, decode, now) for decode in self.decode.values())

    # --- candidates -----------------------------------------------------------------------------------------------------

    def holders(self, role: Role, submit: Submit) -> list[Worker]:
        """Workers that have a beginning of a prompt; those with the longest first, but no more than a few."""
        side = self.prefill if role is Role.PREFILL else self.decode
        if len(side) <= EXAMINED_MAX:
            return list(side.values())
        found: list[int] = []
        for size in self._block_sizes:
            every = hashes_per_block(submit, size)
            found += self.locality.holders(role, submit.block_hashes, every, _HOLDERS) if every else ()
        return [side[incarnation] for incarnation in found]

    def decode_candidates(self, request: Request, prefill: Worker, now: float) -> list[Worker]:
        """Decode workers to which this prefill worker may send: the least full ones and those that have the prompt's beginning
        or only streams with the same target; where there are few, all. Not the one whose room is kept."""
        if len(self.decode) <= EXAMINED_MAX:
            there: Iterable[Worker] = self.decode.values()
            return [worker for worker in there if self._takes(worker, prefill, now)]
        holders = self.holders(Role.DECODE, request.submit)
        holders += [self.decode[incarnation] for incarnation in self.targets.alike(request, _ALIKE)]
        found = {worker.incarnation: worker for worker in holders if self._takes(worker, prefill, now)}
        looked = 0
        for incarnation in self._least_full:
            worker = self.decode[incarnation]
            if worker.free_seqs >= request.submit.choices and self._takes(worker, prefill, now):
                found[incarnation] = worker
                looked += 1
                if looked == _LEAST_FULL:
                    break
        return list(found.values())

    def _takes(self, decode: Worker, prefill: Worker, now: float) -> bool:
        if decode.draining or decode.incarnation in (self.rooms.kept_on, self.rooms.lone_on):
            return False
        return self.may_pair(prefill, decode, now)

    def decode_fits(self, decode: Worker, request: Request, waiting_ms: float = 0.0) -> bool:
        """Whether a decode worker has room for a request now, and no target is missed there for it. `waiting_ms`: the result of
        `waiting_target`."""
        if not decode.fits(request.submit, request.expected_left):
            return False
        return not self.targets.used or request.submit.choices <= self.targets.free_seqs(decode, request, waiting_ms)

    def waiting_target(self) -> float:
        """The strictest target for the time per token of those that wait without room; 0: none."""
        if not self.targets.used:
            return 0.0
        firsts = self.wakeups.closed.values()
        return min((first.tpot_ms for first in firsts if first.tpot_ms and first.waits), default=0.0)

    def rate(self, prefill: Worker) -> float:
        """Tokens per second; one not measured yet is taken for as fast as the others."""
        if prefill.tokens_per_s:
            return prefill.tokens_per_s
        if not self._mean_tokens_per_s:
            rates = [worker.tokens_per_s for worker in self.prefill.values() if worker.tokens_per_s]
            if not rates:
                return TOKENS_PER_S
            self._mean_tokens_per_s = sum(rates) / len(rates)
        return self._mean_tokens_per_s

    # --- room -----------------------------------------------------------------------------------------------------------

    def freed(self, worker: Worker) -> None:
        """It has let go of something, or what it holds is sure to take less."""
        rooms, wakeups = self.rooms, self.wakeups
        if worker.room is None:
            wakeups.prefill_room_freed(worker)
            if self.claims or rooms.lone or rooms.reservation is not None:
                wakeups.may_go_out_of_turn()
            return
        is_kept = worker.incarnation in (rooms.kept_on, rooms.lone_on)
        if self.claims or is_kept:
            wakeups.may_go_out_of_turn()
        if self.breakers.pairs:
            wakeups.pairs_changed()
        if wakeups.closed and not worker.draining and not is_kept:
            waiting_ms = self.waiting_target()
            wakeups.decode_room_freed(lambda request: self.decode_fits(worker, request, waiting_ms))

    def keep_room(self, request: Request, served_per_s: Callable[[float], float], now: float) -> None:
        """For a request that was bypassed too often, on the decode worker with the most room.

        `served_per_s`: cost at which tenants are served by all."""
        if self.rooms.reservation is not None or not self.could_place(request.submit):
            return
        fitting = [w for w in self.decode.values() if not w.draining and w.could_ever_take(request.submit)]
        fitting = [w for w in fitting if w.incarnation != self.rooms.lone_on]
        if not fitting:
            return
        worker = max(fitting, key=lambda w: (w.free_blocks, w.free_seqs, w.incarnation))
        share = worker.capacity.kv_blocks / sum(w.capacity.kv_blocks for w in self.decode.values())
        self.rooms.keep(request, worker.incarnation, share * served_per_s(now), now)

    def own_worker(self, request: Request) -> Worker | None:
        """The decode worker that is closed to others for a request that is to run alone: the one that has the least now."""
        rooms = self.rooms
        able = [w for w in self.decode.values() if not w.draining and w.could_ever_take(request.submit)]
        able = [w for w in able if w.incarnation != rooms.kept_on]
        kept = [w for w in able if w.incarnation == rooms.lone_on]
        worker = min(kept or able, key=lambda w: (len(w.holdings), w.incarnation), default=None)
        rooms.lone_on = worker.incarnation if worker is not None else 0
        return worker

    def free_own_worker(self, request: Request) -> None:
        """It runs alone no longer, or does not wait to."""
        rooms = self.rooms
        rooms.lone.pop(request.id, None)
        if rooms.lone_runs is request:
            rooms.lone_runs = None
        if rooms.lone_on and rooms.lone_runs is None and not rooms.lone:
            rooms.lone_on = 0
            self.wakeups.look_anew()

    # --- bound to a worker for what it has cached -----------------------------------------------------------------------

    def bind(self, request: Request, prefill: Worker) -> None:
        """From now on it counts among what waits for this worker."""
        self.unbind(request)
        attempt_progress = request.begin()
        attempt_progress.bound_to = prefill.incarnation
        attempt_progress.moves += 1
        prefill.bound[request.id] = request
        prefill.expect(request)
        self.bound += 1
        self.hosts[prefill.incarnation] = None
        self.wakeups.has_own_work(prefill)

    def kept_waiting(self, prefill: Worker, waiting: int) -> float:
        """How many requests wait a second longer for each second that this worker computes more. `waiting`: for the pool."""
        return (waiting - self.bound) / len(self.prefill) + len(prefill.bound)

    def unbind(self, request: Request) -> None:
        bound_to = request.attempt_progress.bound_to
        if not bound_to:
            return
        request.begin().bound_to = 0
        self.bound -= 1
        worker = self.prefill[bound_to]
        worker.expect_no_more(request)
        if not worker.bound:
            self.hosts.pop(bound_to, None)
