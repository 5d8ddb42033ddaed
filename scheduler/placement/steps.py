"""The composition of one prefill step: candidates in the fair order, and the decision on each.

`compose` asks the fair queue for one candidate after another, and applies each decision:

    Run       its next chunk goes into the step; if it was not placed yet, it is placed on a pair of workers. If another, idle
              worker computes it, it is placed there at once
    Wait      it is bound to another worker, prefill or decode, and waits for a turn there
    NoRoom    its queue key is left out until room is freed; if it was bound to this worker, it waits in its class
    Apart     it is suspected of having ended workers, and does not run beside others
    Apart.ELSEWHERE   the decode worker for which it waited does not take it now: it waits in its demand class again
"""

from collections.abc import Sequence
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import NamedTuple

from proto.limits import MAX_CHUNKS_PER_STEP
from proto.messages import Chunk, Step
from scheduler.cluster import Cluster
from scheduler.decisions import Composed, Looked, NothingRuns, Outcome, StepEnd
from scheduler.lifecycle import RequestState
from scheduler.placement.pairs import (
    Beginning,
    Side,
    WorkerPair,
    best_side,
    last_block,
    may_compute,
    pair,
    waits_behind,
)
from scheduler.placement.place import bind, place, place_at_once
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import TRIAL_KEY, Demand, bound_key, class_key, classes_without_room, is_class
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker


def nothing_more(worker: Worker, pool: Pool, queue: WaitQueue) -> StepEnd:
    """Why no request can have a chunk on this prefill worker now."""
    if not len(queue):
        return StepEnd.NOTHING_WAITS
    if worker.free_seqs <= 0:
        return StepEnd.NO_ROOM_IN_PREFILL
    if worker.draining or worker.incarnation == pool.room_for_large.prefill:
        return StepEnd.WORKER_CLOSED
    first = _first_without_room(pool, queue)
    if first is not None:
        decode = pool.candidates.least_full()
        return StepEnd.NO_DECODE_SEQUENCES if decode is None else decode_limit(decode, first, pool)
    stuck = pool.wakeups.stuck.get(worker.incarnation, ())
    return StepEnd.NO_ROOM_IN_PREFILL if any(map(queue.fair.has, stuck)) else StepEnd.BOUND_ELSEWHERE


def decode_limits(pool: Pool, queue: WaitQueue) -> dict[StepEnd, int]:
    """Returns the number of decode workers for each reason why no more sequences run there."""
    first, found = _first_without_room(pool, queue), dict[StepEnd, int]()
    for worker in pool.decode.values():
        if not worker.free_seqs:
            end = StepEnd.FULL
        else:
            end = StepEnd.NOTHING_WAITS if first is None else decode_limit(worker, first, pool)
        found[end] = found.get(end, 0) + 1
    return found


def decode_limit(decode: DecodeWorker, first: Request, pool: Pool) -> StepEnd:
    """Why a request that found no room in decode is not on this worker."""
    if decode.draining or decode.incarnation == pool.room_for_large.decode:
        return StepEnd.WORKER_CLOSED
    if first.submit.choices > decode.free_seqs:
        return StepEnd.NO_DECODE_SEQUENCES
    if not decode.fits(first.submit, first.expected_left):
        return StepEnd.NO_DECODE_KV
    return StepEnd.TPOT_TARGET if pool.targets.used else StepEnd.WORKER_CLOSED


def _first_without_room(pool: Pool, queue: WaitQueue) -> Request | None:
    """The first request of a demand class that found no room in decode, where something of the class waits."""
    return next((first for key, first in pool.wakeups.closed.items() if queue.fair.has(key)), None)


MOVES_MAX = 4
"""How often a request may be bound to a worker that has more of it cached. After that it runs where its turn comes."""
MOVES_PER_TURN_MAX = 64  # requests that one turn may move to another queue key; the next event goes on from there
LOOKED_AT_MAX = 64  # most partly computed prompts of a prefill worker that are looked at for one step
URGENT = 2.0
"""A partly computed prompt goes first if it has less than so many times the time that its rest takes, behind the steps in
flight."""
BEGUN_MAX = 8
"""If a prefill worker has more partly computed prompts than this, the next step begins with the prompt served last, if it can
finish it.

If its rest is longer, it goes before later prompts of its user and those of its organisation's other users. Neither holds
while an organisation or priority class waits that had much less than its share. Otherwise, with thousands of users, prompts
would wait partly computed while all others have a turn, and would take up room in prefill and decode.
"""


