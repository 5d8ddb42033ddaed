"""Chooses streams that leave a decode worker: when its blocks run short, when answers outlive what they were counted with, or
when a tenant has less than its share while others have more. Pure.

A victim is interrupted like an attempt whose worker was lost: its gateway submits it again with the tokens already sent, and a
prefill worker computes their KV anew. The next attempt is counted with all tokens that it may still emit, so it is placed only
when there is room for all of them. It is chosen again only after all others, so that no answer is computed over and over.
"""

from collections.abc import Iterable

from proto.errors import Interrupt
from scheduler.cluster import Cluster
from scheduler.fairness.fair_node import Path
from scheduler.kv_admission.admission import Key, KvDemand
from scheduler.lifecycle import ON_WORKERS
from scheduler.request import RETAINED, Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker

PREEMPTED_MAX = 3  # a stream that was interrupted this often is not interrupted for a share again
SOON_S = 3.0  # no stream is interrupted for a share that comes free by itself within this many seconds
SOON_SHARE = 0.25  # the same bound, as a part of the waiting request's target for its first token
CHARGE_EVERY_S = 0.5
OUTLIVED_SHARE, OUTLIVED_MIN = 0.5, 8
"""A tenant's estimate is taken to be wrong where this part of its streams on a worker, and so many, have outlived it, or one
stream of an unproven tenant."""


def relieve(cluster: Cluster, worker: DecodeWorker, short_blocks: int, now: float) -> None:
    """Interrupt as many requests as needed: resumed ones last, else those of the lowest priority class first, then those of the
    tenant that holds most for its weight, then the newest. Blocks of attempts that are already leaving are counted first."""
    room, shares, classes = worker.admission, cluster.pools[worker.hello.model].shares, cluster.limits.priority_classes
    running: list[Request] = []
    for key, allocation in list(worker.allocations.items()):
        if key[1] == RETAINED:
            cluster.drop_retained(cluster.requests[key[0]])  # none of this room is in use
        elif (request := _running(cluster, worker, key)) is not None:
            running.append(request)
        elif not allocation.adopted:
            short_blocks -= room.held_now(key)

    def last(request: Request) -> tuple[object, ...]:
        held = shares.of(request.path[:2]), shares.of(request.path)
        newest = -request.attempt_progress.placed_at
        return request.resumed, classes[request.path[0]].weight, -held[0], -held[1], newest, request.key

    for request in sorted(running, key=last):
        blocks = room.held_now(request.key)
        if short_blocks > 0 and blocks:
            short_blocks -= blocks
            cluster.interrupt(request, Interrupt.PREEMPTED, f"{worker.hello.name} runs short of KV blocks", now)


def outlived(cluster: Cluster, worker: DecodeWorker, keys: Iterable[Key]) -> None:
    """Note that these attempts have more tokens than they were counted with."""
    pool, room = cluster.pools[worker.hello.model], worker.admission
    for key in keys:
        allocation, demand = worker.allocations[key], room.demand(key)
        assert demand is not None
        if allocation.path:
            pool.lengths.outlived(allocation.path, demand.counted // 2)
            pool.shares.recount(allocation.path, worker.incarnation, key, worker.stream(allocation.seqs, demand))


def give_back(cluster: Cluster, worker: DecodeWorker, now: float) -> None:
    """If what a worker has may come to need more than its pool, interrupt the newest streams of tenants whose answers outlive
    what they were counted with, until the rest fits."""
    room, pool = worker.admission, cluster.pools[worker.hello.model]
    if not room.outlived or room.wholes <= room.kv_blocks or room.peak <= room.kv_blocks:
        return
    outlives = _outliving(worker, pool)
    leave, may_leave = list[Key](), list[tuple[bool, float, Key]]()
    for key, allocation in worker.allocations.items():
        request = _running(cluster, worker, key)
        if request is None:
            leave.append(key)
        elif allocation.path in outlives and request.preempted < PREEMPTED_MAX:
            may_leave.append((request.resumed, -request.attempt_progress.placed_at, key))
    for _, _, key in sorted(may_leave):
        if room.peak_without(leave) <= room.kv_blocks:
            return
        leave.append(key)
        pool.gives_way = [*(one for one in pool.gives_way if one in cluster.where), key]
        why = f"answers of {'/'.join(worker.allocations[key].path)} are longer than was expected"
        cluster.interrupt(cluster.requests[key[0]], Interrupt.PREEMPTED, why, now)


def _outliving(worker: DecodeWorker, pool: Pool) -> set[Path]:
    """The tenants whose estimate is wrong. Of others it is a tail of long answers that outlive it."""
    streams: dict[Path, int] = {}
    outlived: dict[Path, int] = {}
    for key, allocation in worker.allocations.items():
        streams[allocation.path] = streams.get(allocation.path, 0) + 1
        if key in worker.admission.outlived:
            outlived[allocation.path] = outlived.get(allocation.path, 0) + 1
    return {
        path
        for path, count in outlived.items()
        if path and (not pool.lengths.is_proven(path) or count >= max(OUTLIVED_SHARE * streams[path], OUTLIVED_MIN))
    }


def _running(cluster: Cluster, worker: DecodeWorker, key: Key) -> Request | None:
    """The request of an attempt that decodes on a worker, or is to; None if it is leaving."""
    request = cluster.current(*key)
    there = request is not None and request.decode_incarnation == worker.incarnation and request.state in ON_WORKERS
    return request if there else None


def give_shares(cluster: Cluster, pool: Pool, queue: WaitQueue, now: float) -> None:
    """If the first request in turn has no room in decode, interrupt streams of the tenant that holds most for its weight. This
    happens only if `held_shares` allows it, too little comes free by itself, and the request then has room. The next
    interruption waits until the worker has released these streams."""
    freed_per_s, pool.looked_at = pool.freed_per_s(now), now
    if not pool.wakeups.closed or any(key in cluster.where for key in pool.gives_way):
        return
    request = queue.first(pool.wakeups.closed)
    if request is None or pool.room_for_large.request is not None:
        return
    pool.lengths.expect(request, pool.shares)
    demand, choices = KvDemand.of(request.submit, request.expected_left), request.submit.choices
    target_s, short = request.promised_ms / 1000, pool.short_targets()
    soon = freed_per_s * (min(SOON_S, SOON_SHARE * target_s) if target_s else SOON_S)

    def wanted(incarnation: int) -> int:
        return pool.decode[incarnation].stream(choices, demand).held

    def may_leave(incarnation: int, key: Key) -> bool:
        other = _running(cluster, pool.decode[incarnation], key)
        return other is not None and other.preempted < PREEMPTED_MAX and not pool.decode[incarnation].draining

    for incarnation, keys, held in pool.shares.who_gives_way(request.path, wanted, may_leave, soon):
        if pool.decode_fits(pool.decode[incarnation], request, short, without=keys):
            pool.gives_way = keys
            pool.shares.freed -= held
            for request_id, _ in keys:
                why = f"{'/'.join(request.path)} has less than its share"
                cluster.interrupt(cluster.requests[request_id], Interrupt.PREEMPTED, why, now)
            return


def charge_decode(cluster: Cluster, worker: DecodeWorker, now: float) -> None:
    """Charge for answers beyond their estimates, as they are emitted."""
    if now - worker.charged_at < CHARGE_EVERY_S:
        return
    worker.charged_at = now
    queue = cluster.queues[worker.hello.model]
    for key in worker.allocations:
        request = cluster.current(*key)
        if request is not None and request.decode_incarnation == worker.incarnation:
            queue.is_emitting(request, worker.admission.forwarded(key))
