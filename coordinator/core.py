"""The coordinator's core: `handle(event, now) -> actions`. Pure: no clock, no sockets, no randomness.

Every handler is idempotent and ignores messages about an older attempt. An allocation counts as held until its worker reports
that it has released it (`HandedOver`, `Finished`, `WorkFailed`, `Released`) or until the worker is gone. So the coordinator
never counts more free blocks than the worker has.

    scheduler   what runs where and when: the package `scheduler`
    accounts    rights, quotas, bills and goodput of tenants
    members     processes, those that were lost, drains and changes of role

A handler first checks a peer's message without changing the state, and then applies it. If the check hits a bug, that peer's
link ends. A bug hit while the message is applied may leave the state half changed, so it ends the process.
"""

import traceback
from collections.abc import Callable
from typing import NamedTuple

from coordinator import admission, progress, requests
from coordinator.events import Action, Configured, Event, Limits, PeerDown, PeerUp, ProtocolViolation, Received, Tick
from coordinator.recovery import draining, flips, processes, suspects
from coordinator.reporting import status
from coordinator.state import State
from proto import drain, messages
from proto.messages import Hello, Message, Role
from proto.progress import DecodeProgress, EndSession, Hung
from proto.status import AutopilotReport, KvHeld, KvPairs
from scheduler.workers.worker import WORKERS


class Handler(NamedTuple):
    """The rules for one type of message."""

    roles: tuple[Role, ...]  # the roles that may send it
    apply: Callable[..., None]
    """Called with the state, the sender and the message. Of a worker, the sender is its `Worker`, else its incarnation."""
    check: Callable[..., str] | None = None
    """Called likewise. Returns what is wrong with a message, or an empty string. Changes nothing."""


_GATEWAY, _OBSERVER, _PREFILL, _DECODE = (Role.GATEWAY,), (Role.OBSERVER,), (Role.PREFILL,), (Role.DECODE,)
HANDLERS: dict[type[Message], Handler] = {
    messages.Submit: Handler(_GATEWAY, requests.on_submit, requests.fault_of_submit),  # gets the whole event
    messages.Cancel: Handler(_GATEWAY, requests.on_cancel),
    EndSession: Handler(_GATEWAY, requests.on_end_session),
    messages.StepDone: Handler(WORKERS, progress.on_step_done, progress.fault_of_step),
    messages.CacheMiss: Handler(WORKERS, progress.on_cache_miss, progress.fault_of_miss),
    messages.CacheEvents: Handler(WORKERS, progress.on_cache_events),
    messages.HandedOver: Handler(_PREFILL, progress.on_handed_over, progress.fault_of_hand_over),
    DecodeProgress: Handler(_DECODE, progress.on_decode_progress, progress.fault_of_progress),
    messages.Finished: Handler(WORKERS, progress.on_finished, progress.fault_of_end),
    messages.Released: Handler(WORKERS, progress.on_released, progress.fault_of_end),
    messages.WorkFailed: Handler(WORKERS, progress.on_work_failed),
    Hung: Handler(WORKERS, processes.on_hung),
    KvPairs: Handler(_PREFILL, progress.on_kv_pairs),
    KvHeld: Handler(WORKERS, progress.on_kv_held),
    drain.Draining: Handler(WORKERS, draining.on_draining),
    drain.DrainRequest: Handler(_OBSERVER, draining.on_drain_request),
    drain.FlipRequest: Handler(_OBSERVER, flips.on_flip_request),
    drain.FlipFailed: Handler(WORKERS, flips.on_flip_failed),
    messages.StatusRequest: Handler((Role.OBSERVER, Role.GATEWAY), status.on_status_request),
    AutopilotReport: Handler(_OBSERVER, status.on_autopilot_report),
}


class Core:
    def __init__(self, limits: Limits | None = None) -> None:
        self.state = state = State(limits or Limits())
        self.scheduler, self.cluster = state.scheduler, state.cluster
        self.accounts, self.members = state.accounts, state.members

    @property
    def limits(self) -> Limits:
        return self.state.limits

    def refusal(self, hello: Hello) -> str | None:
        """Returns why a process may not join, or None. The link server calls it before the process's `PeerUp`."""
        if hello.incarnation in self.members.fenced:
            return "this incarnation hung, and was given up"
        return admission.refusal(hello, self.cluster.pools)

    def handle(self, event: Event, now: float) -> list[Action]:
        state, members = self.state, self.members
        state.out, state.now = [], now
        if isinstance(event, Received) and (violation := self._violation(event)) is not None:
            return [violation]
        requests.expire(state)
        if members.empty_pools:
            processes.forget_models(state)
        match event:
            case Received(incarnation, message):
                if incarnation in members.peers:
                    HANDLERS[type(message)].apply(state, *self._arguments(event))
            case PeerUp(incarnation, hello):
                processes.on_up(state, incarnation, hello)
            case PeerDown(incarnation, reason):
                processes.on_down(state, incarnation, reason)
            case Configured():
                state.accounts.configure(event, now)
                if event.policy.rollouts != state.revisions.rollouts:
                    state.revisions.rollouts = event.policy.rollouts
                    state.send_gateways()
            case Tick():
                pass
        if self.cluster.draining:
            draining.hand_over_due(state)
        if members.keeping:
            flips.resume_due(state)
        if members.flipping:
            flips.change_over_due(state)  # a worker whose change is given up takes work again
        suspects.fail_culprits(state)
        state.carry_out(self.scheduler.decide(now))
        if self.cluster.draining:
            draining.dismiss(state)
        return state.out

    def next_deadline(self) -> float | None:
        state = self.state
        deadlines = [
            self.scheduler.next_deadline(state.now),
            requests.next_expiry(state),
            state.billing.next_write_off(),
            draining.next_hand_over(state),
            processes.next_forgotten(state),
            flips.next_deadline(state),
        ]
        return min((at for at in deadlines if at is not None), default=None)

    def _arguments(self, event: Received) -> tuple[object, object]:
        incarnation, message = event.incarnation, event.message
        sender = self.cluster.workers.get(incarnation, incarnation)
        return sender, event if isinstance(message, messages.Submit) else message

    def _violation(self, event: Received) -> ProtocolViolation | None:
        """Returns the protocol violation in a message, or None. Changes nothing."""
        incarnation, hello = event.incarnation, self.members.peers.get(event.incarnation)
        if hello is None:
            return None
        kind = type(event.message)
        handler = HANDLERS.get(kind)
        if handler is None or hello.role not in handler.roles:
            return ProtocolViolation(incarnation, f"a {hello.role} may not send {kind.__name__}")
        if handler.check is None:
            return None
        try:
            fault = handler.check(self.state, *self._arguments(event))
        except Exception as error:  # noqa: BLE001 -- nothing has changed, whatever it is
            why = f"a bug of this coordinator, met by {kind.__name__}"
            return ProtocolViolation(incarnation, why, "".join(traceback.format_exception(error)))
        return ProtocolViolation(incarnation, fault) if fault else None
