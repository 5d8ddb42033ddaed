"""Explains why a request did not get a chunk at a turn. Pure: reads the state at a decision, like a `Watch` callback.

A reason says what prevented it at one turn of one prefill worker: the fair order (`OtherTurn`, `SameTenant`), room
(`NoRoomOnWorker`, `RoomKept`), a request before it that waits for room (`BehindNoRoom`), or the choice to wait
(`CachedElsewhere`).
"""

from enum import StrEnum
from typing import Any

import msgspec

from scheduler.decisions import Looked, Outcome
from scheduler.fairness.fair_node import FairNode
from scheduler.fairness.fair_queue import where_they_part
from scheduler.fairness.tenant_queue import AGED, Entry
from scheduler.request import Request
from scheduler.waiting.queue_keys import TRIAL_KEY, bound_key, is_class
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Worker


class By(msgspec.Struct, frozen=True):
    """Another request."""

    request: str
    priority_class: str
    tenant: str


class OtherTurn(msgspec.Struct, frozen=True, tag_field="kind", tag="other_turn"):
    """The fair queue gave the turn to another tenant, which has had less of its share."""

    by: By
    level: str  # the level at which the two compete: "priority_class", "organisation" or "user"
    winner: str
    ours: str  # the two that compete there
    winner_round: float
    our_round: float  # when each one's turn comes: service per weight


class OrderWithinTenant(StrEnum):
    DEADLINE = "deadline"
    FEWER_CHUNKS = "fewer_chunks"
    CAME_FIRST = "came_first"
    AGED = "aged"  # the other was overtaken so often that it went first, whatever is due


class SameTenant(msgspec.Struct, frozen=True, tag_field="kind", tag="same_tenant"):
    """Another request of the same tenant goes first."""

    by: By
    order: OrderWithinTenant
    due_before_s: float  # how much earlier the other is due; negative where that is not why


class NoRoomOnWorker(msgspec.Struct, frozen=True, tag_field="kind", tag="no_room"):
    worker: str  # the prefill worker that asked, or else the decode worker with the most room
    blocks_needed: int
    blocks_free: int
    seqs_needed: int
    seqs_free: int
    most_held_by: str  # the tenant with the most blocks there; empty if no tenant has any
    most_held_blocks: int
    kept: bool  # blocks that come free are kept for this request: it was bypassed often enough
    circuit_open: bool = False  # there is room, but transfers from the prefill worker that asked failed


class RoomKept(msgspec.Struct, frozen=True, tag_field="kind", tag="room_kept"):
    """All room that comes free is kept for a request that was bypassed too often."""

    by: By
    bypassed: int


class BehindNoRoom(msgspec.Struct, frozen=True, tag_field="kind", tag="behind_no_room"):
    """A request before this one, of about its own KV demand, had no room."""

    by: By | None


class CachedElsewhere(msgspec.Struct, frozen=True, tag_field="kind", tag="cached_elsewhere"):
    """It was bound to a prefill worker that has more of its prompt cached, and waits for its turn there."""

    worker: str  # that one
    cached_tokens: int
    asked: str  # the worker whose turn it let pass
    cached_tokens_there: int


class FasterElsewhere(msgspec.Struct, frozen=True, tag_field="kind", tag="faster_elsewhere"):
    """It was bound to a faster prefill worker, and waits for its turn there."""

    worker: str  # that one
    done_s: float  # when the prompt is expected to be computed by the worker for which it waits
    asked: str  # the worker whose turn it let pass
    done_there_s: float  # when the other worker would have computed it


class AwaitsTrial(msgspec.Struct, frozen=True, tag_field="kind", tag="awaits_trial"):
    """It may have ended a decode worker, and waits for one that runs no other such request."""

    losses: int  # workers lost one after the other while they computed it


Reason = (
    OtherTurn | SameTenant | NoRoomOnWorker | RoomKept | BehindNoRoom | CachedElsewhere | FasterElsewhere | AwaitsTrial
)


def by(request: Request) -> By:
    return By(request.id, request.path[0], request.submit.tenant)


def why_not(target: Request, winner: Request | None, looked: list[Looked], worker: Worker, pool: Pool) -> Reason | None:
    """Returns why the turn of `worker`, which `winner` got (None: no request), passed `target` by; None if `target` did not
    compete.

    `looked`: the requests that were considered in this turn, in order.
    """
    entry: Entry[Request] | None = target.entry
    if winner is target or entry is None:
        return None
    if target.suspicion is not None and entry.key == TRIAL_KEY:
        return AwaitsTrial(target.suspicion.losses)
    for look in looked:
        if look.request is target:
            if look.outcome is Outcome.WAITS:
                return _elsewhere(target, worker, pool)
            return _without_room(target, target, worker, pool) if look.outcome is Outcome.NO_ROOM else None
    if not (is_class(entry.key) or entry.key in (worker.incarnation, bound_key(worker.incarnation))):
        return None
    if winner is not None:
        reason = _goes_first(winner, target)
        if reason is not None:
            return reason
    if entry.key == worker.incarnation:
        return None
    wakeups = pool.wakeups
    before = wakeups.closed.get(entry.key) or wakeups.stuck.get(worker.incarnation, {}).get(entry.key)
    if before is not None:
        return _without_room(target, before, worker, pool)
    return no_room(target, worker, pool) if not worker.free_seqs else None


