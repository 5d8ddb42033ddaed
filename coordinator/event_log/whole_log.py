"""Explanations of a whole event log for `crossdock explain`: the requests that waited longest, changes of role and the
autopilot's advice. Pure. The classes are observers of a `coordinator.event_log.replay.Replay`.
"""

from heapq import heappush, heappushpop

import msgspec

from coordinator.core import Core
from coordinator.event_log.reasons import by
from coordinator.events import Action, Event, Received, StateChanged
from proto.status import AutopilotReport
from scheduler.lifecycle import TERMINAL, RequestState
from scheduler.request import Request
from scheduler.workers.flip import RunningFlip


class RequestsNamed:
    """Collects the ids of all requests that begin with a prefix. An `Observer`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.found: dict[str, None] = {}

    def before(self, core: Core, event: Event, now: float) -> None:
        pass

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StateChanged) and action.request_id.startswith(self._prefix):
                self.found[action.request_id] = None


class Waited(msgspec.Struct, frozen=True, order=True):
    """How long one request was queued, all its attempts together."""

    waited_s: float
    submitted_s: float  # seconds since the recording began
    request: str
    priority_class: str
    tenant: str
    prompt_tokens: int
    outcome: str  # its outcome, or its state at the end of the event log


class Longest:
    """The requests that waited longest. An `Observer`."""

    def __init__(self, started: float, most: int) -> None:
        self._started, self._most = started, most
        self._since: dict[str, float] = {}
        self._live: dict[str, tuple[Request, float]] = {}
        """Live requests, with the seconds that they have waited so far."""
        self._top: list[Waited] = []
        self._now = started
        self.requests = 0

    def before(self, core: Core, event: Event, now: float) -> None:
        self._now = now

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StateChanged):
                self._moved(core, action, now)

    def finish(self) -> list[Waited]:
        for request_id in list(self._live):
            self._leave(request_id, self._live[request_id][0].state.value, self._now)
        return sorted(self._top, reverse=True)

    def _moved(self, core: Core, moved: StateChanged, now: float) -> None:
        request_id = moved.request_id
        if moved.state is RequestState.QUEUED:
            request = core.cluster.requests.get(request_id)
            if request is not None and request_id not in self._live:
                self._live[request_id] = (request, 0.0)
                self.requests += 1
            self._since[request_id] = now
        elif moved.state in TERMINAL:
            self._leave(request_id, moved.state.value, now)
        elif request_id in self._since:
            request, waited_s = self._live[request_id]
            self._live[request_id] = (request, waited_s + now - self._since.pop(request_id))

    def _leave(self, request_id: str, outcome: str, now: float) -> None:
        found = self._live.pop(request_id, None)
        if found is None:
            return  # It was rejected at once.
        request, waited_s = found
        waited_s += now - self._since.pop(request_id, now)
        told = by(request)
        row = Waited(
            round(waited_s, 6),
            request.arrived - self._started,
            request_id,
            told.priority_class,
            told.tenant,
            request.submit.prompt_tokens,
            outcome,
        )
        if len(self._top) < self._most:
            heappush(self._top, row)
        else:
            heappushpop(self._top, row)


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
    """Follows the ratio of workers through an event log. `changes` returns the changes at each event."""

    def __init__(self) -> None:
        self._open: dict[RunningFlip, None] = {}  # changes of role that have not ended
        self._wanted: dict[str, str] = {}

    def changes(self, core: Core, event: Event, at_s: float) -> list[RoleChange | LoggedAdvice]:
        found: list[RoleChange | LoggedAdvice] = []
        running = dict.fromkeys(core.members.flipping.values())
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
        self.entries += self._ratio.changes(core, event, now - self._started)
