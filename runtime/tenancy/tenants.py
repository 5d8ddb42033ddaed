"""The tenants file: who may use the service, and how much of it. Pure: text in, frozen values out.

A tenant is an organisation or one of its users, named `organisation` or `organisation/user`:

    [tenants.acme]                      # an organisation; its keys need no user
    weight = 2.0                        # its share beside other organisations of the same priority class
    priority_class = "standard"                   # of requests that ask for none
    priority_classes = ["standard", "batch"]       # those its requests may ask for
    borrow = true                       # may exceed its rates per minute while capacity is idle
    cache_group = "acme"                # its users share the prefix cache; else each has its own
    slo_ttft_ms = 2000                  # what its requests are measured against, for the metrics alone
    slo_itl_ms = 200                    # 99 of 100 gaps of a stream
    keys = ["<SHA-256 of a key, in hex>"]
    [tenants.acme.limits]               # of all its users together
    tokens_per_min = 200_000
    [tenants.acme.users.ann]            # what is not said here is the organisation's, but for limits and weight
    keys = ["…"]
    limits = { concurrency = 4 }

    [priority_classes.interactive]                 # where priority classes are given, they are all there are
    weight = 8.0
    floor_share = 0.2
    queue_wait_s = 30.0                 # a request that found no place by then is turned away
    ttft_ms = 2000                      # targets: see `priority_classes.py`
    tpot_ms = 50
    percentile = 0.9

Keys are 256 random bits (`crossdock tenants key` makes them), so a plain SHA-256 protects them: no dictionary attack is
possible. A salt would only prevent the lookup of a key by its hash. Both the gateway, which knows keys, and the coordinator,
which knows limits, read the file; hence it lives here. Without a file there is one tenant, `default`, without limits.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from proto.errors import CrossdockError
from runtime.tenancy.faults import explain, name_shown, not_toml
from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASS, DEFAULT_PRIORITY_CLASSES, PriorityClass

DEFAULT_TENANT: Final = "default"
FILE_BYTES_MAX: Final = 32 << 20
_LIMIT_MAX: Final = (1 << 40) - 1
_ERRORS_SHOWN: Final = 20


class TenantsError(CrossdockError):
    """The tenants file cannot be used; `str()` has one line for each fault, with the key at fault."""


@dataclass(frozen=True)
class QuotaLimits:
    """Limits of a tenant; None is no limit. Tokens are prompt and output together."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None  # accepted and not ended
    tokens_in_flight: int | None = None
    kv_blocks: int | None = None
    tokens_per_day: int | None = None  # from midnight UTC


@dataclass(frozen=True)
class Level:
    """A place where limits are counted: a user, or an organisation with all its users."""

    name: str
    limits: QuotaLimits
    borrow: bool


