"""The inputs of the core, and its actions. Times are monotonic seconds, given with each event.

Objects that are made for every message are msgspec structs: a frozen dataclass takes five times as long to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from coordinator.accounting.usage import Closed, Opened, Past
from coordinator.policy.versions import PolicyInForce
from proto.messages import Hello, Message
from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES, PriorityClass
from runtime.tenancy.tenants import Tenants
from scheduler.fairness.cost import START_LONG_TOKENS, Prices
from scheduler.lifecycle import RequestState
from scheduler.score import Weights
from scheduler.step_pace import StepLimits


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


@dataclass(frozen=True)
class Tick:
    """A deadline has come."""


@dataclass(frozen=True)
class Configured:
    """A tenants file to put in force: before anything else, and whenever it has changed."""

    tenants: Tenants
    utc_offset_s: float
    """The wall clock minus the clock of `now`."""
    past: Past | None = None
    """The state of the ledger, at the start only."""
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
class Limits:
    """The core's options; `CoordinatorSettings` explains them to users."""

    queue_requests_max: int = 1024
    """Most requests that may wait. More make the largest backlog shed one, or are rejected with 429."""
    queue_tokens_max: int = 4_000_000
    """Most prompt tokens that may wait, with the same effect."""
    tenant_queue_max: int = 1024
    """Most requests of one tenant that may wait."""
    queue_wait_s_max: float = 120.0
    """Longest wait for a place, in seconds, in priority classes that have none of their own."""
    resumed_wait_s_max: float = 600.0
    """Longest wait of a later attempt, in seconds: its client may have had tokens already."""
    step_tokens: int = 0
    """Token budget of one prefill step. Scheduling can change course only between steps. 0: as the worker says."""
    step_ms: float = 250.0
    """About the longest time, in milliseconds, of the steps that a prefill worker gets in advance, so that the next prompt
    waits no longer; 0: no limit."""
    steps_in_flight: int = 2
    """Per prefill worker; two hide the round trip, more only delay cancellation."""
    retry_floor: int = 100
    """Interrupted requests that may come back within ten seconds in any case."""
    retry_share: float = 1.0
    """How many more may come back for each live request."""
    resubmit_s_max: float = 30.0
    """An interrupted request whose gateway does not come back within this is failed."""
    priority_classes: Mapping[str, PriorityClass] = field(default_factory=lambda: DEFAULT_PRIORITY_CLASSES)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of organisations ("priority class/organisation") and users ("priority class/organisation/user"); 1 where none
    is given."""
    quantum_tokens: float = 1024.0
    """Credit, in cost, that an idle tenant of weight 1 saves up. It is served that much before others when it comes back."""
    prices: Prices = field(default_factory=Prices)
    placement: Weights = field(default_factory=Weights)
    """Weights of the score that chooses workers."""
    overtaken_max: int = 16
    """After so many chunks of its tenant's later requests, the request that waited longest goes next."""
    bypasses_max: int = 64
    """After this many requests got room before a request that waits for room, freed room is kept for that request."""
    orphan_s_max: float = 120.0
    """How long an earlier coordinator's open ledger row waits for a report about its request, in seconds."""
    kv_overcommit: float = 64.0
    """An answer is counted on a decode worker with the length that few of its tenant's answers exceed, but with at least its
    max_tokens divided by this. 1: with max_tokens, so a decode worker never runs out of blocks."""
    long_output_tokens: float = START_LONG_TOKENS
    """The length that few answers are assumed to exceed, until some have been seen."""
    remembered_s: float = 600.0
    """How long ended requests are remembered, in seconds, so that a repeated submit neither runs nor is charged again."""
    remembered_max: int = 1_000_000
    """Most ended requests that are remembered: about 250 bytes each, and as much again for what they were charged."""

    @property
    def steps(self) -> StepLimits:
        return StepLimits(self.step_tokens, self.step_ms, self.steps_in_flight)
