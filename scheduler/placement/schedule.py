"""Places waiting requests and keeps prefill workers busy, after every event that may have made a placement or step possible.
Each pool's `Wakeups` note such events. Other events, like the progress of running streams, cause no work here.
"""

from collections.abc import Iterable
from itertools import islice

from scheduler.cluster import Cluster
from scheduler.decisions import Dispatched, NothingRuns
from scheduler.lifecycle import RequestState, Trigger
from scheduler.placement.pairs import any_pair, best_side, last_block
from scheduler.placement.paused_turns import resume_due
from scheduler.placement.place import bind, place_at_once
from scheduler.placement.preemption import give_shares
from scheduler.placement.steps import compose
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import bound_key
from scheduler.workers.candidates import EXAMINED_MAX
from scheduler.workers.pool import Pool
from scheduler.workers.worker import PrefillWorker, Worker

STEALS_MAX = 8  # a request that was bound to a worker so often stays where it is
LOOK_EVERY_S = 0.1  # how often streams that could give way are looked for at events that let no request be placed
STEPS_PER_EVENT_MAX = 16
"""Composing a step takes 0.3 ms or more. If one event makes room for more steps than this, as in a large cluster, other events
are handled between them."""


def schedule(cluster: Cluster, now: float) -> None:
    for model, queue in cluster.queues.items():
        pool = cluster.pools[model]
        if pool.breakers.wake(now):
            pool.wakeups.look_anew()
        queue.shares = pool.shares if pool.is_short(now) else None
        if pool.paused:
            resume_due(pool, queue, now)
        if pool.wakeups.due:
            _place_waiting(cluster, pool, queue, now)
        elif now - pool.looked_at >= LOOK_EVERY_S:
            give_shares(cluster, pool, queue, now)
        if queue.line.since is None:
            queue.clock.advance(now, cold=False, full=False, closed=())
        else:
            full = len(pool.wakeups.stuck) >= len(pool.prefill)
            queue.clock.advance(now, cold=not pool.servable(), full=full, closed=pool.wakeups.closed)


def _place_waiting(cluster: Cluster, pool: Pool, queue: WaitQueue, now: float) -> None:
    if not queue.fair.size:
        pool.wakeups.nothing_waits()
        return
    if pool.wakeups.for_all:
        _place_without_turn(cluster, pool, pool.returning(), now)
    _place_without_turn(cluster, pool, pool.large_request(now), now)
    _place_without_turn(cluster, pool, _suspects(pool, queue, now), now)
    _ask_workers(cluster, pool, queue, now)
    if not pool.wakeups.go_on_at_once:
        give_shares(cluster, pool, queue, now)
        if cluster.watch is not None and not pool.wakeups.asked_in_vain and len(pool.wakeups.idle):
            idle = pool.prefill[next(iter(pool.wakeups.idle))]
            cluster.watch(NothingRuns(idle))  # no class has room, so none is asked
    pool.wakeups.event_done()


def _place_without_turn(cluster: Cluster, pool: Pool, requests: Iterable[Request], now: float) -> bool:
    """Place requests that come before all others as soon as there is room. Returns whether one was placed."""
    found = False
    for request in requests:
        pair = any_pair(request, pool, now)
        if pair is not None:
            place_at_once(cluster, request, pair, now)
            found = True
    return found


def _suspects(pool: Pool, queue: WaitQueue, now: float) -> list[Request]:
    """The suspects whose trial in decode may begin. Those that have waited too long wait for a turn."""
    if not pool.trials.waiting:
        return []
    for request in pool.trials.overdue(now):
        queue.unsettle(request)
        pool.wakeups.request_came()
    return pool.trials.next()


def _ask_workers(cluster: Cluster, pool: Pool, queue: WaitQueue, now: float) -> None:
    """Ask the prefill workers that may find something, one after another, until none does or enough was done."""
    steps, pool.wakeups.go_on_at_once = 0, False
    while True:
        worker = pool.wakeups.next_to_ask(queue)
        if worker is None:
            if not _place_without_turn(cluster, pool, _suspects(pool, queue, now), now):
                return
        elif steps == STEPS_PER_EVENT_MAX:
            pool.wakeups.steps_max_reached()
            return
        elif _fill(cluster, worker, pool, queue, now):
            steps += 1
            if worker.undispatched:
                pool.wakeups.has_own_work(worker)
        elif not _steal(worker, pool, queue, now):
            pool.wakeups.found_nothing(worker)


def _steal(worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Let a worker with nothing to do take the last request bound to another worker, if it is the better one by now. Returns
    whether it did."""
    if not isinstance(worker, PrefillWorker) or not pool.wakeups.may_place_on(worker) or not pool.has_pair(worker, now):
        return False
    hosts = [pool.workers[one] for one in islice(pool.bindings.hosts, EXAMINED_MAX) if one != worker.incarnation]
    host = max(hosts, key=lambda w: (w.tokens_before, w.incarnation), default=None)
    if host is None:
        return False
    pool.bindings.hosts[host.incarnation] = pool.bindings.hosts.pop(host.incarnation)  # the others are looked at too
    request = next(reversed(host.bound.values()))
    if request.attempt_progress.moves >= STEALS_MAX or not worker.fits(request.submit):
        return False
    if queue.class_key(request) in pool.wakeups.closed:
        return False
    side = best_side(request, worker, pool, queue, now, bound_to=host)
    if side is None or side.worker is not worker:
        return False
    cached_there = request.cached_tokens
    bind(request, side, pool)
    if request.cached_tokens < cached_there:
        pool.waits.computed(last_block(request.submit, cached_there))
    queue.settle_on(request, bound_key(worker.incarnation))
    return True


def _fill(cluster: Cluster, worker: Worker, pool: Pool, queue: WaitQueue, now: float) -> bool:
    """Give a prefill worker one step more; False if there is nothing for it."""
    if pool.suspects and any(request.own_step for _, requests in worker.steps.values() for request in requests):
        return False  # nothing beside that one
    step = compose(cluster, worker, pool, queue, now)
    if step is None:
        return False
    requests = tuple(worker.steps[step.step_id][1])
    begun = tuple(r for r in dict.fromkeys(requests) if r.state is RequestState.PLACED)
    for request in begun:
        request.fire(Trigger.DISPATCH, now)
    cluster.decisions.append(Dispatched(worker, step, requests, begun))
    return True