@dataclass(frozen=True)
class ClassTargets:
    """The targets that a tenant's requests are measured against; None is no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # for 99 of 100 gaps between deliveries of a stream

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True)
class Policy:
    """All that holds for the requests of one tenant."""

    tenant: str
    organisation: str
    user: str  # empty for an organisation's own keys
    weight: float  # beside the other users of its organisation
    organisation_weight: float
    priority_class: str
    priority_classes: frozenset[str]
    cache_group: str  # Salt of the prefix cache, shared by equal salts. A group's never equals a single tenant's.
    levels: tuple[Level, ...]  # user first, then organisation
    slo: ClassTargets = ClassTargets()


@dataclass(frozen=True)
class Tenants:
    """The content of a tenants file."""

    priority_classes: Mapping[str, PriorityClass]  # in the order of the file
    policies: Mapping[str, Policy]  # by tenant; `default` is always there
    keys: Mapping[bytes, str] = field(repr=False)  # SHA-256 digest of a key → tenant
    open: bool = False  # there is no file

    def policy(self, tenant: str) -> Policy | None:
        """Returns a tenant's policy, or None if the file does not have it (any more). Without a file, that of `default`
        holds."""
        return self.policies.get(tenant) or (self.policies[DEFAULT_TENANT] if self.open else None)

    def weights(self) -> dict[str, float]:
        """Weights by path in the fair queue: `priority_class/organisation` and `priority_class/organisation/user`."""
        weights: dict[str, float] = {}
        for policy in self.policies.values():
            for priority_class in policy.priority_classes:
                weights[f"{priority_class}/{policy.organisation}"] = policy.organisation_weight
                weights[f"{priority_class}/{policy.organisation}/{policy.user}"] = policy.weight
        return weights


# --- the file's shape -------------------------------------------------------------------------------------------------

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}\z")]
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
_Limit = Annotated[int, Field(gt=0, le=_LIMIT_MAX)]
_Milliseconds = Annotated[float, Field(gt=0.0, le=86_400_000.0)]
_Weight = Annotated[float, Field(gt=0.0, le=1e6)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _PriorityClassPart(_Part):
    weight: _Weight
    floor_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    ttft_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 2.0
    ttft_s_per_chunk: Annotated[float, Field(ge=0.0, le=3_600.0)] = 2.0
    queue_wait_s: Annotated[float, Field(gt=0.0, le=86_400.0)] | None = None
    ttft_ms: _Milliseconds | None = None
    tpot_ms: Annotated[float, Field(ge=1.0, le=60_000.0)] | None = None
    percentile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9


class _LimitsPart(_Part):
    requests_per_min: _Limit | None = None
    tokens_per_min: _Limit | None = None
    concurrency: _Limit | None = None
    tokens_in_flight: _Limit | None = None
    kv_blocks: _Limit | None = None
    tokens_per_day: _Limit | None = None


class _TenantPart(_Part):
    weight: _Weight = 1.0
    priority_class: str | None = None
    priority_classes: Annotated[list[str], Field(min_length=1)] | None = None
    borrow: bool | None = None
    cache_group: _Name | None = None
    slo_ttft_ms: _Milliseconds | None = None
    slo_itl_ms: _Milliseconds | None = None
    keys: list[_Hash] = []
    limits: _LimitsPart = _LimitsPart()


class _OrganisationPart(_TenantPart):
    users: dict[_Name, _TenantPart] = {}


class _FilePart(_Part):
    priority_classes: Annotated[dict[_Name, _PriorityClassPart], Field(min_length=1)] | None = None
    tenants: dict[_Name, _OrganisationPart] = {}


def parse(text: str) -> Tenants:
    """Raises `TenantsError`."""
    return from_tables(tables_of(text))


def tables_of(text: str) -> dict[str, object]:
    """The file's tables, not checked. Raises `TenantsError` if it is no TOML."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise TenantsError(not_toml(error)) from None


def without_secrets(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A file's tables without what only gateways may know. (A tenant or user may be called `keys`: that is a table.)"""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in tables.items()
        if name not in ("keys", "cache_group") or isinstance(value, Mapping)
    }


def from_tables(content: Mapping[str, object]) -> Tenants:
    """`content`: the file's tables. Raises `TenantsError`."""
    try:
        part = _FilePart.model_validate(content)
    except ValidationError as error:
        raise _faults([explain(details) for details in error.errors(include_url=False)]) from None
    priority_classes = DEFAULT_PRIORITY_CLASSES
    if part.priority_classes is not None:
        priority_classes = {name: PriorityClass(**dict(values)) for name, values in part.priority_classes.items()}
    return _Builder(priority_classes).build(part)


def open_tenants() -> Tenants:
    """The tenants without a file: one without limits, which may use every priority class."""
    return replace(_Builder(DEFAULT_PRIORITY_CLASSES).build(_FilePart()), open=True)


