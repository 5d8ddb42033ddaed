"""The tenants that have series of their own in the metrics."""

from heapq import nlargest
from typing import Final

from prometheus_client import Counter

OTHER: Final = "(other)"  # no tenant's name, which has no parentheses
TENANTS_MAX: Final = 50
_TENANTS_KNOWN_MAX: Final = 10_000
_RANKED_EVERY_S: Final = 60.0


class TenantLabels:
    """Tenants with series of their own are those with the most service lately. All others share `OTHER`.

    Once a minute those that have fallen behind give their places up, and their series end there; what `OTHER` has counted
    stays, since a counter may not jump by what was counted elsewhere."""

    def __init__(self, *counters: Counter, most: int = TENANTS_MAX) -> None:
        """`counters`: families with the label `tenant`."""
        self._counters = counters
        self._most = most
        self._own: set[str] = set()
        self._service: dict[str, float] = {}
        self._ranked_at = 0.0

    def label(self, tenant: str) -> str:
        if tenant in self._own:
            return tenant
        if len(self._own) < self._most:
            self._own.add(tenant)
            return tenant
        return OTHER

    def served(self, tenant: str, amount: float) -> None:
        service = self._service
        if tenant in service or len(service) < _TENANTS_KNOWN_MAX:
            service[tenant] = service.get(tenant, 0.0) + amount

    def rank(self, now: float) -> None:
        """Rank tenants anew; the caller does it now and then."""
        if now < self._ranked_at + _RANKED_EVERY_S:
            return
        self._ranked_at = now
        if len(self._service) > self._most:
            first = set(nlargest(self._most, self._service, key=lambda name: self._service[name]))
            for tenant in self._own - first:
                for counter in self._counters:
                    counter.remove_by_labels({"tenant": tenant})
            self._own = first
        self._service = {name: amount / 2 for name, amount in self._service.items() if amount >= 1.0}
