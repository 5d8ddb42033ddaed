"""Overcommit: how long an answer is counted with, and who has to leave a decode worker when its blocks run short. Pure.

A victim is interrupted like an attempt whose worker was lost: its gateway submits it again with the tokens already sent, and a
prefill worker computes their KV anew. It is then counted with its whole rest, so it is not placed before there is room for
all of it, and it is chosen again only after all others: one answer is not computed over and over.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from coordinator.kv_admission.admission import Key
from coordinator.kv_admission.demand import NEVER
from coordinator.lifecycle import ON_WORKERS
from coordinator.request import CLAIM, Request
from coordinator.state import State
from coordinator.workers.worker import Worker
from proto.errors import Interrupt


class Candidate(NamedTuple):
    """One attempt on the worker that runs short."""

    key: Key
    resumed: bool
    priority_class_weight: float
    debt: float
    """How far its tenant is ahead in the fair queue."""
    placed_at: float
    blocks: int
    """That come free with it, about."""


def choose(candidates: Iterable[Candidate], blocks: int) -> list[Key]:
    """Who leaves, so that `blocks` come free: lowest priority class, then the tenant most ahead of its share, then the
    newest."""
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
    """Tokens that each choice is counted with after its first: the length that few of its tenant's answers exceed, but no less
    than max_tokens over the overcommit factor; all of them where it is 1, and where an attempt was interrupted before."""
    if factor <= 1 or request.resumed:
        return NEVER
    least = (request.submit.sampling.max_tokens - request.submit.resumed_tokens) / factor
    return max(ceil(max(long_tokens, least)) - 1, 0)


def relieve(state: State, worker: Worker, short_blocks: int, now: float) -> None:
    """Interrupt as many as it takes. What those who are leaving already will give back is counted first."""
    room = worker.room
    assert room is not None
    candidates: list[Candidate] = []
    for key, holding in list(worker.holdings.items()):
        if key[1] == CLAIM:
            state.drop_claim(state.requests[key[0]])  # of this room nothing is in use
            continue
        request = state.current(*key)
        if request is not None and request.decode_incarnation == worker.incarnation and request.state in ON_WORKERS:
            debt = state.queues[worker.hello.model].fair.debt(request.path)
            weight = state.limits.priority_classes[request.path[0]].weight
            candidates.append(
                Candidate(key, request.resumed, weight, debt, request.attempt_progress.placed_at, room.held_now(key))
            )
        elif not holding.adopted:
            short_blocks -= room.held_now(key)
    for request_id, _ in choose(candidates, short_blocks):
        state.interrupt(
            state.requests[request_id], Interrupt.PREEMPTED, f"{worker.hello.name} runs short of KV blocks", now
        )
