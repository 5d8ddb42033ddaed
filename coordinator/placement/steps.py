"""Which chunks make up one prefill forward pass."""

from collections.abc import Callable
from itertools import islice
from math import inf

from coordinator.events import Limits
from coordinator.fairness.offers import Close, MoveTo
from coordinator.lifecycle import State
from coordinator.observer import Look, NothingRuns, Watch, watched
from coordinator.placement.choice import better_prefill, expect_cached
from coordinator.placement.place import room
from coordinator.request import Request
from coordinator.waiting.queue import WaitQueue
from coordinator.waiting.queue_keys import LONE_KEY, Demand, bound_key, class_key, classes_without_room, is_class
from coordinator.workers.pool import Pool
from coordinator.workers.worker import Worker
from proto import limits
from proto.messages import Chunk, Step

Place = Callable[[Request, Worker, Worker], None]
MOVES_MAX = 4
"""How often a request is bound to a worker for what that one has cached; after that it runs where its turn comes."""

LOOKED_AT_MAX = 64
"""Prompts half computed on a prefill worker, at one step."""
BEGUN_MAX = 8
"""Prompts half computed on a prefill worker. Where there are more, one whose rest fits a step is finished in the next step.

A longer one goes before later ones of its user and before those of other users of its organisation, unless an organisation
waits that has had much less than its share. With thousands of users, prompts would otherwise wait half computed while all
others have a turn, and take up room in prefill and decode.
"""


def compose(
    worker: Worker, pool: Pool, queue: WaitQueue, options: Limits, place: Place, now: float, watch: Watch | None = None
) -> Step | None:
    """The next step of a prefill worker, in the fair order, up to the token budget; None if there is nothing it can do.

    Prompts still queued compete with those already placed here; `place` is called for one whose first chunk is taken. Only
    a prompt's last chunk may end inside a KV block, so that every block is sent once.
    """
    block_size = worker.capacity.block_size
    chunks: list[Chunk] = []
    requests: list[Request] = []
    left = max(worker.pace.budget, block_size)
    decode: Worker | None = None

    def length_of(request: Request) -> int | Close | MoveTo:
        """How much of a prompt fits what is left."""
        nonlocal decode
        if request.state is State.QUEUED:
            assert request.entry is not None
            in_class = is_class(request.entry.key)
            if in_class and request.attempt_progress.moves < MOVES_MAX:
                waiting = pool.kept_waiting(worker, len(queue))
                better = better_prefill(request.submit, worker, pool, waiting, now)
                if better is not None:
                    pool.cache_waits += 1
                    expect_cached(request, better, pool)
                    pool.bind(request, better)
                    return MoveTo(bound_key(better.incarnation))
            elif not in_class and (key := queue.class_key(request)) in pool.wakeups.closed:
                pool.unbind(request)  # many may be bound, and to look for room for each would take long
                return MoveTo(key)
            decode = room(request, worker, pool, now)
            if decode is None:
                return _refuse(request, worker, pool, queue)
            expect_cached(request, worker, pool)
            _count_bypass(request, worker, pool, queue, options.bypasses_max, now)
        return _fitting(request, left, block_size)

    begun = _goes_on(worker, left, pool, queue, now)
    if begun is not None:
        length = _fitting(begun, left, block_size)
        queue.go_on(begun, length, worker.incarnation, now)
        _add(begun, length, worker, chunks, requests)
        left = 0 if begun.own_step else left - length
    look = length_of if watch is None else watched(length_of, watch, worker, pool)
    look = _apart(look, worker, pool, chunks) if pool.suspects else look
    while left >= block_size and len(chunks) < limits.MAX_CHUNKS_PER_STEP:
        found = queue.next_chunk(worker.incarnation, pool.wakeups.open_keys(worker, queue), look, now)
        request = found.request
        if request is None:
            if found.gave_up:
                pool.wakeups.gave_up()
            if watch is not None:
                watch(NothingRuns(worker))
            break
        if request.state is State.QUEUED:
            assert decode is not None
            place(request, worker, decode)
        _add(request, found.length, worker, chunks, requests)
        left = 0 if request.own_step else left - found.length
    return worker.begin_step(chunks, requests) if chunks else None