class Run(NamedTuple):
    pair: WorkerPair | None = None  # none where the request is placed already
    copied: bytes = b""
    """The prefix that is computed once more though another worker has it; empty if there is none. See `bindings`."""


class Wait(NamedTuple):
    side: Side


class NoRoom(NamedTuple):
    in_decode: bool
    """No decode worker has room. If False, this prefill worker has no room, or no decode worker that it may send to has
    any."""
    classes: Sequence[int] = ()  # classes that are found to have no room in decode
    copied: bytes = b""  # as in `Run`, had there been room


class Apart(Enum):
    TRIAL = auto()  # it waits for a decode worker without another suspect
    OWN_STEP = auto()  # It waits for a step of its own. Nothing is put before it meanwhile.
    ELSEWHERE = auto()  # the decode worker that has its beginning does not take it now


TurnOutcome = Run | Wait | NoRoom | Apart


def decide(
    request: Request, worker: Worker, pool: Pool, queue: WaitQueue, *, is_first: bool, now: float
) -> TurnOutcome:
    """Decide on the request whose turn it is on `worker`, and change nothing. `is_first`: the step is empty, and no other
    runs."""
    queued = request.state is RequestState.QUEUED
    if queued and pool.trials.concern(request, now):
        return Apart.TRIAL
    if request.own_step and not is_first:
        return Apart.OWN_STEP
    if not queued:
        return Run()
    assert request.entry is not None
    pool.lengths.expect(request, pool.shares)
    if isinstance(worker, DecodeWorker):
        if not may_compute(worker, request, pool, now) or waits_behind(request, pool, queue):
            return Apart.ELSEWHERE
        return Run(WorkerPair(worker, worker, Beginning(pool.cached_tokens(request.submit, worker))))
    side, demand = Side(worker), Demand.of(request.submit, request.expected_left, request.tpot_ms)
    if not is_class(request.entry.key):
        if class_key(demand) in pool.wakeups.closed:
            return NoRoom(in_decode=True)  # many may be bound, and to look for room for each would take long
    elif request.attempt_progress.moves < MOVES_MAX:
        side = best_side(request, worker, pool, queue, now) or side
    if side.worker is not worker and not pool.starts_at_once(side.worker):
        return Wait(side)
    assert isinstance(side.worker, PrefillWorker)
    # If it waited for its turn on an idle worker, the next in turn here would get the room in decode.
    found = pair(request, side.worker, pool, now)
    if found is not None:
        return Run(found, side.copied)
    if not side.worker.fits(request.submit) or pool.breakers.concern(side.worker.incarnation):
        return NoRoom(False, (), side.copied)
    return NoRoom(True, (class_key(demand), *classes_without_room(demand, queue.classes())), side.copied)


def fitting(request: Request, left: int, block_size: int) -> int:
    """Returns how many prompt tokens fit a step with `left` unused tokens. Only a prompt's last chunk may end inside a KV
    block, so that every block is sent once."""
    remaining = request.submit.prompt_tokens - request.dispatched_tokens
    return remaining if remaining <= left else left - left % block_size


