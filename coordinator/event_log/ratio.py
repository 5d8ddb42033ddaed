"""Workers that change their role, and what the autopilot said of the ratio, from an event log. Pure.

`RatioChanges` is an observer of a `coordinator.event_log.replay.Replay`; a request's `Timeline` has what falls into its life.
"""

import msgspec

from coordinator.core import Core
from coordinator.events import Action, Event, Received
from proto.status import AutopilotReport
from scheduler.workers.flip import RunningFlip


class RoleChange(msgspec.Struct, frozen=True, tag_field="what", tag="role_change"):
    at_s: float
    worker: str
    before: str
    role: str  # the new one
    state: str  # `draining` or `registering` when it was ordered, `done` or `failed` when it ended
    why: str  # the person who wanted it, or the reason
    failure: str
    took_ms: float  # milliseconds from the order to its registration in the new role


class LoggedAdvice(msgspec.Struct, frozen=True, tag_field="what", tag="advice"):
    """The autopilot wants another ratio than before."""

    at_s: float
    mode: str
    present: str
    wanted: str
    reason: str


class LoggedRatio:
    """Follows the ratio of workers through an event log. `news` returns the changes at each event."""

    def __init__(self) -> None:
        self._open: dict[RunningFlip, None] = {}  # changes of role that have not ended
        self._wanted: dict[str, str] = {}

    def news(self, core: Core, event: Event, at_s: float) -> list[RoleChange | LoggedAdvice]:
        found: list[RoleChange | LoggedAdvice] = []
        running = dict.fromkeys(core.flipping.values())
        found += [_role_change(flip, at_s) for flip in running if flip not in self._open]
        found += [_role_change(flip, at_s) for flip in self._open if flip not in running]
        self._open = running
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, AutopilotReport):
            said = message.status
            if self._wanted.get(said.model, said.present) != said.wanted:
                found.append(LoggedAdvice(at_s, said.mode, said.present, said.wanted, said.reason))
            self._wanted[said.model] = said.wanted
        return found


def _role_change(flip: RunningFlip, at_s: float) -> RoleChange:
    one = flip.status()
    took_ms = one.drained_ms + one.commit_ms if one.commit_ms else 0.0
    return RoleChange(at_s, one.worker, one.before, one.role, one.state, one.why, one.failure, took_ms)


class RatioChanges:
    """Collects all changes of an event log. An `Observer`."""

    def __init__(self, started: float) -> None:
        self._started, self._ratio = started, LoggedRatio()
        self.entries: list[RoleChange | LoggedAdvice] = []

    def before(self, core: Core, event: Event, now: float) -> None:
        pass

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        self.entries += self._ratio.news(core, event, now - self._started)
