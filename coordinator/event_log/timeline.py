"""The timeline of one request from an event log: what happened to it, and why it waited. Pure. `Timeline` is an observer of a
`coordinator.event_log.replay.Replay`. Times are seconds since the request was first submitted.
"""

from typing import Final

import msgspec

from coordinator.core import Core
from coordinator.event_log.reasons import (
    AwaitsTrial,
    BehindNoRoom,
    By,
    CachedElsewhere,
    FasterElsewhere,
    NoRoomOnWorker,
    OtherTurn,
    Reason,
    RoomKept,
    SameTenant,
    why_not,
)
from coordinator.events import Action, Event, Received, Send, StateChanged
from coordinator.members import RunningFlip
from coordinator.requests import pool_for
from proto.messages import HandedOver, Rejected, Reserve, Step, Submit, Waits
from proto.status import AutopilotReport
from scheduler.decisions import Composed, Looked, Outcome, StepEnd, WatchedEvent
from scheduler.lifecycle import TERMINAL, RequestState


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


NAMED_MAX: Final = 3  # requests named in one `Passed`


class Submitted(msgspec.Struct, frozen=True, tag_field="what", tag="submitted"):
    at_s: float
    attempt: int
    priority_class: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    waiting: int  # requests for this model that waited already when it came
    waiting_of_tenant: int  # those of `waiting` that are of the same tenant


class Passed(msgspec.Struct, frozen=True, tag_field="what", tag="passed_over"):
    """Turns at which it got nothing, for one reason and because of one tenant, between two changes of its state."""

    at_s: float
    until_s: float
    times: int
    reason: Reason  # as it was at the last of these turns
    requests: tuple[str, ...]  # the requests whose turns they were, the first few
    requests_in_all: int


class KeptFor(msgspec.Struct, frozen=True, tag_field="what", tag="room_kept_for_it"):
    at_s: float
    bypassed: int


class Placed(msgspec.Struct, frozen=True, tag_field="what", tag="placed"):
    at_s: float
    workers: str
    kv_blocks: int  # reserved on the decode worker
    cached_tokens: int  # prompt tokens that the prefill worker was believed to have cached
    kept: bool  # it was not its turn, but room had been kept for it
    projected_s: float = 0.0  # the wait for a place that was expected when it came
    there_s: float = 0.0
    """How long its decode worker was expected to take for what the prompt adds to KV that is there; 0: it computes nothing."""
    elsewhere_s: float = 0.0  # how long a prefill worker was expected to take
    fetched_tokens: int = 0  # the prefill worker is to fetch so many of the cached ones from the decode worker
    fetch_s: float = 0.0  # the fetch was expected to take so long
    compute_s: float = 0.0  # the prefill worker would have needed so long to compute them
    waits: Waits = Waits()  # how long this attempt waited, by reason; its client is told the same


class ChunkSent(msgspec.Struct, frozen=True, tag_field="what", tag="chunk"):
    at_s: float
    worker: str
    step: int
    start: int
    tokens: int
    prompt_tokens: int
    beside: int  # chunks of other requests in the same step
    end: str = ""  # why the step has no more tokens


class Changed(msgspec.Struct, frozen=True, tag_field="what", tag="state"):
    """A change of state that no other entry tells."""

    at_s: float
    state: str
    why: str
    transfer_ms: float = 0.0


class RequestEnded(msgspec.Struct, frozen=True, tag_field="what", tag="ended"):
    at_s: float
    outcome: str
    why: str
    retry_after_s: float
    by: By | None  # the request for which it had to make room


Entry = Submitted | Passed | KeptFor | Placed | ChunkSent | Changed | RequestEnded | RoleChange | LoggedAdvice


class _Passing:
    """A `Passed` that grows."""

    def __init__(self, at_s: float) -> None:
        self.at_s = self.until_s = at_s
        self.times = 0
        self.requests: dict[str, None] = {}
        self.reason: Reason

    def add(self, reason: Reason, at_s: float) -> None:
        self.times += 1
        self.until_s, self.reason = at_s, reason
        culprit = _culprit(reason)
        if culprit is not None:
            self.requests[culprit.request] = None

    def entry(self) -> Passed:
        named = tuple(list(self.requests)[:NAMED_MAX])
        return Passed(self.at_s, self.until_s, self.times, self.reason, named, len(self.requests))