def _apart(look: Look, worker: Worker, pool: Pool, chunks: list[Chunk]) -> Look:
    """Suspected requests run in steps of their own, and then on decode workers of their own."""
    waits = False

    def length_of(request: Request) -> int | Close | MoveTo:
        nonlocal waits
        if request.own_worker and request.state is State.QUEUED:
            pool.unbind(request)
            pool.rooms.lone[request.id] = request
            return MoveTo(LONE_KEY)
        waits = waits or (request.own_step and bool(chunks or worker.steps))
        return Close() if waits else look(request)  # nothing more, so that nothing is before it the next time

    return length_of


def _add(request: Request, length: int, worker: Worker, chunks: list[Chunk], requests: list[Request]) -> None:
    chunks.append(Chunk(request.id, request.attempt, request.dispatched_tokens - length, length))
    requests.append(request)
    if request.entry is None:
        worker.expect_no_more(request)
    else:
        worker.expect(request)
        worker.begun = request if len(worker.placed) > BEGUN_MAX else None


def _fitting(request: Request, left: int, block_size: int) -> int:
    """Tokens of its prompt for a step in which so many are left."""
    remaining = request.submit.prompt_tokens - request.dispatched_tokens
    return remaining if remaining <= left else left - left % block_size


def _goes_on(worker: Worker, left: int, pool: Pool, queue: WaitQueue, now: float) -> Request | None:
    """A prompt half computed here whose next chunk comes before all others."""
    begun, worker.begun = worker.begun, None
    urgent = _most_urgent(worker, now)
    if urgent is not None:
        return urgent
    return begun if begun is not None and _may_go_on(begun, left, worker, pool, queue) else None


def _most_urgent(worker: Worker, now: float) -> Request | None:
    """The prompt half computed here that is due first, of those with a time for their first token of which not half is left.
    Admission let them in since their tenants' shares suffice. In turn, all that come later would go before them with the credit
    of tenants that were idle, and they would be late."""
    first, first_due = None, inf
    for request in islice(worker.placed.values(), LOOKED_AT_MAX):
        if (ms := request.first_token_ms) and not request.own_step:
            due = request.arrived + ms / 1000
            if due < first_due and now > due - ms / 2000 and due > now:
                first, first_due = request, due
    return first


def _may_go_on(begun: Request, left: int, worker: Worker, pool: Pool, queue: WaitQueue) -> bool:
    """Whether the next chunk of a prompt comes before all others: not while somebody waits who has had less than its share."""
    if begun.entry is None or worker.placed.get(begun.id) is not begun or (begun.own_step and worker.steps):
        return False
    keys = pool.wakeups.open_keys(worker, queue)
    if queue.fair.has_late(keys):
        return False
    if begun.submit.prompt_tokens - begun.dispatched_tokens <= left:
        return True
    following = queue.peek(keys)
    if following is None or following.entry is None or following.path[:2] != begun.path[:2]:
        return False
    return following.path != begun.path or following.entry.due >= begun.entry.due


def _refuse(request: Request, worker: Worker, pool: Pool, queue: WaitQueue) -> Close | MoveTo:
    """There is no room for it: on this prefill worker, or on no decode worker."""
    pool.no_room += 1
    demand = Demand.of(request.submit, request.expected_left, request.tpot_ms)
    key, own = class_key(demand), request.entry.key  # type: ignore[union-attr]
    if not worker.fits(request.submit) or pool.breakers.concern(worker.incarnation):
        pool.wakeups.no_room_on(worker, own, request)
        return Close()
    shut = [key, *classes_without_room(demand, queue.classes())]
    pool.wakeups.no_room_in_decode(request, shut)
    if own == key:
        return Close(shut)
    pool.unbind(request)  # room in decode is what it waits for
    return MoveTo(key)


def _count_bypass(
    request: Request, worker: Worker, pool: Pool, queue: WaitQueue, bypasses_max: int, now: float
) -> None:
    """`request` gets room. The first in turn of those without room does not; if that happens often, room is kept for it."""
    full = [*pool.wakeups.closed, *pool.wakeups.stuck.get(worker.incarnation, ())]
    first = queue.peek(full) if full else None
    if first is None or first.state is not State.QUEUED or not queue.goes_before(first, request):
        return
    attempt_progress = first.begin()
    attempt_progress.bypassed += 1
    if attempt_progress.bypassed >= bypasses_max:
        pool.keep_room(first, queue.served_per_s, now)
