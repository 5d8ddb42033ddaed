"""The composition of one prefill forward pass: candidates in the fair order, and the decision on each."""

from itertools import islice
from math import inf

from proto.limits import MAX_CHUNKS_PER_STEP
from proto.messages import Chunk, Step
from scheduler.cluster import Cluster
from scheduler.lifecycle import RequestState
from scheduler.observer import Composed, Looked, NothingRuns, Outcome, StepEnd
from scheduler.placement.choice import expect_cached
from scheduler.placement.decide import Apart, NoRoom, PlaceElsewhere, Run, TurnOutcome, Wait, decide, fitting
from scheduler.placement.place import place, place_at_once
from scheduler.placement.step_end import nothing_more
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import TRIAL_KEY, bound_key
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Worker

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
    """The next step of a prefill worker, up to its token budget; None if there is nothing it can do. Prompts still queued
    compete with those already placed there."""
    plan = _Plan(worker)
    begun = _take_continuation(worker, plan.left, pool, queue, now)
    if begun is not None:
        length = fitting(begun, begun.dispatched_tokens, plan.left, worker.capacity.block_size)
        queue.go_on(begun, length, worker.incarnation, now)
        plan.add(begun, length)
    moves, end = 0, None
    while plan.has_space:
        keys = pool.wakeups.open_keys(worker, queue)
        request = queue.first(keys)
        if request is None:
            end = nothing_more(worker, pool, queue) if plan.chunks else None
            break
        is_first = not plan.chunks and not worker.steps
        decision = decide(request, worker, pool, queue, plan.left, is_first=is_first, now=now)
        if isinstance(decision, Run):
            _run(cluster, decision, request, worker, pool, queue, keys, now)
            plan.add(request, decision.length)
            moves = 0
            continue
        if decision is Apart.OWN_STEP:
            end = StepEnd.OWN_STEP
            break
        if isinstance(decision, PlaceElsewhere):
            _run_there(cluster, decision, request, worker, pool, queue, now)
            continue
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
    cluster: Cluster,
    decision: Run,
    request: Request,
    worker: Worker,
    pool: Pool,
    queue: WaitQueue,
    keys: list[int],
    now: float,
) -> None:
    """Charge for its next chunk, and place it if this is its first."""
    if decision.decode is not None:
        pool.waits.computed(decision.copied)
        request.cached_tokens = request.dispatched_tokens = decision.start
        _count_bypass(request, worker, pool, queue, cluster.limits.bypasses_max, now)
    if cluster.watch is not None:
        cluster.watch(Looked(worker, request, Outcome.TAKEN))
    queue.take(request, decision.length, worker.incarnation, keys, now)
    if decision.decode is not None:
        place(cluster, request, worker, decision.decode, now, decision.begins)


def _run_there(
    cluster: Cluster, decision: PlaceElsewhere, request: Request, own: Worker, pool: Pool, queue: WaitQueue, now: float
) -> None:
    """Place the request on the other, idle prefill worker that `decision` names."""
    _count_bypass(request, own, pool, queue, cluster.limits.bypasses_max, now)
    if cluster.watch is not None:
        cluster.watch(Looked(own, request, Outcome.TAKEN))
    place_at_once(cluster, request, decision.prefill, decision.decode, now)


def _key_after(decision: TurnOutcome, request: Request, queue: WaitQueue) -> int | None:
    """Returns the queue key under which the request is to wait next; None: it keeps its key."""
    if isinstance(decision, Wait):
        return bound_key(decision.worker.incarnation)
    if decision is Apart.TRIAL:
        return TRIAL_KEY
    if decision is Apart.ELSEWHERE:
        return queue.class_key(request)
    assert isinstance(decision, NoRoom) and request.entry is not None
    if not decision.in_decode:
        return None
    # It waits for room in decode, no matter which prefill worker has its prompt cached.
    key = queue.class_key(request)
    return key if key != request.entry.key else None


def _pass_over(decision: TurnOutcome, request: Request, worker: Worker, pool: Pool, now: float) -> None:
    """Record why the request does not run on this worker now."""
    match decision:
        case Wait(better, prefix, cached_tokens, waits_s, expected_s):
            pool.cache_waits += 1
            if prefix:
                pool.waits.add(prefix, cached_tokens, waits_s, now)
            expect_cached(request, better, pool)
            pool.bindings.bind(request, better)
            request.attempt_progress.there_s, request.attempt_progress.elsewhere_s = expected_s
        case NoRoom(in_decode, classes, copied):
            pool.waits.computed(copied)
            pool.no_room += bool(classes) or not in_decode
            if in_decode:
                pool.wakeups.no_room_in_decode(request, classes)
                pool.bindings.unbind(request)
            else:
                assert request.entry is not None
                pool.wakeups.no_room_on(worker, request.entry.key, request)
        case Apart.TRIAL:
            pool.bindings.unbind(request)
            pool.trials.wait(request)
        case Apart.ELSEWHERE:
            pool.bindings.unbind(request)
            pool.wakeups.came_back()


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
        if (ms := request.first_token_ms) and not request.own_step:
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