class _Plan:
    """The step in the making."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._block_size = worker, worker.capacity.block_size
        self.chunks: list[Chunk] = []
        self.requests: list[Request] = []
        self.left = max(worker.pace.budget, self._block_size)  # tokens of its budget

    @property
    def has_space(self) -> bool:
        return self.left >= self._block_size and len(self.chunks) < MAX_CHUNKS_PER_STEP

    @property
    def end(self) -> StepEnd:
        """Why it has no space."""
        if self.requests[-1].own_step:
            return StepEnd.OWN_STEP
        return StepEnd.FULL if self.left < self._block_size else StepEnd.MAX_CHUNKS

    def add(self, request: Request, length: int) -> None:
        """Add a chunk of `length` tokens, for which the request was charged."""
        self.chunks.append(Chunk(request.id, request.attempt, request.dispatched_tokens - length, length))
        self.requests.append(request)
        # A decode worker computes one chunk after the other.
        self.left = 0 if request.own_step or self._worker.is_decode else self.left - length
        if request.entry is None:
            self._worker.expect_no_more(request)
        else:
            self._worker.expect(request)
            self._worker.begun = request if len(self._worker.placed) > BEGUN_MAX else None


def compose(cluster: Cluster, worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> Step | None:
    """The next step of a worker, up to its token budget; None if there is nothing it can do. Prompts still queued compete with
    those already placed there."""
    plan, moves, end = _Plan(worker), 0, None
    begun = _take_continuation(worker, plan.left, pool, queue, now)
    if begun is not None:
        length = fitting(begun, plan.left, worker.capacity.block_size)
        queue.go_on(begun, length, worker.incarnation, now)
        plan.add(begun, length)
    while plan.has_space:
        keys = pool.wakeups.open_keys(worker, queue)
        request = queue.first(keys)
        if request is None:
            end = nothing_more(worker, pool, queue) if plan.chunks else None
            break
        is_first = not plan.chunks and not worker.steps
        decision = decide(request, worker, pool, queue, is_first=is_first, now=now)
        if isinstance(decision, Run):
            _run(cluster, decision, request, plan, worker, keys, now)
            moves = moves if decision.pair is not None and decision.pair.prefill is not worker else 0
            continue
        if decision is Apart.OWN_STEP:
            end = StepEnd.OWN_STEP
            break
        key = _key_after(decision, request, queue)
        if key is not None and moves == MOVES_PER_TURN_MAX:
            pool.wakeups.gave_up()
            end = StepEnd.GAVE_UP
            break
        _pass_over(decision, request, worker, pool, now)
        if cluster.watch is not None and decision is not Apart.TRIAL:
            cluster.watch(Looked(worker, request, Outcome.NO_ROOM if key is None else Outcome.WAITS))
        if key is not None:
            moves += 1
            queue.settle_on(request, key)
    if plan.has_space and cluster.watch is not None:
        cluster.watch(NothingRuns(worker))
    if not plan.chunks:
        return None
    end = end or plan.end
    pool.step_ends[end] += not worker.is_decode
    step = worker.begin_step(plan.chunks, plan.requests)
    if cluster.watch is not None:
        cluster.watch(Composed(worker, step.step_id, end))
    return step


def _run(
    cluster: Cluster, decision: Run, request: Request, plan: _Plan, worker: Worker, keys: list[int], now: float
) -> None:
    """Charge for its next chunk, and place it if this is its first. If it is another, idle worker's, it is placed there."""
    pool, queue, found = cluster.pools[request.submit.model], cluster.queues[request.submit.model], decision.pair
    if found is not None:
        pool.waits.computed(decision.copied)
        _count_bypass(request, worker, pool, queue, cluster.limits.bypasses_max, now)
    if cluster.watch is not None:
        cluster.watch(Looked(worker, request, Outcome.TAKEN))
    if found is not None and found.prefill is not worker:
        place_at_once(cluster, request, found, now)
        return
    if found is not None:
        request.cached_tokens = request.dispatched_tokens = found.begins.tokens
    length = fitting(request, plan.left, worker.capacity.block_size)
    queue.take(request, length, worker.incarnation, keys, now)
    if found is not None:
        place(cluster, request, found, now)
    plan.add(request, length)


def _key_after(decision: TurnOutcome, request: Request, queue: WaitQueue) -> int | None:
    """Returns the queue key under which the request is to wait next; None: it keeps its key, which has no room."""
    if isinstance(decision, Wait):
        return bound_key(decision.side.worker.incarnation)
    if decision is Apart.TRIAL:
        return TRIAL_KEY
    if isinstance(decision, NoRoom) and not decision.in_decode:
        return None
    # It waits for room in decode, no matter which prefill worker has its prompt cached.
    assert request.entry is not None
    key = queue.class_key(request)
    return key if key != request.entry.key or decision is Apart.ELSEWHERE else None


