"""A worker is taken out of service: because it is to end (SIGTERM), or because a person asked for it.

worker that is to end → coordinator    Draining          ← Drained, when it holds nothing more
crossdock drain       → coordinator    DrainRequest      ← DrainAnswer
coordinator           → worker         Draining          what a person asked for, to be repeated in the next `Hello`
"""

from proto.fields import DurationMs, HandOverMs, Text
from proto.messages import Message
from proto.status import WorkerStatus


class Draining(Message, frozen=True):
    """Nothing new is placed on this worker from now on. What runs there goes on, and what still does in `hand_over_ms` is
    handed over to others. None: it takes work again.

    The worker keeps what it is told and says it when it registers again, so that it holds whatever becomes of the
    coordinator."""

    hand_over_ms: HandOverMs


class Drained(Message, frozen=True):
    """Nothing is placed on this worker any more, nor will be: one that is to end may go."""


class DrainRequest(Message, frozen=True):
    """Drain the worker of this name, or, to `undo` that, place on it again."""

    worker: Text
    undo: bool
    hand_over_ms: DurationMs


class DrainAnswer(Message, frozen=True):
    refusal: Text
    """Empty: it is done."""
    workers: tuple[WorkerStatus, ...]
    """All there are."""
