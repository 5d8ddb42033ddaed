"""One tenants table of two versions, so that the core never sees more than one policy. Pure."""

from dataclasses import replace

from coordinator.policy.versions import PolicyError, Tables, Trial, Versions
from runtime.tenancy.tenants import DEFAULT_TENANT, Tenants, from_tables


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