def _culprit(reason: Reason) -> By | None:
    return getattr(reason, "by", None)


def _same(reason: Reason) -> tuple[object, ...]:
    """Returns a key; reasons with the same key are told as one."""
    culprit = _culprit(reason)
    who = (culprit.priority_class, culprit.tenant) if culprit is not None else ()
    match reason:
        case SameTenant(order=order):
            return (type(reason), order)
        case OtherTurn() | RoomKept():
            return (type(reason), *who)
        case NoRoomOnWorker(worker=worker, kept=kept):
            return (type(reason), worker, kept)
        case BehindNoRoom() | CachedElsewhere() | FasterElsewhere() | AwaitsTrial():
            return (type(reason),)


class Timeline:
    """The events of one request, over all its attempts. An `Observer`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.entries: list[Entry] = []
        self._passing: dict[tuple[object, ...], _Passing] = {}
        self._began: float | None = None
        self._at_s = 0.0
        self._core: Core | None = None
        self._seen = 0  # actions of the event in hand that were looked at
        self._looked: list[Looked] = []
        self._in_step = self._kept = False
        self._ends: dict[tuple[int, int], StepEnd] = {}
        """Ends of the steps that are composed at the present event, by worker and number."""
        self._event: Event | None = None
        self._came: Submitted | None = None
        """Added once the core has queued or rejected it. A repeated submit does neither."""
        self._blocks = 0
        self._ratio = LoggedRatio()
        self._has_ended = False

    def finish(self) -> list[Entry]:
        self._close_passing()
        return self.entries

    # --- observing ------------------------------------------------------------------------------------------------------

    def before(self, core: Core, event: Event, now: float) -> None:
        self._core, self._event, self._seen = core, event, 0
        core.cluster.watch = self._watch
        self._ends.clear()
        message, blob = (event.message, event.blob) if isinstance(event, Received) else (None, b"")
        if isinstance(message, Submit) and message.request_id == self.request_id:
            self._began = now if self._began is None else self._began
            self._came = self._submitted(core, message, blob, now - self._began)
        self._at_s = now - (now if self._began is None else self._began)

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        self._take(actions)
        target = core.cluster.requests.get(self.request_id)
        changes = self._ratio.changes(core, event, self._at_s)
        if self._began is not None and not self._has_ended:
            self.entries += changes
        kept = target is not None and any(pool.room_for_large.request is target for pool in core.cluster.pools.values())
        if kept and not self._kept and target is not None:
            self._add(KeptFor(self._at_s, target.attempt_progress.bypassed))
        self._kept, self._came = kept, None

    def _watch(self, decision: WatchedEvent) -> None:
        assert self._core is not None
        self._take(self._core.state.out)
        if isinstance(decision, Composed):
            self._ends[decision.worker.incarnation, decision.step_id] = decision.end
            return
        if isinstance(decision, Looked):
            self._looked.append(decision)
            if decision.outcome is not Outcome.TAKEN:
                return
        looked, self._looked = self._looked, []
        winner = looked[-1].request if isinstance(decision, Looked) else None
        target = self._core.cluster.requests.get(self.request_id)
        if target is None:
            return
        if not self._in_step:
            pool = self._core.cluster.pools[target.submit.model]
            if decision.worker.incarnation in pool.prefill:
                reason = why_not(target, winner, looked, decision.worker, pool)
                if reason is not None:
                    self._passing.setdefault(_same(reason), _Passing(self._at_s)).add(reason, self._at_s)
        self._in_step = self._in_step or winner is target

    # --- what happens to it ---------------------------------------------------------------------------------------------

    def _submitted(self, core: Core, submit: Submit, blob: bytes, at_s: float) -> Submitted:
        queue = core.cluster.queues.get(pool_for(core.state, submit, blob))
        waiting = list(queue) if queue is not None else []
        priority_class, *_ = path = core.accounts.path(submit)
        own = sum(request.path == path for request in waiting)
        what = (submit.attempt, priority_class, submit.tenant, submit.prompt_tokens, submit.sampling.max_tokens)
        return Submitted(at_s, *what, len(waiting), own)

    def _take(self, actions: list[Action]) -> None:
        """Process the actions that are new since the last call."""
        for action in actions[self._seen :]:
            match action:
                case StateChanged(request_id, _, state, why) if request_id == self.request_id:
                    self._moved(state, why)
                case Send(incarnation, Step() as step):
                    self._step(incarnation, step)
                case Send(_, Reserve(request_id=request_id, kv_blocks=blocks)) if request_id == self.request_id:
                    self._blocks = blocks
        self._seen = len(actions)

    def _moved(self, state: RequestState, why: str) -> None:
        self._has_ended = state in TERMINAL
        if self._came is not None and state in (RequestState.QUEUED, RequestState.REJECTED):
            self._add(self._came)
        if state in TERMINAL:
            told, retry_after_s = self._rejection()
            why = why if told in ("", why) else f"{why}: {told}"
            self._add(RequestEnded(self._at_s, state.value, why, retry_after_s, self._made_room_for(why)))
        elif state is RequestState.PLACED:
            assert self._core is not None
            request = self._core.cluster.requests[self.request_id]
            projected_s = request.projected_s if request.submit.attempt == 1 else 0.0
            placed = Placed(
                self._at_s, why, self._blocks, request.cached_tokens, self._kept, projected_s, waits=request.waited
            )
            progress = request.attempt_progress
            if request.prefill_incarnation == request.decode_incarnation:
                placed = msgspec.structs.replace(placed, there_s=progress.there_s, elsewhere_s=progress.elsewhere_s)
            elif progress.fetched_tokens:
                placed = msgspec.structs.replace(
                    placed,
                    fetched_tokens=progress.fetched_tokens,
                    fetch_s=progress.fetch_s,
                    compute_s=progress.compute_s,
                )
            self._add(placed)
        elif state is RequestState.DECODING:
            done = self._event.message if isinstance(self._event, Received) else None
            transfer_ms = done.transfer_ms if isinstance(done, HandedOver) else 0.0
            self._add(Changed(self._at_s, state.value, why, transfer_ms))
        elif state in (RequestState.HANDING_OVER, RequestState.INTERRUPTED):
            self._add(Changed(self._at_s, state.value, why))
        if state in TERMINAL or state in (RequestState.QUEUED, RequestState.INTERRUPTED):
            self._in_step = False

    def _step(self, incarnation: int, step: Step) -> None:
        assert self._core is not None
        for chunk in step.chunks:
            if chunk.request_id == self.request_id:
                self._in_step = False
                name = self._core.cluster.workers[incarnation].hello.name
                total = self._core.cluster.requests[self.request_id].submit.prompt_tokens
                beside = len(step.chunks) - 1
                # This is no change of state, so turns that pass it by are still counted together.
                end = self._ends.get((incarnation, step.step_id), "")
                self.entries.append(
                    ChunkSent(self._at_s, name, step.step_id, chunk.start, chunk.length, total, beside, end)
                )

    def _rejection(self) -> tuple[str, float]:
        """The reason that its gateway is told, and when to try again."""
        assert self._core is not None
        for action in self._core.state.out:
            match action:
                case Send(_, Rejected(request_id=request_id) as told) if request_id == self.request_id:
                    return told.message, told.retry_after_s
        return "", 0.0

    def _made_room_for(self, why: str) -> By | None:
        """Returns the new request for which this one was shed, or None."""
        message = self._event.message if isinstance(self._event, Received) else None
        if not isinstance(message, Submit) or message.request_id == self.request_id or "overload" not in why:
            return None
        assert self._core is not None
        return By(message.request_id, self._core.accounts.path(message)[0], message.tenant)

    def _add(self, entry: Entry) -> None:
        self._close_passing()
        self.entries.append(entry)

    def _close_passing(self) -> None:
        self.entries += [passing.entry() for passing in self._passing.values()]
        self._passing.clear()
