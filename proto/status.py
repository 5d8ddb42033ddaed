"""The status of a cluster for people, and the reports of workers for that alone."""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits
from proto.fields import Count, DurationMs, Incarnation, Text
from proto.kv import TransportName
from proto.messages import Message, Role

Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
ErrorRatio = Annotated[float, Meta(ge=0.0, le=1e9)] | None


class KvPair(msgspec.Struct, frozen=True, array_like=True):
    """How a prefill worker reaches one decode worker."""

    decode_incarnation: Incarnation
    transport: TransportName
    why: Text  # the reason against better transports; empty: none


class KvPairs(Message, frozen=True):
    """All pairs of a prefill worker, sent when they change."""

    pairs: Annotated[tuple[KvPair, ...], Meta(max_length=1024)]


class KvHeld(Message, frozen=True):
    """A worker's answer to a `StatusRequest`, which the coordinator forwards to all workers: the worker's own counts."""

    blocks: Count
    blocks_quarantined: Count
    sessions: Count  # KV transfers that have not ended


class PairStatus(msgspec.Struct, frozen=True, array_like=True):
    prefill: Text
    decode: Text
    transport: Text
    why: Text


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True):
    name: Text
    role: Role
    model: Text
    host: Text
    pid: Count
    kv_blocks: Count
    kv_blocks_used: Count
    requests: Count
    steps_in_flight: Count
    tokens_forwarded: Count  # since it started, as last reported
    own_blocks: Count = 0  # by its own count, when `crossdock status` last asked
    own_blocks_quarantined: Count = 0
    own_sessions: Count = 0
    draining: bool = False
    numerics: Text = ""  # as in `Hello`
    steps: Count = 0  # in its present role, as last reported
    process: Text = ""  # its own name, or that of the mixed worker that it is one role of


class TenantStatus(msgspec.Struct, frozen=True, array_like=True):
    name: Text
    share: Annotated[float, Meta(ge=0.0, le=1.0)]  # of what was dispatched in about the last ten seconds, by cost
    waiting: Count
    ttft_p50_ms: DurationMs = 0.0  # of its requests among the last that finished; 0: none of them did
    ttft_p99_ms: DurationMs = 0.0


class ClassStatus(msgspec.Struct, frozen=True, array_like=True):
    """A priority class, and what became of its requests since the coordinator started."""

    name: Text
    ttft_ms: DurationMs  # targets; 0: none
    tpot_ms: DurationMs
    percentile: Annotated[float, Meta(ge=0.0, le=1.0)]  # share of finished requests that should keep both
    offered: Count
    finished: Count
    kept: Count  # finished within both targets


class Process(msgspec.Struct, frozen=True, array_like=True):
    name: Text
    pid: Count


class FlipStatus(msgspec.Struct, frozen=True, array_like=True):
    """A worker's change of role."""

    worker: Text
    pid: Count
    before: Role
    role: Role
    state: Text  # `draining`, `registering`, `done` or `failed`
    why: Text = ""  # as ordered; empty: no reason was given
    failure: Text = ""
    drained_ms: DurationMs = 0.0  # milliseconds from the order until nothing was left on it
    commit_ms: DurationMs = 0.0  # milliseconds from then until it was registered in its new role: it served in neither
    first_step_ms: DurationMs = 0.0  # milliseconds from then until its first step was done; 0: none has run yet
    model: Text = ""


