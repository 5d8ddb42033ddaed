"""What an onlooker is told while the core decides: which requests it came to for a step, and what became of each. Pure.

`State.watch` is unset while serving. An onlooker may read the whole state, which it sees as the decision found it, before
anybody is charged; it must change nothing.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum

from coordinator.pool import Pool, Worker
from coordinator.request import Request


class Outcome(StrEnum):
    TAKEN = "taken"
    """Its next chunk goes into the step, and the turn is over."""
    IN_STEP = "in_step"
    """It has a chunk in this step already."""
    NO_ROOM = "no_room"
    """This prefill worker or all decode workers have no room for it."""
    KEPT = "kept"
    """What room there is, is kept for another."""
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


Decision = Looked | NothingRuns
Watch = Callable[[Decision], None]
Look = Callable[[Request], int]
"""How much of a prompt a step can take; 0 for none."""


def watched(look: Look, watch: Watch, worker: Worker, pool: Pool, in_step: Container[str]) -> Look:
    def look_and_tell(request: Request) -> int:
        length = look(request)
        if length:
            outcome = Outcome.TAKEN
        elif request.id in in_step:
            outcome = Outcome.IN_STEP
        elif pool.refused and pool.refused[-1] is request:
            outcome = Outcome.NO_ROOM
        elif pool.kept_for is not None:
            outcome = Outcome.KEPT
        else:
            outcome = Outcome.WAITS
        watch(Looked(worker, request, outcome))
        return length

    return look_and_tell
