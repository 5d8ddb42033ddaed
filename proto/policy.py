"""Versions of the scheduling policy, and rollouts of a model's revision.

crossdock policy  → coordinator   PolicyRequest    ← PolicyAnswer
crossdock rollout → coordinator   RolloutRequest   ← RolloutAnswer
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from proto import limits
from proto.fields import Count, DurationMs, Name, NameOrEmpty, Text
from proto.messages import Message

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Organisations = Annotated[tuple[Name, ...], Meta(max_length=1024)]


class PolicyAction(StrEnum):
    LIST = "list"
    TRY = "try"
    END = "end"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


class PolicyRequest(Message, frozen=True):
    action: PolicyAction
    number: Count = 0  # `list`: the version to show. `rollback`: the one to put in force; 0: the one before.
    content: Annotated[str, Meta(max_length=limits.MAX_POLICY_CHARS)] = ""
    """The tables of a tenants file in JSON, without keys and cache groups. Empty with `promote`: what is on trial."""
    share: Share = 0.0  # `try`: the share of organisations
    organisations: Organisations = ()


class PolicyVersion(Struct, frozen=True, array_like=True):
    number: Count
    digest: Text
    source: Text
    age_ms: DurationMs
    tenants: Count


class ArmStatus(Struct, frozen=True, array_like=True):
    """Requests that came under one version since it was put in force or on trial."""

    arm: Text
    """`active`, `candidate`, or `baseline`: the half of the organisations under the version in force with which the other half,
    `active`, is compared."""
    offered: Count = 0  # all but those that were rejected as not servable or by a quota
    finished: Count = 0
    kept: Count = 0  # finished within the targets of their class
    ttft_ms: DurationMs = 0.0  # summed over all finished requests
    tpot_ms: DurationMs = 0.0  # mean per later token, summed over all finished requests


class PolicyAnswer(Message, frozen=True):
    refusal: Text  # empty: done
    active: Count = 0
    trial: Count = 0  # 0: none
    share: Share = 0.0
    organisations: Organisations = ()
    versions: Annotated[tuple[PolicyVersion, ...], Meta(max_length=limits.MAX_POLICY_VERSIONS)] = ()
    arms: Annotated[tuple[ArmStatus, ...], Meta(max_length=3)] = ()
    content: Annotated[str, Meta(max_length=limits.MAX_POLICY_CHARS)] = ""
    durable: bool = False  # versions are kept through a restart


# --- rollouts ---------------------------------------------------------------------------------------------------------


class RolloutAction(StrEnum):
    STATUS = "status"
    START = "start"
    PROMOTE = "promote"
    ABORT = "abort"


class RolloutRequest(Message, frozen=True):
    action: RolloutAction
    model: Text = ""  # empty: the only model that the request can mean
    revision: NameOrEmpty = ""  # `start`: the one to try
    share: Share = 0.0
    by_organisation: bool = False  # the share is of organisations; else of requests
    organisations: Organisations = ()


class RevisionStatus(Struct, frozen=True, array_like=True):
    """A revision with workers. Its requests are those since the coordinator started, or since a rollout changed."""

    model: Text
    revision: NameOrEmpty
    prefill: Count  # workers that take work
    decode: Count
    in_force: bool = False  # it gets all new requests but those of a trial
    on_trial: bool = False
    share: Share = 0.0
    by_organisation: bool = False
    organisations: Organisations = ()
    running: Count = 0  # requests that have not ended
    sessions: Count = 0  # whose next turn it gets, since KV is kept for it
    offered: Count = 0
    finished: Count = 0
    failed: Count = 0  # accepted, and ended by an error, a deadline or an overload
    ttft_ms: DurationMs = 0.0  # summed over all finished requests


class RolloutAnswer(Message, frozen=True):
    refusal: Text  # empty: done
    revisions: Annotated[tuple[RevisionStatus, ...], Meta(max_length=limits.MAX_MODELS)] = ()
