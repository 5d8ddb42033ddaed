"""Placing what waits and keeping prefill workers busy: after every event that may have made something possible.

Each pool notes what that is. `news`: a request has come, or a class of requests has room again, so any prefill worker that can
take a step may find something. `ready`: single prefill workers, which have done a step or for which something waits. Other
events, like the progress of running streams, make no work here.
"""

from itertools import islice

from coordinator.lifecycle import State as RequestState
from coordinator.lifecycle import Trigger
from coordinator.observer import NothingRuns
from coordinator.placement.choice import better_than_bound, expect_cached
from coordinator.placement.place import orders, prefill_for, reserve
from coordinator.placement.preemption import give_shares
from coordinator.placement.steps import compose
from coordinator.request import CLAIM, Request
from coordinator.state import State
from coordinator.waiting.queue import WaitQueue
from coordinator.waiting.queue_keys import bound_key
from coordinator.workers.candidates import EXAMINED_MAX
from coordinator.workers.circuit_breakers import NOBODY
from coordinator.workers.pool import Pool
from coordinator.workers.worker import Worker

STEALS_MAX = 8
"""A request that was bound to a worker so often stays where it is."""


def schedule(state: State, now: float) -> None:
    for model, queue in state.queues.items():
        pool = state.pools[model]
        if pool.breakers.wake(now):
            pool.wakeups.look_anew()
        if not pool.wakeups.due:
            continue
        if not queue.fair.size:
            pool.wakeups.nothing_waits()
            continue
        if pool.wakeups.for_all and pool.claims:
            _place_claims(state, pool, queue, now)
        if pool.rooms.reservation is not None:
            _place_kept(state, pool, queue, now)
        _place_lone(state, pool, queue, now)
        while (worker := pool.wakeups.next_to_ask(queue)) is not None or _place_lone(state, pool, queue, now):
            if worker is None:
                continue
            if _fill(state, worker, pool, queue, now):
                if worker.undispatched:
                    pool.wakeups.has_own_work(worker)
            elif not _steal(worker, pool, queue, now):
                pool.wakeups.found_nothing(worker)
        give_shares(state, pool, queue, now)
        if state.watch is not None and not pool.wakeups.asked_in_vain and len(pool.wakeups.idle):
            state.watch(NothingRuns(pool.prefill[next(iter(pool.wakeups.idle))]))  # no class has room, so none is asked
        pool.wakeups.event_done()


