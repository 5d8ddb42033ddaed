"""Placing what waits and keeping prefill workers busy: after every event, as much as there is room for."""

from coordinator.choice import best_prefill_first, expect_cached
from coordinator.lifecycle import State as Life
from coordinator.lifecycle import Trigger
from coordinator.placement import orders, reserve, room_anywhere
from coordinator.pool import Pool, Worker
from coordinator.queue import WaitQueue
from coordinator.request import CLAIM, Request
from coordinator.state import State
from coordinator.steps import compose


def schedule(state: State, now: float) -> None:
    for model, queue in state.queues.items():
        pool, most = state.pools[model], state.limits.steps_in_flight
        if pool.breakers.wake(now):
            pool.full.clear()
        if not queue.fair.size:
            continue
        if pool.claims:
            _place_claims(state, pool, queue, now)
        if pool.kept_for is not None:
            _place_kept(state, pool, queue, now)
        free = [worker for worker in pool.prefill.values() if len(worker.steps) < most]
        while free and queue.fair.size:
            # The one with the least to do first, or the first in the table would get two steps before another got one; of
            # those with nothing to do, the one that has done least.
            worker = (
                min(free, key=lambda w: (w.tokens_in_flight, w.tokens_forwarded, w.epoch)) if len(free) > 1 else free[0]
            )
            if not _fill(state, worker, pool, queue, now) or len(worker.steps) >= most:
                free.remove(worker)


def _place_claims(state: State, pool: Pool, queue: WaitQueue, now: float) -> None:
    """A request whose prefill worker was lost has had its turn, and has its room in decode: it goes on as soon as another
    prefill worker has room. (While its last attempt is not yet out of the decode worker, it may be placed in its turn.)"""
    for request in list(pool.claims.values()):
        decode = state.workers[request.course.claim[0]]
        if request.entry is None or request.state is not Life.QUEUED or (request.id, CLAIM) not in decode.holdings:
            continue
        for prefill in best_prefill_first(request.submit, pool):
            if not prefill.draining and prefill.fits(request.submit) and pool.may_pair(prefill, decode, now):
                state.drop_claim(request)
                if pool.kept_for is request:
                    queue.charge(request.path, pool.stop_keeping(now))  # others were let by before it got its own back
                if decode.fits(request.submit, request.expected_left):
                    expect_cached(request, prefill, pool)
                    _place(state, request, prefill, decode, queue, now)
                    queue.settle_on(request, prefill.epoch)
                break


def _place_kept(state: State, pool: Pool, queue: WaitQueue, now: float) -> None:
    """A request that was bypassed too often is placed as soon as there is room, though it is not its turn yet. Its tenant pays
    for what could not be placed meanwhile, and for the room as long as it has it, at what others were served before: so it
    waits for its next turn until they have had as much."""
    request = pool.waits_for_room()
    pair = room_anywhere(request, pool, now) if request is not None else None
    if request is None or pair is None:
        return
    expect_cached(request, pair[0], pool)
    _place(state, request, *pair, queue, now)
    pool.rent(request.key, pair[1], now)
    queue.settle_on(request, pair[0].epoch)


def _fill(state: State, worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Give a prefill worker one step more; False if there is nothing for it."""
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
    state.send(worker.epoch, step)
    for request in worker.steps[step.step_id][1]:
        state.billing.hold(request.id)
        if request.state is Life.PLACED:
            state.move(request, Trigger.DISPATCH, now)
    return True


def _place(state: State, request: Request, prefill: Worker, decode: Worker, queue: WaitQueue, now: float) -> None:
    state.drop_claim(request)
    queue.placed(request)
    reserve(request, prefill, decode)
    state.pools[request.submit.model].breakers.placed((prefill.epoch, decode.epoch), request.key)
    state.billing.hold(request.id, 2)
    request.begin().placed_at = now
    keep, take_in = orders(request, prefill, decode, state.peers[request.gateway_epoch])
    state.send(decode.epoch, keep)
    state.send(prefill.epoch, take_in, request.blob)
    request.blob = b""
    state.move(request, Trigger.PLACE, now, f"{prefill.hello.name} + {decode.hello.name}")
