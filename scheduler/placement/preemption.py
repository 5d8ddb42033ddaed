"""Chooses requests that leave a decode worker, when its blocks run short or when a tenant has less than its share while others
have more. Also decides with how many tokens an answer is counted (overcommit). Pure.

A victim is interrupted like an attempt whose worker was lost: its gateway submits it again with the tokens already sent, and a
prefill worker computes their KV anew. The next attempt is counted with all tokens that it may still emit, so it is placed only
when there is room for all of them. It is chosen again only after all others, so that no answer is computed over and over.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from coordinator.state import State
from proto.errors import Interrupt
from scheduler.fairness.fair_node import Path
from scheduler.kv_admission.admission import Key
from scheduler.kv_admission.demand import NEVER, KvDemand
from scheduler.lifecycle import ON_WORKERS
from scheduler.request import RETAINED, Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Worker

PREEMPTED_MAX = 3
"""A stream that was interrupted this often is not interrupted for a share again."""
SOON_S = 3.0
"""No stream is interrupted for a share that comes free by itself within this many seconds."""
SOON_SHARE = 0.25
"""The same bound, as a part of the waiting request's target for its first token."""
CHARGE_EVERY_S = 0.5
HELD_COST = 4.0
"""The cost of all room in decode, while it is short, relative to all tokens that prefill workers compute meanwhile. It is over
1, so that the order of tenants follows from the room they hold, and their prompts' lengths matter little."""


class PreemptionCandidate(NamedTuple):
    """One attempt on the worker that runs short."""

    key: Key
    resumed: bool
    priority_class_weight: float
    debt: float
    """How far its tenant is ahead in the fair queue."""
    placed_at: float
    blocks: int
    """About how many blocks come free with it."""


def choose(candidates: Iterable[PreemptionCandidate], blocks: int) -> list[Key]:
    """Returns the attempts that leave so that `blocks` come free: resumed ones last; else lowest priority class, then the
    tenant most ahead of its share, then the newest."""
    order = sorted(candidates, key=lambda c: (c.resumed, c.priority_class_weight, -c.debt, -c.placed_at, c.key))
    chosen: list[Key] = []
    for candidate in order:
        if blocks <= 0:
            break
        if candidate.blocks > 0:
            chosen.append(candidate.key)
            blocks -= candidate.blocks
    return chosen


def expected_left(request: Request, long_tokens: float, factor: float) -> int:
    """Returns the tokens after its first that each choice is counted with: the length that few of its tenant's answers exceed,
    but at least max_tokens divided by `factor`. Returns `NEVER` if `factor` is 1 or an attempt was interrupted before."""
    if factor <= 1 or request.resumed:
        return NEVER
    least = (request.submit.sampling.max_tokens - request.submit.resumed_tokens) / factor
    return max(ceil(max(long_tokens, least)) - 1, 0)


def relieve(state: State, worker: Worker, short_blocks: int, now: float) -> None:
    """Interrupt as many requests as needed. Blocks of attempts that are already leaving are counted first."""
    room = worker.admission
    assert room is not None
    candidates: list[PreemptionCandidate] = []
    for key, allocation in list(worker.allocations.items()):
        if key[1] == RETAINED:
            state.drop_retained(state.requests[key[0]])  # none of this room is in use
            continue
        request = state.current(*key)
        if request is not None and request.decode_incarnation == worker.incarnation and request.state in ON_WORKERS:
            debt = state.queues[worker.hello.model].fair.debt(request.path)
            weight = state.limits.priority_classes[request.path[0]].weight
            candidates.append(
                PreemptionCandidate(
                    key, request.resumed, weight, debt, request.attempt_progress.placed_at, room.held_now(key)
                )
            )
        elif not allocation.adopted:
            short_blocks -= room.held_now(key)
    for request_id, _ in choose(candidates, short_blocks):
        state.interrupt(
            state.requests[request_id], Interrupt.PREEMPTED, f"{worker.hello.name} runs short of KV blocks", now
        )


def give_shares(state: State, pool: Pool, queue: WaitQueue, now: float) -> None:
    """If the first request in the fair order has no room in decode, interrupt one stream of the tenant that holds most for its
    weight. This happens only if `held_shares` allows it and too little comes free by itself. The next interruption waits until
    the worker has released this stream."""
    freed_per_s = pool.freed_per_s(now)
    if not pool.wakeups.closed or pool.gives_way in state.where:
        return
    request = queue.first(pool.wakeups.closed)
    if request is None or pool.room_for_large.request is not None:
        return
    demand, choices = KvDemand.of(request.submit, request.expected_left), request.submit.choices
    target_s, short = request.first_token_ms / 1000, pool.short_targets()
    soon = freed_per_s * (min(SOON_S, SOON_SHARE * target_s) if target_s else SOON_S)

    def wanted(incarnation: int) -> int:
        worker = pool.decode[incarnation]
        return worker.share_of(choices, demand.whole(worker.capacity.block_size))

    for incarnation, key, held in pool.shares.who_gives_way(request.path, wanted, soon):
        other, worker = state.current(*key), pool.decode[incarnation]
        if other is None or other.state not in ON_WORKERS or other.preempted >= PREEMPTED_MAX or worker.draining:
            continue
        left = pool.targets.free_seqs(worker, request, short) + worker.allocations[key].seqs
        if choices <= left and makes_room(worker, key, demand, choices):
            pool.gives_way = key
            pool.shares.freed -= held
            state.interrupt(other, Interrupt.PREEMPTED, f"{'/'.join(request.path)} has less than its share", now)
            return


def charge_decode(state: State, worker: Worker, now: float) -> None:
    """Charge for answers beyond their estimates, as they are emitted. While requests wait for room in decode, also charge
    tenants for the room that they hold and for how long, so that the fair order leads to their shares."""
    pool, admission, since = state.pools[worker.hello.model], worker.admission, worker.held_charged_at
    if now - since < CHARGE_EVERY_S or admission is None:
        return
    worker.held_charged_at = now
    queue = state.queues[worker.hello.model]
    for key in worker.allocations:
        request = state.current(*key)
        if request is not None and request.decode_incarnation == worker.incarnation:
            queue.is_emitting(request, admission.forwarded(key))
    if not pool.wakeups.closed:
        return
    cost = HELD_COST * pool.tokens_per_s() * min(now - since, 2 * CHARGE_EVERY_S) / len(pool.decode) / 1_000_000
    held: dict[Path, int] = {}
    for allocation in worker.allocations.values():
        held[allocation.path] = held.get(allocation.path, 0) + worker.share_of(allocation.seqs, allocation.kv_blocks)
    for path, share in held.items():
        if path:
            queue.charge(path, cost * share)


def makes_room(worker: Worker, key: Key, demand: KvDemand, choices: int) -> bool:
    """Whether a request has room on this worker without that stream."""
    room, allocation = worker.admission, worker.allocations[key]
    assert room is not None
    if worker.free_seqs + allocation.seqs < choices:
        return False
    return demand.whole(room.block_size) <= worker.free_blocks + room.held_now(key) or room.fits(demand)
