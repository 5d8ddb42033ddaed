"""Finds the tenant of a request by its key, and the priority class that the request may ask for.

A key is looked up by its SHA-256 and never kept, shown or logged. If neither the tenants file nor `--api-keys` has a key, and
no tokens are taken (`gateway/jwt_tenants.py`), everyone is let in as the tenant `default`. The keys of `--api-keys` belong to
that tenant too.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, Final

from gateway.http.errors import bad_value
from proto.limits import MAX_PRIORITY
from runtime.tenancy.tenants import DEFAULT_TENANT, ClassTargets, Tenants

_TIERS: Final = {"priority": "interactive", "flex": "batch"}  # others select the tenant's own class


class KeyRing:
    def __init__(self, tenants: Tenants, api_keys: Sequence[str] = (), needed: bool = False) -> None:
        self._secret = secrets.token_bytes(32)
        self._own = {hashlib.sha256(key.encode()).digest(): DEFAULT_TENANT for key in api_keys}
        self.needed = needed
        self.replace(tenants)

    def replace(self, tenants: Tenants) -> None:
        """Use a new tenants file. Keys that it no longer has are refused from the next request on. Once keys were needed, they
        stay needed even if the file has none: a file that was read while it was being written must not let everyone in."""
        self.tenants = tenants
        self._tenants = {self._blind(digest): tenant for digest, tenant in {**tenants.keys, **self._own}.items()}
        self.needed = self.needed or bool(self._tenants)

    def slo_of(self, tenant: str) -> ClassTargets | None:
        policy = self.tenants.policy(tenant)
        return policy.slo if policy is not None else None

    def tenant_of(self, key: bytes) -> str | None:
        """Returns the tenant of a key, or None if no tenant has the key. The lookup is keyed by a secret of this process, so
        that its duration reveals nothing about any key or its hash."""
        return self._tenants.get(self._blind(hashlib.sha256(key).digest()))

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()


def priority_class_of(priority: Any, service_tier: str | None, tenants: Tenants, tenant: str) -> str:
    """Returns the priority class to ask for; empty means the tenant's own. Raises `ApiError` if `priority` is not a priority
    class.

    `priority` is binding: the coordinator rejects the request if the tenant may not use the priority class. `service_tier` is
    a preference, as at OpenAI: if the tenant may not use it, the tenant's own priority class applies. A whole number is not a
    priority class: see `own_priority`.
    """
    if priority is not None and type(priority) is not int:
        if not isinstance(priority, str) or priority not in tenants.priority_classes:
            known = ", ".join(f"'{name}'" for name in tenants.priority_classes)
            raise bad_value("priority", f"Invalid value for 'priority': it must be a whole number or one of {known}.")
        return priority
    generation, policy = _TIERS.get(service_tier or "", ""), tenants.policy(tenant)
    return generation if policy is not None and generation in policy.priority_classes else ""


def lowest_class(tenants: Tenants, tenant: str) -> str:
    """Returns the priority class with the least weight that the tenant may use; empty means the tenant's own."""
    policy = tenants.policy(tenant)
    allowed = sorted(policy.priority_classes) if policy is not None else []
    return min(allowed, key=lambda name: tenants.priority_classes[name].weight, default="")


def own_priority(priority: Any) -> int:
    """Returns vLLM's priority: among the requests of one tenant, the lowest number goes first. Raises `ApiError`."""
    if type(priority) is not int:
        return 0
    if abs(priority) > MAX_PRIORITY:
        message = f"Invalid value for 'priority': numbers go from -{MAX_PRIORITY} to {MAX_PRIORITY}."
        raise bad_value("priority", message)
    return priority
