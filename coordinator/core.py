"""The scheduling core: `handle(event, now) -> actions`. Pure: no clock, no sockets, no randomness.

Every handler is idempotent and ignores messages about an older attempt. An allocation counts as held until its worker reports
that it has released it (`HandedOver`, `Finished`, `WorkFailed`, `Released`) or until the worker is gone. So the coordinator
never counts more free blocks than the worker has.

    members   processes come and go
    intake    what gateways ask for
    progress  what workers report
    draining  workers that leave on purpose
    flips     workers that change their role
    schedule  what runs where and when, after each of these

A handler first checks a peer's message without changing the state, and then applies it. If the check hits a bug, that peer's
link ends. A bug hit while the message is applied may leave the state half changed, so it ends the process.
"""

import traceback
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from coordinator import progress
from coordinator.admission import checks, intake, tenancy
from coordinator.events import Action, Configured, Event, PeerDown, PeerUp, ProtocolViolation, Received, Tick
from coordinator.recovery import draining, flips, members, suspects
from coordinator.reporting import report
from coordinator.state import State
from proto.drain import Draining, DrainRequest, FlipFailed, FlipRequest
from proto.messages import (
    CacheEvents,
    CacheMiss,
    Cancel,
    Finished,
    HandedOver,
    Hello,
    Message,
    Released,
    Role,
    StatusRequest,
    StepDone,
    Submit,
    WorkFailed,
)
from proto.progress import DecodeProgress, EndSession, Hung
from proto.status import AutopilotReport, KvHeld, KvPairs
from scheduler.workers.worker import WORKERS


def _status(state: State, incarnation: int, event: Received, now: float) -> None:
    """Answer with what workers last reported about themselves. Then ask them for new reports, which the next answer will
    contain."""
    state.send(incarnation, report.status(state))
    for worker in state.cluster.workers:
        state.send(worker, StatusRequest())


def _autopilot(state: State, incarnation: int, event: Received, now: float) -> None:
    """Store an autopilot's status for status reports, and answer with the present status."""
    assert isinstance(event.message, AutopilotReport)
    said = event.message.status
    if said.model in state.cluster.pools:
        state.autopilots[said.model] = said, now
    _status(state, incarnation, event, now)


class Handler(NamedTuple):
    """The rules for one type of message."""

    roles: tuple[Role, ...]  # the roles that may send it
    apply: Callable[[State, int, Received, float], None]
    check: Callable[[State, int, Received], str] | None = None
    """Returns what is wrong with a message, or an empty string. Changes nothing."""


HANDLERS: dict[type[Message], Handler] = {
    Submit: Handler((Role.GATEWAY,), intake.submit, intake.fault_of_submit),
    Cancel: Handler((Role.GATEWAY,), intake.cancel),
    EndSession: Handler((Role.GATEWAY,), intake.end_session),
    StepDone: Handler(WORKERS, progress.step_done, progress.fault_of_step),
    CacheMiss: Handler(WORKERS, progress.cache_miss, progress.fault_of_miss),
    CacheEvents: Handler(WORKERS, progress.cache_events),
    HandedOver: Handler((Role.PREFILL,), progress.handed_over, progress.fault_of_hand_over),
    DecodeProgress: Handler((Role.DECODE,), progress.decode_progress, progress.fault_of_progress),
    Finished: Handler(WORKERS, progress.finished, progress.fault_of_end),
    Released: Handler(WORKERS, progress.released, progress.fault_of_end),
    WorkFailed: Handler(WORKERS, progress.work_failed),
    Hung: Handler(WORKERS, members.hung),
    KvPairs: Handler((Role.PREFILL,), progress.kv_pairs),
    KvHeld: Handler(WORKERS, progress.kv_held),
    Draining: Handler(WORKERS, draining.said),
    DrainRequest: Handler((Role.OBSERVER,), draining.asked),
    FlipRequest: Handler((Role.OBSERVER,), flips.asked),
    FlipFailed: Handler(WORKERS, flips.failed),
    StatusRequest: Handler((Role.OBSERVER, Role.GATEWAY), _status),
    AutopilotReport: Handler((Role.OBSERVER,), _autopilot),
}


class Core(State):
    def refusal(self, hello: Hello) -> str | None:
        """Returns why a process may not join, or None. The link server calls it before the process's `PeerUp`."""
        if hello.incarnation in self.fenced:
            return "this incarnation hung, and was given up"
        return checks.refusal(hello, self.cluster.pools)

    def handle(self, event: Event, now: float) -> list[Action]:
        self.out, self.now = [], now
        if isinstance(event, Received) and (violation := self._violation(event)) is not None:
            return [violation]
        intake.expire(self, now)
        if self.empty_pools:
            members.forget_models(self, now)
        match event:
            case Received(incarnation, message):
                if incarnation in self.peers:
                    HANDLERS[type(message)].apply(self, incarnation, event, now)
            case PeerUp(incarnation, hello):
                members.up(self, incarnation, hello, now)
            case PeerDown(incarnation, reason):
                members.down(self, incarnation, reason, now)
            case Configured():
                tenancy.configure(self, event, now)
            case Tick():
                pass
        if self.cluster.draining:
            draining.hand_over(self, now)
        if self.keeping:
            flips.resume_due(self, now)
        if self.flipping:
            flips.look(self, now)  # a worker whose change is given up takes work again
        self.spread.go_on()
        suspects.judge(self)
        self.carry_out(self.scheduler.decide(now))
        if self.cluster.draining:
            draining.dismiss(self)
        return self.out

    def next_deadline(self) -> float | None:
        if self.spread.jobs:
            return self.now
        waiting = [at] if (at := self.scheduler.next_deadline(self.now)) is not None else []
        if self.interrupted:
            waiting.append(next(iter(self.interrupted.values())).since + self.limits.resubmit_s_max)
        if (write_off := self.billing.next_write_off()) is not None:
            waiting.append(write_off)
        if (hand_over := draining.next_hand_over(self)) < inf:
            waiting.append(hand_over)
        if self.empty_pools:
            waiting.append(next(iter(self.empty_pools.values())) + members.EMPTY_POOL_S_MAX)
        waiting += [at for at in (flips.next_deadline(self), flips.next_resume(self)) if at < inf]
        return min(waiting, default=None)

    def _violation(self, event: Received) -> ProtocolViolation | None:
        """Returns the protocol violation in a message, or None. Changes nothing."""
        incarnation, hello = event.incarnation, self.peers.get(event.incarnation)
        if hello is None:
            return None
        handler = HANDLERS.get(type(event.message))
        if handler is None or hello.role not in handler.roles:
            return ProtocolViolation(incarnation, f"a {hello.role} may not send {type(event.message).__name__}")
        if handler.check is None:
            return None
        try:
            fault = handler.check(self, incarnation, event)
        except Exception as error:  # noqa: BLE001 -- nothing has changed, whatever it is
            why = f"a bug of this coordinator, met by {type(event.message).__name__}"
            return ProtocolViolation(incarnation, why, "".join(traceback.format_exception(error)))
        return ProtocolViolation(incarnation, fault) if fault else None