def _without_room(target: Request, first: Request, worker: Worker, pool: Pool) -> Reason:
    """Returns why there was no room. `first`: the request under the same queue key that found none."""
    reservation, kept_on = pool.room_for_large.request, pool.decode.get(pool.room_for_large.decode)
    if reservation is not None and reservation is not target and kept_on is not None:
        fits = worker.fits(target.submit) and kept_on.fits(target.submit, target.expected_left)
        if fits:
            return RoomKept(by(reservation), reservation.attempt_progress.bypassed)
    return no_room(target, worker, pool) if first is target else BehindNoRoom(by(first))


def no_room(target: Request, prefill: Worker, pool: Pool) -> NoRoomOnWorker:
    short = pool.short_targets()
    worker, seqs, free_seqs, fits = prefill, 1, prefill.free_seqs, prefill.fits(target.submit)
    circuit_open = fits and any(pool.decode_fits(decode, target, short) for decode in pool.decode.values())
    if fits and pool.decode:
        worker = decode = max(
            pool.decode.values(), key=lambda w: (not w.draining, w.free_blocks, w.free_seqs, w.incarnation)
        )
        seqs, free_seqs = target.submit.choices, max(pool.targets.free_seqs(decode, target, short), 0)
    held: dict[str, int] = {}
    for other in worker.allocations.values():
        name = "/".join(filter(None, other.path[1:])) or "streams from before"
        held[name] = held.get(name, 0) + other.kv_blocks
    most = max(held, key=lambda name: held[name], default="")
    return NoRoomOnWorker(
        worker.hello.name,
        worker.whole_blocks(target.submit),
        worker.free_blocks,
        seqs,
        free_seqs,
        most,
        held.get(most, 0),
        pool.room_for_large.request is target,
        circuit_open,
    )


def _elsewhere(target: Request, asked: Worker, pool: Pool) -> CachedElsewhere | FasterElsewhere | None:
    cached = {incarnation: pool.cached_tokens(target.submit, worker) for incarnation, worker in pool.prefill.items()}
    best = max(cached, key=lambda incarnation: cached[incarnation])
    here = cached[asked.incarnation]
    if cached[best] > here:
        return CachedElsewhere(pool.prefill[best].hello.name, cached[best], asked.hello.name, here)
    bound_to = pool.prefill.get(target.attempt_progress.bound_to)
    if bound_to is None or bound_to is asked:
        return None
    tokens = target.submit.prompt_tokens
    done_s = bound_to.tokens_before / pool.rate(bound_to)
    done_there_s = (asked.tokens_before + tokens) / pool.rate(asked)
    return FasterElsewhere(bound_to.hello.name, round(done_s, 3), asked.hello.name, round(done_there_s, 3))


def _goes_first(winner: Request, target: Request) -> OtherTurn | SameTenant | None:
    """Returns why `winner` goes first in the fair order; None if `target` would have gone first."""
    mine: Entry[Any] | None = target.entry
    theirs: Entry[Any] | None = winner.entry
    assert mine is not None and theirs is not None
    if theirs.leaf is mine.leaf:
        ours, other = mine.queue.order(mine), theirs.queue.order(theirs)
        if other > ours:
            return None
        return SameTenant(by(winner), _order(other, ours), round(mine.due - theirs.due, 6))
    node, rival = where_they_part(mine.leaf, theirs.leaf)
    if (node.round, node.position) < (rival.round, rival.position):
        return None
    level = ("priority_class", "organisation", "user")[len(node.path) - 1]
    return OtherTurn(by(winner), level, _name(rival), _name(node), rival.round, node.round)


def _name(node: FairNode) -> str:
    return "/".join(filter(None, node.path[1:] or node.path))


def _order(first: tuple[int, float, int, int], second: tuple[int, float, int, int]) -> OrderWithinTenant:
    if first[0] == AGED:
        return OrderWithinTenant.AGED
    if first[1] != second[1]:
        return OrderWithinTenant.DEADLINE
    return OrderWithinTenant.FEWER_CHUNKS if first[2] != second[2] else OrderWithinTenant.CAME_FIRST