class TrafficStatus(msgspec.Struct, frozen=True, array_like=True):
    """A sample of the last requests for one model, oldest first."""

    model: Text
    ages_ms: Annotated[tuple[DurationMs, ...], Meta(max_length=1024)]  # since each came
    stands_for: Annotated[tuple[Count, ...], Meta(max_length=1024)]
    """The number of requests that each sample stands for: those since the sample before it, itself included."""
    prompt_tokens: Annotated[tuple[Count, ...], Meta(max_length=1024)]
    cached_tokens: Annotated[tuple[Count, ...], Meta(max_length=1024)]  # as far as is known
    output_tokens: Annotated[tuple[Count, ...], Meta(max_length=1024)]  # as counted, or as expected
    waiting_tokens: Count  # of prompts that wait for their turn
    ttft_ms: Annotated[tuple[DurationMs, ...], Meta(max_length=1024)] = ()
    """The time until the prompt was computed, or the time up to now if it is not computed yet; 0: the request ended before."""
    tpot_ms: Annotated[tuple[DurationMs, ...], Meta(max_length=1024)] = ()  # mean per later token; 0: there are none
    lost: Count = 0  # workers of the model that were lost since the coordinator started, or forgot the model


class PredictionError(msgspec.Struct, frozen=True, array_like=True):
    """The errors of an autopilot's predictions against measurements: medians of its comparisons in the last hour."""

    comparisons: Count = 0
    ttft_p50: ErrorRatio = None  # relative: 0.1 is a tenth; None: not known
    ttft_p90: ErrorRatio = None
    tpot_p90: ErrorRatio = None
    slo_share: ErrorRatio = None  # the error of the share of requests that keep the SLO: 0.05 is 5 points


class AutopilotStatus(msgspec.Struct, frozen=True, array_like=True):
    model: Text
    mode: Text
    present: Text  # ratio of workers, like 2P6D
    wanted: Text
    reason: Text
    error: PredictionError = PredictionError()
    age_ms: DurationMs = 0.0  # how long ago it said so


class AutopilotReport(Message, frozen=True):
    """Its latest decision, for `crossdock status` and the event log. The answer is a `StatusReport`."""

    status: AutopilotStatus


class PolicyStatus(msgspec.Struct, frozen=True, array_like=True):
    """The version of the scheduling policy that is in force, and the one that is on trial."""

    number: Count  # 0: not known
    digest: Text
    trial: Count  # 0: none
    trial_digest: Text


class SessionStatus(msgspec.Struct, frozen=True, array_like=True):
    """Conversations of one model."""

    model: Text
    sessions: Count  # sessions of the last hour without a turn that runs
    leases: Count  # sessions for which KV is kept, since their next turns are still expected
    leased_tokens: Count  # kept for them


class StatusReport(Message, frozen=True):
    workers: tuple[WorkerStatus, ...]
    gateways: tuple[Text, ...]
    queued: Count
    running: dict[Text, Count]  # requests by life-cycle state
    finished: dict[Text, Count]  # since start, by outcome
    counters: dict[Text, Annotated[int, Meta(ge=0)]]  # bytes moved are soon more than a Count
    kv_pairs: tuple[PairStatus, ...] = ()
    circuit_open: tuple[Text, ...] = ()  # pairs of workers that get no requests for a while, in words
    tenants: tuple[TenantStatus, ...] = ()  # with the largest shares, largest first
    metrics: dict[Text, Text] = {}  # noqa: RUF012 (msgspec copies it)
    recent: dict[Text, float] = {}  # noqa: RUF012
    """Times of the last requests, in ms, and how many they are; requests and tokens per second of the last minute."""
    hung: tuple[Process, ...] = ()  # the last workers that were given up because of a hung step, latest last
    flips: tuple[FlipStatus, ...] = ()  # latest last
    traffic: Annotated[tuple[TrafficStatus, ...], Meta(max_length=limits.MAX_MODELS)] = ()
    autopilots: Annotated[tuple[AutopilotStatus, ...], Meta(max_length=limits.MAX_MODELS)] = ()
    classes: Annotated[tuple[ClassStatus, ...], Meta(max_length=limits.MAX_CLASSES_SHOWN)] = ()  # those with a target
    policy: PolicyStatus = PolicyStatus(0, "", 0, "")
    sessions: Annotated[tuple[SessionStatus, ...], Meta(max_length=limits.MAX_MODELS)] = ()
    version: Text = ""  # of the coordinator's crossdock
    uptime_ms: DurationMs = 0.0  # of the coordinator
