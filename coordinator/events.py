"""The inputs of the core, and its actions. Times are monotonic seconds, given with each event.

Objects that are made for every message are msgspec structs: a frozen dataclass takes five times as long to make.
"""

from dataclasses import dataclass, field

import msgspec

from coordinator.accounting.billing import Closed, Opened, Past
from coordinator.policy_versions import PolicyInForce
from proto.messages import Hello, Message
from runtime.tenancy.tenants import Tenants
from scheduler.lifecycle import RequestState
from scheduler.limits import SchedulerLimits
from scheduler.waiting.projection import fingerprint


class PeerUp(msgspec.Struct, frozen=True, gc=False):
    """A process has joined, and `Core.refusal` accepted its `Hello`."""

    incarnation: int
    hello: Hello


class PeerDown(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
    reason: str


class Received(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
    message: Message
    blob: bytes = b""
    recorded: int | None = None  # in a replay, whose blob is zeros: the prompt's fingerprint

    @property
    def fingerprint(self) -> int:
        return fingerprint(self.blob) if self.recorded is None else self.recorded


@dataclass(frozen=True)
class Tick:
    """A deadline has come."""


@dataclass(frozen=True)
class Configured:
    """A tenants file to put in force: before anything else, and whenever it has changed."""

    tenants: Tenants
    utc_offset_s: float  # the wall clock minus the clock of `now`
    past: Past | None = None  # the state of the ledger, at the start only
    policy: PolicyInForce = field(default_factory=PolicyInForce)
    """The version of the policy that these tenants belong to."""


Event = PeerUp | PeerDown | Received | Configured | Tick


class Send(msgspec.Struct, frozen=True, gc=False):
    incarnation: int
    message: Message
    blob: bytes = b""


class StateChanged(msgspec.Struct, frozen=True, gc=False):
    """A request changed its state, for the log and for metrics."""

    request_id: str
    attempt: int
    state: RequestState
    why: str


class ProtocolViolation(msgspec.Struct, frozen=True, gc=False):
    """A peer broke the protocol; the driver counts it and ends the link."""

    incarnation: int
    reason: str
    traceback: str = ""
    """The traceback of a bug in the check of its message, which changed nothing; empty: the peer is at fault."""


Action = Send | StateChanged | ProtocolViolation | Opened | Closed


@dataclass(frozen=True)
class Limits(SchedulerLimits):
    """The core's options; `CoordinatorSettings` explains them to users."""

    resubmit_s_max: float = 30.0  # an interrupted request whose gateway does not come back within this is failed
    orphan_s_max: float = 120.0
    """How long an earlier coordinator's open ledger row waits for a report about its request, in seconds."""
    remembered_s: float = 600.0
    """How long ended requests are remembered, in seconds, so that a repeated submit neither runs nor is charged again."""
    remembered_max: int = 1_000_000
    """Most ended requests that are remembered: about 250 bytes each, and as much again for what they were charged."""
