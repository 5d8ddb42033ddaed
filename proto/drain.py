"""A worker is taken out of service: because it is to end (SIGTERM), because a person asked for it, or to change its role.

worker that is to end → coordinator    Draining          ← Drained, when it holds nothing more
crossdock drain       → coordinator    DrainRequest      ← DrainAnswer
coordinator           → worker         Draining          what a person asked for, to be repeated in the next `Hello`
crossdock flip        → coordinator    FlipRequest       ← FlipAnswer
coordinator           → worker         Flip              then Drained, and the worker registers anew, in its new role
worker                → coordinator    FlipFailed        it keeps its role
"""

from proto.fields import DurationMs, HandOverMs, Text
from proto.messages import Message, Role
from proto.status import WorkerStatus


class Draining(Message, frozen=True):
    """Nothing new is placed on this worker from now on. Requests that run there go on, and those that still run after
    `hand_over_ms` are handed over to others. None: it takes work again.

    The worker keeps what it is told and says it when it registers again, so that it holds whatever becomes of the
    coordinator."""

    hand_over_ms: HandOverMs


class Drained(Message, frozen=True):
    """Nothing is placed on this worker any more, and nothing will be. If it is to end, it may do so now."""


class DrainRequest(Message, frozen=True):
    """Drain the worker of this name, or both roles of a mixed worker. `undo`: place work on it again."""

    worker: Text
    undo: bool
    hand_over_ms: DurationMs


class DrainAnswer(Message, frozen=True):
    refusal: Text  # empty: done
    workers: tuple[WorkerStatus, ...]


class Flip(Message, frozen=True):
    """Take this role. Nothing new is placed on the worker from now on, and what runs there is handed over in `hand_over_ms`.

    The worker prepares meanwhile. It changes its role when it holds nothing and has received `Drained`, a mixed worker in both
    its roles. `Draining` without a time takes the order back."""

    role: Role
    hand_over_ms: DurationMs


class FlipFailed(Message, frozen=True):
    """The worker cannot take the role that it was ordered to take, and stays in its own."""

    why: Text


class FlipRequest(Message, frozen=True):
    """Give the worker process of this name that role. `force`: also if no other worker has its present one."""

    worker: Text
    role: Role
    hand_over_ms: DurationMs
    force: bool = False
    why: Text = ""  # the autopilot's reason, for the event log and `crossdock status`


class FlipAnswer(Message, frozen=True):
    refusal: Text  # empty: begun
    workers: tuple[WorkerStatus, ...] = ()
