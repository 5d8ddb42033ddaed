"""The decision on the request whose turn it is on a prefill worker. Pure: `decide` changes nothing.

`steps.compose` asks the fair queue for one candidate after another, and applies each decision:

    Run               its next chunk goes into the step; if it was not placed yet, it is placed on this worker and `decode`
    PlaceElsewhere    it is placed on another prefill worker, which is idle and starts it at once
    Wait              it is bound to another worker, prefill or decode, and waits for a turn there
    NoRoom            its queue key is left out until room is freed; if it was bound to this worker, it waits in its class
    Apart             it is suspected of having ended workers, and does not run beside others
    Apart.ELSEWHERE   the decode worker for which it waited does not take it now: it waits in its demand class again
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from scheduler.lifecycle import RequestState
from scheduler.placement.choice import better_prefill, cached_tokens, choose_decode
from scheduler.placement.fetch import Beginning, beginning
from scheduler.placement.suffix import best_on_decode, takes, waits_behind
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import Demand, class_key, classes_without_room, is_class
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

MOVES_MAX = 4
"""How often a request may be bound to a worker that has more of it cached. After that it runs where its turn comes."""


class Run(NamedTuple):
    start: int  # the chunk's first token: those before it are dispatched or cached on the worker
    length: int
    decode: DecodeWorker | None  # none where the request is placed already
    copied: bytes
    """The prefix that is computed once more though another worker has it; empty if there is none. See `bindings`."""
    begins: Beginning = Beginning(0)  # the part of its prompt that need not be computed, if it is placed now


class PlaceElsewhere(NamedTuple):
    prefill: PrefillWorker
    decode: DecodeWorker


class Wait(NamedTuple):
    worker: Worker
    prefix: bytes
    """The last block of what that worker has cached and this one has not; empty if that worker is only faster, or a decode
    worker."""
    cached_tokens: int
    waits_s: float  # how much longer it waits there
    expected_s: tuple[float, float] = (0.0, 0.0)
    """How long the prompt is expected to take on that decode worker, and elsewhere."""


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


TurnOutcome = Run | PlaceElsewhere | Wait | NoRoom | Apart


def decide(
    request: Request, worker: Worker, pool: Pool, queue: WaitQueue, left: int, *, is_first: bool, now: float
) -> TurnOutcome:
    """Decide on the request whose turn it is on `worker`. `left`: unused tokens of the step's budget; `is_first`: the step is
    empty, and no other runs."""
    queued = request.state is RequestState.QUEUED
    if queued and pool.trials.concern(request, now):
        return Apart.TRIAL
    if request.own_step and not is_first:
        return Apart.OWN_STEP
    size = worker.capacity.block_size
    if not queued:
        return Run(request.dispatched_tokens, fitting(request, request.dispatched_tokens, left, size), None, b"")
    assert request.entry is not None and isinstance(worker, DecodeWorker | PrefillWorker)
    pool.lengths.expect(request, pool.shares)
    if isinstance(worker, DecodeWorker):
        return _suffix(request, worker, pool, queue, left, now)
    in_class, copied = is_class(request.entry.key), b""
    if in_class and request.attempt_progress.moves < MOVES_MAX:
        found = best_on_decode(request, pool, queue, now, worker)
        if found is not None and not waits_behind(request, pool, queue):
            return Wait(found.decode, b"", found.cached_tokens, 0.0, (found.there_s, found.elsewhere_s))
        waiting = pool.bindings.kept_waiting(worker, len(queue))
        better = better_prefill(request, worker, pool, waiting, now)
        if better is not None and better.worker is not worker:
            there = better.worker
            if not pool.wakeups.starts_at_once(there) or pool.breakers.concern(there.incarnation):
                return Wait(*better)
            # While it waited for its turn there, the next in turn here would get the room in decode.
            decode = room(request, there, pool, now)
            return PlaceElsewhere(there, decode) if decode is not None else _no_room(request, there, pool, queue)
        copied = better.prefix if better is not None else b""
    elif not in_class and class_key(_demand(request)) in pool.wakeups.closed:
        return NoRoom(in_decode=True)  # many may be bound, and to look for room for each would take long
    decode = room(request, worker, pool, now)
    if decode is None:
        return _no_room(request, worker, pool, queue, copied)
    begins = beginning(request.submit, worker, decode, pool, now)
    return Run(begins.tokens, fitting(request, begins.tokens, left, size), decode, copied, begins)


def _suffix(request: Request, worker: DecodeWorker, pool: Pool, queue: WaitQueue, left: int, now: float) -> TurnOutcome:
    """Decide on a request whose suffix a decode worker is to compute."""
    if not takes(worker, request, pool, now) or waits_behind(request, pool, queue):
        return Apart.ELSEWHERE
    start = cached_tokens(request.submit, worker, pool)
    return Run(start, fitting(request, start, left, worker.capacity.block_size), worker, b"")


def _no_room(request: Request, worker: PrefillWorker, pool: Pool, queue: WaitQueue, copied: bytes = b"") -> NoRoom:
    if not worker.fits(request.submit) or pool.breakers.concern(worker.incarnation):
        return NoRoom(False, (), copied)
    demand = _demand(request)
    return NoRoom(True, (class_key(demand), *classes_without_room(demand, queue.classes())), copied)


def room(request: Request, prefill: PrefillWorker, pool: Pool, now: float) -> DecodeWorker | None:
    """The best decode worker for a request that `prefill` could take, or None if it cannot run there now."""
    submit = request.submit
    if prefill.draining or not prefill.fits(submit):
        return None
    candidates = pool.decode_candidates(request, prefill, now)
    short = pool.short_targets()
    found = [worker for worker in candidates if pool.decode_fits(worker, request, short)]
    return choose_decode(request, prefill, found, pool, now)


def fitting(request: Request, start: int, left: int, block_size: int) -> int:
    """Returns how many prompt tokens from `start` on fit a step with `left` unused tokens. Only a prompt's last chunk may end
    inside a KV block, so that every block is sent once."""
    remaining = request.submit.prompt_tokens - start
    return remaining if remaining <= left else left - left % block_size


def _demand(request: Request) -> Demand:
    return Demand.of(request.submit, request.expected_left, request.tpot_ms)
