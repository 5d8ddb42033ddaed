"""What a tenant may do: frozen values, made from the tenants file. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True)
class PriorityClass:
    """A priority priority class: weighted, with a share it never falls below; none is strict."""

    weight: float = 1.0
    floor_share: float = 0.0
    """Of all service, while every priority class has work; more when some have none."""
    ttft_s: float = 2.0
    """A request without a deadline of its own is due so long after its arrival …"""
    ttft_s_per_chunk: float = 2.0
    """… and so much later for each chunk of its prompt: an old long prompt is not due before every new short one."""
    queue_wait_s: float | None = None
    """A request that found no place within this is turned away; None: within the coordinator's --queue-wait-s-max."""


@dataclass(frozen=True)
class QuotaLimits:
    """None is no limit. Tokens are prompt and output together."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None
    """Requests accepted and not ended."""
    tokens_in_flight: int | None = None
    kv_blocks: int | None = None
    tokens_per_day: int | None = None
    """Days begin at midnight UTC."""


@dataclass(frozen=True)
class Level:
    """A place where limits are counted: a user, or an organisation with all its users."""

    name: str
    limits: QuotaLimits
    borrow: bool


@dataclass(frozen=True)
class Slo:
    """What a tenant's requests are measured against; None is no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """For 99 of 100 gaps between deliveries of a stream."""

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True)
class Policy:
    """All that holds for the requests of one tenant."""

    tenant: str
    organisation: str
    user: str
    """Empty for an organisation's own keys."""
    weight: float
    """Beside the other users of its organisation."""
    organisation_weight: float
    priority_class: str
    priority_classes: frozenset[str]
    cache_group: str
    """Salt of the prefix cache: tenants with the same one share it. A group's can never equal a tenant's own."""
    levels: tuple[Level, ...]
    """User first, then organisation."""
    slo: Slo = Slo()


@dataclass(frozen=True)
class Tenants:
    """What a tenants file says."""

    priority_classes: Mapping[str, PriorityClass]
    """In the order of the file."""
    policies: Mapping[str, Policy]
    """By tenant; `default` is always there."""
    keys: Mapping[bytes, str] = field(repr=False)
    """SHA-256 digest of a key → tenant."""
    open: bool = False
    """There is no file."""

    def policy(self, tenant: str) -> Policy | None:
        """None for a tenant that the file does not know (any more). Without a file, what `default` may do, everyone may."""
        return self.policies.get(tenant) or (self.policies[DEFAULT_TENANT] if self.open else None)

    def weights(self) -> dict[str, float]:
        """Of the fair queue's nodes below its priority classes: `priority class/organisation` and `priority
        class/organisation/user`."""
        weights: dict[str, float] = {}
        for policy in self.policies.values():
            for priority_class in policy.priority_classes:
                weights[f"{priority_class}/{policy.organisation}"] = policy.organisation_weight
                weights[f"{priority_class}/{policy.organisation}/{policy.user}"] = policy.weight
        return weights
