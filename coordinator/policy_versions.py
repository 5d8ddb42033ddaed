"""Numbered versions of the scheduling policy: the tenants file without secrets, and the coordinator's scheduling options. Pure.

A version gets its number when it is first loaded, promoted or tried. One is in force, and another may be on trial. The tenants
file counts only where its content has changed since it was last read: a version that was promoted stays through a restart.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from xxhash import xxh64_intdigest

from coordinator.rollouts.plan import Rollout
from proto.errors import CrossdockError
from proto.limits import MAX_POLICY_VERSIONS
from runtime.tenancy.tenants import DEFAULT_TENANT, Tenants, from_tables, without_secrets

Tables = Mapping[str, Any]


class PolicyError(CrossdockError):
    """A request of `crossdock policy` that cannot be met."""


class PolicyRevision(msgspec.Struct, frozen=True):
    number: int
    digest: str
    source: str
    unix_s: float
    tables: dict[str, Any]  # the tenants file, without secrets
    options: dict[str, Any]  # scheduling options of the coordinator that had it in force first


class Trial(msgspec.Struct, frozen=True):
    """Some organisations run under another version. All requests of an organisation run under the same one."""

    number: int
    share: float = 0.0
    """The share of all organisations that it is tried on, chosen by a hash of their names: the same ones in every trial of
    this share."""
    organisations: tuple[str, ...] = ()

    def has(self, organisation: str) -> bool:
        return organisation in self.organisations or xxh64_intdigest(organisation.encode()) < self.share * 2**64


class PolicyInForce(msgspec.Struct, frozen=True):
    """The part of versions that the core knows: their names, for status, metrics and the event log."""

    number: int = 0
    digest: str = ""
    trial: Trial | None = None
    trial_digest: str = ""
    rollouts: dict[str, Rollout] = {}  # by model id

    def arm(self, organisation: str) -> str:
        """During a trial, the organisations that it leaves out are two arms, to show how far arms differ by chance."""
        if self.trial is None:
            return "active"
        if self.trial.has(organisation):
            return "candidate"
        return "active" if xxh64_intdigest(organisation.encode(), seed=1) < 2**63 else "baseline"


class Versions(msgspec.Struct):
    kept: list[PolicyRevision] = []  # oldest first
    active: int = 0
    before: list[int] = []  # versions that were in force before, latest last
    trial: Trial | None = None
    file_digest: str = ""  # digest of the tenants file as it was last read
    rollouts: dict[str, Rollout] = {}  # by model id; they are kept with the versions, and change by themselves

    def get(self, number: int) -> PolicyRevision:
        """Raises `PolicyError`."""
        for version in self.kept:
            if version.number == number:
                return version
        raise PolicyError(f"there is no version {number}; crossdock policy list shows them")

    def load(self, tables: Tables, options: Mapping[str, Any], now_s: float) -> None:
        """Load the tenants file, at the start and when it has changed."""
        tables, changed = without_secrets(tables), digest_of(without_secrets(tables), {})
        if changed != self.file_digest or not self.active:
            self.file_digest, self.trial = changed, None
            self._put_in_force(self._add(tables, options, "tenants file", now_s))
        elif self.get(self.active).options != options:
            was = self.get(self.active)
            self._put_in_force(self._add(was.tables, options, f"version {was.number} with other options", now_s))

    def try_(self, tables: Tables, options: Mapping[str, Any], trial: Trial, now_s: float) -> None:
        """Put tables on trial. `trial`: for which organisations; its number is set here."""
        self.trial = None
        number = self._add(without_secrets(tables), options, "trial", now_s)
        if number == self.active:
            raise PolicyError(f"this is version {number}, which is in force")
        self.trial = msgspec.structs.replace(trial, number=number)

    def end_trial(self) -> None:
        if self.trial is None:
            raise PolicyError("no version is on trial")
        self.trial = None

    def promote(self, tables: Tables | None, options: Mapping[str, Any], now_s: float) -> None:
        """Put tables in force, or what is on trial."""
        if tables is not None:
            number = self._add(without_secrets(tables), options, "promoted", now_s)
        elif self.trial is not None:
            number = self.trial.number
        else:
            raise PolicyError("no version is on trial; name a FILE to promote")
        if number == self.active:
            raise PolicyError(f"version {number} is in force already")
        self.trial = None
        self._put_in_force(number)

    def roll_back(self, number: int, options: Mapping[str, Any], now_s: float) -> None:
        """Go back to that version, or, with 0, to the one before."""
        if not number and not self.before:
            raise PolicyError("no version was in force before this one")
        to = self.get(number or self.before[-1])
        if to.number == self.active:
            raise PolicyError(f"version {to.number} is in force already")
        self.trial = None
        back = to.number if to.options == options else self._add(to.tables, options, f"back to {to.number}", now_s)
        self._put_in_force(back)

    @property
    def in_force(self) -> PolicyInForce:
        trial_digest = self.get(self.trial.number).digest if self.trial is not None else ""
        return PolicyInForce(self.active, self.get(self.active).digest, self.trial, trial_digest, self.rollouts)

    def _put_in_force(self, number: int) -> None:
        if self.active and self.active != number:
            self.before = [*self.before, self.active][-MAX_POLICY_VERSIONS:]
        self.active = number
        self._drop_oldest()

    def _add(self, tables: Tables, options: Mapping[str, Any], source: str, now_s: float) -> int:
        """Returns the number of a new version, or of the kept version that is equal."""
        digest = digest_of(tables, options)
        for version in self.kept:
            if version.digest == digest:
                return version.number
        number = self.kept[-1].number + 1 if self.kept else 1
        self.kept.append(PolicyRevision(number, digest, source, now_s, dict(tables), dict(options)))
        self._drop_oldest()
        return number

    def _drop_oldest(self) -> None:
        needed = {self.active, self.trial.number if self.trial is not None else 0}
        while len(self.kept) > MAX_POLICY_VERSIONS:
            self.kept.remove(next(version for version in self.kept if version.number not in needed))
        numbers = {version.number for version in self.kept}
        self.before = [number for number in self.before if number in numbers]


def digest_of(tables: Tables, options: Mapping[str, Any]) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of both in JSON, with sorted keys."""
    return hashlib.sha256(msgspec.json.encode([tables, options], order="sorted")).hexdigest()[:12]