class _Builder:
    """Builds the policies from the parsed parts, and collects the faults between them."""

    def __init__(self, priority_classes: Mapping[str, PriorityClass]) -> None:
        self.priority_classes = dict(priority_classes)
        self.faults: list[str] = []
        self.policies: dict[str, Policy] = {}
        self.keys: dict[bytes, str] = {}

    def build(self, part: _FilePart) -> Tenants:
        if sum(priority_class.floor_share for priority_class in self.priority_classes.values()) >= 1.0:
            self.faults.append(
                "priority classes: their floor_share add up to 1 or more, which leaves nothing to share by weight"
            )
        for name, organisation in part.tenants.items():
            self._organisation(name, organisation)
        if DEFAULT_TENANT not in self.policies:
            self._organisation(DEFAULT_TENANT, _OrganisationPart(priority_classes=list(self.priority_classes)))
        if self.faults:
            raise _faults(self.faults)
        return Tenants(
            MappingProxyType(self.priority_classes), MappingProxyType(self.policies), MappingProxyType(self.keys)
        )

    def _organisation(self, name: str, part: _OrganisationPart) -> None:
        priority_class = part.priority_class or (
            DEFAULT_PRIORITY_CLASS
            if DEFAULT_PRIORITY_CLASS in self.priority_classes
            else next(iter(self.priority_classes))
        )
        own = Policy(
            tenant=name,
            organisation=name,
            user="",
            weight=1.0,
            organisation_weight=part.weight,
            priority_class=priority_class,
            priority_classes=self._allowed(f"tenants.{name_shown(name)}", priority_class, part.priority_classes),
            cache_group=_cache_group(part.cache_group, name),
            levels=(Level(name, QuotaLimits(**dict(part.limits)), bool(part.borrow)),),
            slo=ClassTargets(part.slo_ttft_ms, part.slo_itl_ms),
        )
        self._add(f"tenants.{name_shown(name)}", own, part.keys)
        for user, user_part in part.users.items():
            self._user(own, user, user_part, part)

    def _user(self, own: Policy, user: str, part: _TenantPart, organisation: _OrganisationPart) -> None:
        where = f"tenants.{name_shown(own.tenant)}.users.{name_shown(user)}"
        tenant, above = f"{own.tenant}/{user}", own.levels[0]
        borrow = above.borrow if part.borrow is None else part.borrow
        priority_class = part.priority_class or own.priority_class
        asked = (
            part.priority_classes
            if part.priority_classes is not None or part.priority_class is not None
            else organisation.priority_classes
        )
        policy = Policy(
            tenant=tenant,
            organisation=own.tenant,
            user=user,
            weight=part.weight,
            organisation_weight=own.organisation_weight,
            priority_class=priority_class,
            priority_classes=self._allowed(where, priority_class, asked),
            cache_group=_cache_group(part.cache_group or organisation.cache_group, tenant),
            levels=(Level(tenant, QuotaLimits(**dict(part.limits)), borrow), above),
            slo=ClassTargets(
                own.slo.ttft_ms if part.slo_ttft_ms is None else part.slo_ttft_ms,
                own.slo.itl_ms if part.slo_itl_ms is None else part.slo_itl_ms,
            ),
        )
        self._add(where, policy, part.keys)

    def _allowed(self, where: str, priority_class: str, asked: list[str] | None) -> frozenset[str]:
        """The priority classes a tenant may use: those listed, else its own and those that weigh no more."""
        known = ", ".join(map(name_shown, self.priority_classes))
        if priority_class not in self.priority_classes:
            self.faults.append(f"{where}.priority_class: is not a priority class; there are {known}")
            return frozenset()
        if asked is None:
            return frozenset(
                name
                for name, b in self.priority_classes.items()
                if b.weight <= self.priority_classes[priority_class].weight
            )
        self.faults += [
            f"{where}.priority_classes.{index}: is not a priority class; there are {known}"
            for index, name in enumerate(asked)
            if name not in self.priority_classes
        ]
        if priority_class not in asked:
            self.faults.append(
                f"{where}.priority_classes: must have the tenant's own priority class {name_shown(priority_class)!r} in it"
            )
        return frozenset(asked)

    def _add(self, where: str, policy: Policy, hashes: list[str]) -> None:
        self.policies[policy.tenant] = policy
        for digest in map(bytes.fromhex, hashes):
            other = self.keys.setdefault(digest, policy.tenant)
            if other != policy.tenant:
                self.faults.append(f"{where}.keys: {digest.hex()[:8]}… is a key of {name_shown(other)!r} too")
        self.faults += [f"{where}.keys: {text[:8]}… is there twice" for text, n in Counter(hashes).items() if n > 1]


def _cache_group(group: str | None, tenant: str) -> str:
    return f"group:{group}" if group else f"tenant:{tenant}"


def _faults(lines: list[str]) -> TenantsError:
    shown = lines[:_ERRORS_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return TenantsError("\n".join(shown))