def _steal(worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """It finds nothing to do: of what is bound to another worker, it takes what came last, if that starts earlier here."""
    if not pool.wakeups.may_place_on(worker) or not pool.has_pair(worker, now):
        return False
    hosts = [
        pool.prefill[incarnation]
        for incarnation in islice(pool.hosts, EXAMINED_MAX)
        if incarnation != worker.incarnation
    ]
    host = max(hosts, key=lambda w: (w.tokens_before, w.incarnation), default=None)
    if host is None:
        return False
    pool.hosts[host.incarnation] = pool.hosts.pop(host.incarnation)  # the others are looked at too
    request = next(reversed(host.bound.values()))
    if request.attempt_progress.moves >= STEALS_MAX or not worker.fits(request.submit):
        return False
    if not better_than_bound(request, worker, host, pool, pool.kept_waiting(worker, len(queue)), now):
        return False
    pool.unbind(request)
    expect_cached(request, worker, pool)
    pool.bind(request, worker)
    queue.settle_on(request, bound_key(worker.incarnation))
    return True


def _place_claims(state: State, pool: Pool, queue: WaitQueue, now: float) -> None:
    """A request whose prefill worker was lost has had its turn, and has its room in decode: it goes on as soon as another
    prefill worker has room. (While its last attempt is not yet out of the decode worker, it may be placed in its turn.)"""
    for request in list(pool.claims.values()):
        decode = state.workers[request.attempt_progress.carried_reservation[0]]
        if (
            request.entry is None
            or request.state is not RequestState.QUEUED
            or (request.id, CLAIM) not in decode.holdings
        ):
            continue
        prefill = prefill_for(request, decode, pool, now)
        if prefill is None:
            continue
        state.drop_claim(request)
        if decode.fits(request.submit, request.expected_left):
            _place_out_of_turn(state, request, prefill, decode, now)


def _place_kept(state: State, pool: Pool, queue: WaitQueue, now: float) -> None:
    """A request that was bypassed too often is placed as soon as the decode worker kept for it has room, though it may not be
    its turn yet. Its tenant pays for the time in which that worker took nobody else."""
    rooms = pool.rooms
    request, decode = rooms.reservation, pool.decode.get(rooms.kept_on)
    assert request is not None
    if decode is None or decode.draining or not pool.could_place(request.submit):
        rooms.stop_keeping(now)  # which is nobody's fault
        pool.wakeups.look_anew()
        return
    if not pool.decode_fits(decode, request):
        return
    prefill = prefill_for(request, decode, pool, now)
    if prefill is not None:
        _place_out_of_turn(state, request, prefill, decode, now)
    elif not rooms.kept_prefill:
        able = [w for w in pool.prefill.values() if not w.draining and w.could_ever_take(request.submit)]
        able = [w for w in able if pool.may_pair(w, decode, now)]
        rooms.kept_prefill = (
            max(able, key=lambda w: (w.free_blocks, w.free_seqs, w.incarnation)).incarnation if able else 0
        )


def _place_lone(state: State, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Whether a request that is to run alone got a decode worker of its own: it has had its turn, and one has become empty."""
    request = next((one for one in pool.rooms.lone.values() if one.entry is not None), None)
    if request is None or pool.rooms.lone_runs is not None:
        return False
    decode = pool.own_worker(request)
    if decode is None or decode.holdings or not decode.fits(request.submit, request.expected_left):
        return False
    prefill = prefill_for(request, decode, pool, now)
    if prefill is None:
        return False
    del pool.rooms.lone[request.id]
    pool.rooms.lone_runs = request
    _place_out_of_turn(state, request, prefill, decode, now)
    return True


def _place_out_of_turn(state: State, request: Request, prefill: Worker, decode: Worker, now: float) -> None:
    pool, queue = state.pools[request.submit.model], state.queues[request.submit.model]
    pool.unbind(request)
    expect_cached(request, prefill, pool)
    _place(state, request, prefill, decode, queue, now)
    queue.settle_on(request, prefill.incarnation)
    pool.wakeups.waits_no_more(request)
    pool.wakeups.has_own_work(prefill)


def _fill(state: State, worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Give a prefill worker one step more; False if there is nothing for it."""
    if pool.suspects and any(request.own_step for _, requests in worker.steps.values() for request in requests):
        return False  # nothing beside that one
    step = compose(
        worker,
        pool,
        queue,
        state.limits,
        lambda request, prefill, decode: _place(state, request, prefill, decode, queue, now),
        now,
        state.watch,
    )
    if step is None:
        return False
    state.send(worker.incarnation, step)
    for request in worker.steps[step.step_id][1]:
        state.billing.hold(request.id)
        if request.state is RequestState.PLACED:
            state.move(request, Trigger.DISPATCH, now)
    return True


def _place(state: State, request: Request, prefill: Worker, decode: Worker, queue: WaitQueue, now: float) -> None:
    pool = state.pools[request.submit.model]
    state.drop_claim(request)
    pool.unbind(request)
    queue.placed(request)
    reserve(request, prefill, decode)
    queue.count_uncomputed(request, request.submit.prompt_tokens - request.cached_tokens)
    if pool.rooms.reservation is request:
        pool.rooms.reservation_charge(
            request.key, decode.holdings[request.key].kv_blocks / decode.capacity.kv_blocks, now
        )
        pool.wakeups.look_anew()
    one, other = prefill.incarnation, decode.incarnation
    for pair in ((one, other), (one, NOBODY), (NOBODY, other)):
        pool.breakers.placed(pair, request.key)
    state.billing.hold(request.id, 2)
    request.begin().placed_at = now
    keep, take_in = orders(request, prefill, decode, state.peers[request.gateway_incarnation])
    state.send(decode.incarnation, keep)
    state.send(prefill.incarnation, take_in, request.blob)
    request.blob = b""
    state.move(request, Trigger.PLACE, now, f"{prefill.hello.name} + {decode.hello.name}")