def check_tenants(before: Tables, after: Tables) -> None:
    """Raises `PolicyError` if not one tenant would stay: everybody would be unknown. A tenants file may say that, a request may
    not."""
    old, new = (from_tables(tables).policies.keys() - {DEFAULT_TENANT} for tables in (before, after))
    if old and not old & new:
        raise PolicyError(
            f"it has none of the {len(old)} tenants that are in force; change the coordinator's tenants file instead"
        )


def tenants_of(versions: Versions) -> Tenants:
    """The tenants by the version in force, with the one on trial. Raises `TenantsError` or `PolicyError`."""
    active = from_tables(versions.get(versions.active).tables)
    if versions.trial is None:
        return active
    return merged(active, from_tables(versions.get(versions.trial.number).tables), versions.trial)


def merged(active: Tenants, candidate: Tenants, trial: Trial) -> Tenants:
    """The organisations on trial have the candidate's limits, weights and classes, and all others those in force.

    A tenant that only one version knows stays as in the version in force, since gateways know only the keys of that version.
    Raises `PolicyError` if priority classes differ: they are shared by all organisations."""
    if candidate.priority_classes != active.priority_classes:
        raise PolicyError(
            "a trial cannot change priority_classes, which all organisations share; promote the file instead"
        )
    policies = {
        name: candidate.policies.get(name, policy) if trial.has(policy.organisation) else policy
        for name, policy in active.policies.items()
    }
    return replace(active, policies=policies)
