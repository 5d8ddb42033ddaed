"""The decisions of the scheduler, and what a `Watch` callback sees while they are made. Pure.

The owner of the scheduler carries each decision out, in the order in which they were made. `Cluster.watch` is unset while
serving. The callback may read the whole state as it was at the decision, before any tenant is charged. It must change
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from proto.errors import Interrupt
from proto.messages import Step
from proto.parts import Returns
from scheduler.request import Request
from scheduler.workers.worker import DecodeWorker, Worker


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A request has room on two workers, which are to learn of it."""

    request: Request
    prefill: Worker
    decode: DecodeWorker
    kv_blocks: int  # its blocks on the decode worker at its full length
    returns: Returns  # how soon its tenant's sessions come back


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """A prefill worker is to compute a step."""

    worker: Worker
    step: Step
    requests: tuple[Request, ...]  # the request of each chunk
    begun: tuple[Request, ...]  # those that have their first chunk in it


class Withdrawn(msgspec.Struct, frozen=True, gc=False):
    """An attempt is over before its workers know it: they are to let go of it."""

    key: tuple[str, int]


class Interruption(msgspec.Struct, frozen=True, gc=False):
    """An attempt is interrupted: its gateway is to submit the request again, at once if `tell`."""

    request: Request
    attempt: int
    reason: Interrupt
    why: str
    tell: bool


Decision = Placement | Dispatched | Withdrawn | Interruption


class Outcome(StrEnum):
    TAKEN = "taken"
    """Its next chunk goes into the step, or it is placed on an idle worker with more of its prompt cached. The turn is over."""
    NO_ROOM = "no_room"  # this prefill worker or all decode workers have no room for it
    WAITS = "waits"  # it skips this worker's turn, and waits for a worker that has more of its prompt cached


@dataclass(frozen=True, slots=True)
class Looked:
    """The core considered `request` for a chunk on `worker`, in the fair order."""

    worker: Worker
    request: Request
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NothingRuns:
    """The turn is over, and nothing that waits can have a chunk on `worker` now."""

    worker: Worker


class StepEnd(StrEnum):
    """Why a prefill step has no more tokens, or a decode batch no more sequences. The words of metrics and `explain`."""

    FULL = "full"  # it has its budget of tokens
    MAX_CHUNKS = "max_chunks"  # it has as many chunks as one message may have
    NOTHING_WAITS = "nothing_waits"
    NO_DECODE_SEQUENCES = "no_decode_sequences"  # the waiting requests find no sequence free on a decode worker
    NO_DECODE_KV = "no_decode_kv"  # a sequence is free there, but not the KV blocks that a request needs until its end
    TPOT_TARGET = "tpot_target"
    """Both are free there, and another sequence would break a target for the time per output token."""
    NO_ROOM_IN_PREFILL = "no_room_in_prefill"
    """This prefill worker has no room for the waiting requests, or may not send to any decode worker with room."""
    WORKER_CLOSED = "worker_closed"  # the worker drains, is left out after failures, or is kept for one request
    OWN_STEP = "own_step"
    """A request that is suspected of having ended workers runs, or is about to run, without others."""
    BOUND_ELSEWHERE = "bound_elsewhere"  # the waiting requests are bound to other workers, or fit none
    GAVE_UP = "gave_up"  # Too many requests were passed over at one turn. The next event goes on with the rest.


@dataclass(frozen=True, slots=True)
class Composed:
    """A step is made up, and is about to be sent."""

    worker: Worker
    step_id: int
    end: StepEnd


WatchedEvent = Looked | NothingRuns | Composed
Watch = Callable[[WatchedEvent], None]
