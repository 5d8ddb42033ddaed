"""What an onlooker is told while the core decides: which requests it came to for a step, and what became of each. Pure.

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


Decision = Looked | NothingRuns
Watch = Callable[[Decision], None]
