"""Versions of the scheduling policy.

crossdock policy → coordinator   PolicyRequest   ← PolicyAnswer
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from proto import limits
from proto.fields import Count, DurationMs, Name, Text
from proto.messages import Message


class PolicyAction(StrEnum):
    LIST = "list"
    TRY = "try"
    END = "end"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


class PolicyRequest(Message, frozen=True):
    action: PolicyAction
    number: Count = 0
    """`list`: the version whose content is wanted. `rollback`: the one to put in force. 0: none, the one before."""
    content: Annotated[str, Meta(max_length=limits.MAX_POLICY_CHARS)] = ""
    """The tables of a tenants file in JSON, without keys and cache groups. Empty with `promote`: what is on trial."""
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """`try`: the share of organisations."""
    organisations: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()


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
    offered: Count = 0
    """All requests, except those that were rejected because they cannot be served or because of a quota."""
    finished: Count = 0
    kept: Count = 0
    """Finished within the targets of their class."""
    ttft_ms: DurationMs = 0.0
    """Sum of the times to first token of all finished requests."""
    tpot_ms: DurationMs = 0.0
    """Sum of their mean times per later token."""


class PolicyAnswer(Message, frozen=True):
    refusal: Text
    """Empty: it is done."""
    active: Count = 0
    trial: Count = 0
    """0: none."""
    share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    organisations: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ()
    versions: Annotated[tuple[PolicyVersion, ...], Meta(max_length=limits.MAX_POLICY_VERSIONS)] = ()
    arms: Annotated[tuple[ArmStatus, ...], Meta(max_length=3)] = ()
    content: Annotated[str, Meta(max_length=limits.MAX_POLICY_CHARS)] = ""
    """The content of the version that was asked for."""
    durable: bool = False
    """Versions are kept through a restart."""
