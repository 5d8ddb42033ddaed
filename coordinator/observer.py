"""The events that an onlooker sees while the core decides: which requests it came to for a step, and what became of each. Pure.

`State.watch` is unset while serving. An onlooker may read the whole state, which it sees as the decision found it, before
anybody is charged; it must change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from coordinator.request import Request
from coordinator.workers.worker import Worker


class Outcome(StrEnum):
    TAKEN = "taken"
    """Its next chunk goes into the step, or it is placed on an idle worker with more of its prompt cached. The turn is over."""
    NO_ROOM = "no_room"
    """This prefill worker or all decode workers have no room for it."""
    WAITS = "waits"
    """It lets this worker's turn pass, for one that has more of its prompt cached."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The fair queue came to `request` for a chunk on `worker`."""

    worker: Worker
    request: Request
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NothingRuns:
    """The turn is over, and nothing that waits can have a chunk on `worker` now."""

    worker: Worker


class StepEnd(StrEnum):
    """Why a prefill step has no more tokens, or a decode batch no more sequences. The words of metrics and `explain`."""

    FULL = "full"
    """It has its budget of tokens."""
    MAX_CHUNKS = "max_chunks"
    """It has as many chunks as one message may have."""
    NOTHING_WAITS = "nothing_waits"
    NO_DECODE_SEQUENCES = "no_decode_sequences"
    """The waiting requests find no sequence free on a decode worker."""
    NO_DECODE_KV = "no_decode_kv"
    """A sequence is free there, and KV blocks for all of a life are not."""
    TPOT_TARGET = "tpot_target"
    """Both are free there, and another sequence would break a target for the time per output token."""
    NO_ROOM_IN_PREFILL = "no_room_in_prefill"
    """This prefill worker has no room for what waits, or may send to no decode worker that has."""
    WORKER_CLOSED = "worker_closed"
    """The worker drains, is left out after failures, or is kept for one request."""
    OWN_STEP = "own_step"
    """A request that is suspected of having ended workers runs, or is about to run, without others."""
    BOUND_ELSEWHERE = "bound_elsewhere"
    """The waiting requests are bound to other workers, or fit none."""
    GAVE_UP = "gave_up"
    """Too many were passed over at one turn. The next event goes on."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A step is made up, and is about to be sent."""

    worker: Worker
    step_id: int
    end: StepEnd


Decision = Looked | NothingRuns | Composed
Watch = Callable[[Decision], None]