def _pass_over(decision: TurnOutcome, request: Request, worker: Worker, pool: Pool, now: float) -> None:
    """Record why the request does not run on this worker now."""
    match decision:
        case Wait(side):
            pool.cache_waits += 1
            here, there = (pool.cached_tokens(request.submit, one) for one in (worker, side.worker))
            if isinstance(side.worker, PrefillWorker) and there > here:
                waits_s = max(side.worker.tokens_before - worker.tokens_before, 0) / pool.rate(side.worker)
                pool.waits.add(last_block(request.submit, there), there, waits_s, now)
            bind(request, side, pool)
            return
        case NoRoom(in_decode, classes, copied):
            pool.waits.computed(copied)
            pool.no_room += bool(classes) or not in_decode
            if not in_decode:
                assert request.entry is not None
                pool.wakeups.no_room_on(worker, request.entry.key, request)
                return
            pool.wakeups.no_room_in_decode(request, classes)
        case Apart.TRIAL:
            pool.trials.wait(request)
        case Apart.ELSEWHERE:
            pool.wakeups.came_back()
    pool.bindings.unbind(request)


def _take_continuation(worker: Worker, left: int, pool: Pool, queue: WaitQueue, now: float) -> Request | None:
    """Returns a prompt to continue before all others. Clears `worker.begun`."""
    begun, worker.begun = worker.begun, None
    urgent = _most_urgent(worker, now)
    if urgent is not None:
        return urgent
    return begun if begun is not None and _may_go_on(begun, left, worker, pool, queue) else None


def _most_urgent(worker: Worker, now: float) -> Request | None:
    """A partly computed prompt that must go on now to have its first token in time; of several, the one that is due first.
    Admission accepted such requests because their tenants' shares suffice. If they waited for their turn, they would be late:
    later requests of tenants that were idle would go first with their saved credit."""
    first, first_due = None, inf
    for request in islice(worker.placed.values(), LOOKED_AT_MAX):
        if (ms := request.promised_ms) and not request.own_step:
            due = request.arrived + ms / 1000
            tokens = worker.tokens_in_flight + request.submit.prompt_tokens - request.dispatched_tokens
            rest_s = tokens / (worker.tokens_per_s or inf)
            if due < first_due and now > due - URGENT * rest_s and due > now:
                first, first_due = request, due
    return first


def _may_go_on(begun: Request, left: int, worker: Worker, pool: Pool, queue: WaitQueue) -> bool:
    """Whether the next chunk of a prompt comes before all others. It does not while an organisation or priority class waits
    that has had much less than its share."""
    if begun.entry is None or worker.placed.get(begun.id) is not begun or (begun.own_step and worker.steps):
        return False
    keys = pool.wakeups.open_keys(worker, queue)
    if queue.fair.has_late(keys):
        return False
    if begun.submit.prompt_tokens - begun.dispatched_tokens <= left:
        return True
    following = queue.first(keys)
    if following is None or following.entry is None or following.path[:2] != begun.path[:2]:
        return False
    return following.path != begun.path or following.entry.due >= begun.entry.due


def _count_bypass(
    request: Request, worker: Worker, pool: Pool, queue: WaitQueue, bypasses_max: int, now: float
) -> None:
    """Count a bypass for the first request in turn without room, since `request` gets room before it. After `bypasses_max` of
    them, room is kept for it."""
    full = [*pool.wakeups.closed, *pool.wakeups.stuck.get(worker.incarnation, ())]
    first = queue.first(full) if full else None
    if first is None or first.state is not RequestState.QUEUED or not queue.is_bypassed(first, request):
        return
    attempt_progress = first.attempt_progress
    attempt_progress.bypassed += 1
    room_for_large = pool.room_for_large
    if attempt_progress.bypassed >= bypasses_max and room_for_large.request is None and pool.could_place(first.submit):
        room_for_large.begin(first, queue.served_per_s(now), now)
