"""Responses kept for a while, for `previous_response_id`. Pure.

Only the tenant of a response can find it. The store keeps at most `entries_max` responses and `bytes_max` bytes, each response
for `keep_s`. A tenant that would exceed a quarter of either limit loses its oldest responses.
"""

from collections import OrderedDict
from dataclasses import dataclass

_SHARE = 4


@dataclass(frozen=True)
class KeptResponse:
    items: bytes  # JSON: the conversation's items, the response's own included
    response: bytes  # JSON
    until: float

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.response)


class ResponseStore:
    def __init__(self, *, keep_s: float, entries_max: int = 4096, bytes_max: int = 64 << 20) -> None:
        """`keep_s` 0: nothing is kept."""
        self.keep_s = keep_s
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self._tenants: OrderedDict[str, OrderedDict[str, KeptResponse]] = OrderedDict()  # the oldest first
        self._order: OrderedDict[str, str] = OrderedDict()  # Response → tenant, the oldest first
        self._tenant_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def put(self, tenant: str, response_id: str, items: bytes, response: bytes, now: float) -> bool:
        """Store a response. Returns whether it is kept."""
        self._expire(now)
        kept = KeptResponse(items, response, now + self.keep_s)
        if not self.keep_s or kept.size_bytes > self.bytes_max // _SHARE or response_id in self._order:
            return False
        own = self._tenants.setdefault(tenant, OrderedDict())
        own[response_id] = kept
        self._order[response_id] = tenant
        self.size_bytes += kept.size_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + kept.size_bytes
        while self._tenant_bytes[tenant] > self.bytes_max // _SHARE or len(own) > max(1, self.entries_max // _SHARE):
            self.delete(tenant, next(iter(own)))
        while self.size_bytes > self.bytes_max or len(self._order) > self.entries_max:
            oldest, owner = next(iter(self._order.items()))
            self.delete(owner, oldest)
        return True

    def get(self, tenant: str, response_id: str, now: float) -> KeptResponse | None:
        """Returns a response, or None. Changes nothing, so any thread may call it."""
        kept = self._tenants.get(tenant, OrderedDict()).get(response_id)
        return kept if kept is not None and kept.until > now else None

    def delete(self, tenant: str, response_id: str) -> bool:
        own = self._tenants.get(tenant)
        kept = own.pop(response_id, None) if own is not None else None
        if own is None or kept is None:
            return False
        del self._order[response_id]
        self.size_bytes -= kept.size_bytes
        self._tenant_bytes[tenant] -= kept.size_bytes
        if not own:
            del self._tenants[tenant], self._tenant_bytes[tenant]
        return True

    def _expire(self, now: float) -> None:
        while self._order:
            oldest, owner = next(iter(self._order.items()))
            if self._tenants[owner][oldest].until > now:
                return
            self.delete(owner, oldest)
