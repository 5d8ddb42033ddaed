"""Responses kept for a while, for `previous_response_id`. Pure.

Only the tenant of a response can find it. A tenant that would hold more than a quarter of the memory, or more than is left
free, loses its oldest responses. If it has none, the oldest of all goes.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from gateway.shares import FairShare

BYTES_MAX: Final = 64 << 20
COST_BYTES_MIN: Final = 16 << 10  # of each response, which bounds their number


def cost_bytes(items: bytes, response: bytes) -> int:
    return max(len(items) + len(response), COST_BYTES_MIN)


@dataclass(frozen=True)
class KeptResponse:
    items: bytes  # JSON: the conversation's items, the response's own included
    response: bytes  # JSON
    until: float

    @property
    def cost_bytes(self) -> int:
        return cost_bytes(self.items, self.response)


class ResponseStore:
    def __init__(self, *, keep_s: float, bytes_max: int = BYTES_MAX) -> None:
        """`keep_s` 0: nothing is kept."""
        self.keep_s = keep_s
        self.share = FairShare(bytes_max, bytes_max // 4)
        self._kept: OrderedDict[tuple[str, str], KeptResponse] = OrderedDict()  # by tenant and name, the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, items: bytes, response: bytes, now: float) -> bool:
        """Store a response. Returns whether it is kept."""
        while self._kept and next(iter(self._kept.values())).until <= now:
            self.delete(*next(iter(self._kept)))
        kept = KeptResponse(items, response, now + self.keep_s)
        if not self.keep_s or kept.cost_bytes > self.share.capacity // 4 or (tenant, response_id) in self._kept:
            return False
        own = (one for one in list(self._kept) if one[0] == tenant)
        while not self.share.take(tenant, kept.cost_bytes):
            self.delete(*next(own, next(iter(self._kept))))
        self._kept[tenant, response_id] = kept
        return True

    def get(self, tenant: str, response_id: str, now: float) -> KeptResponse | None:
        """Returns a response, or None. Changes nothing, so any thread may call it."""
        kept = self._kept.get((tenant, response_id))
        return kept if kept is not None and kept.until > now else None

    def delete(self, tenant: str, response_id: str) -> bool:
        kept = self._kept.pop((tenant, response_id), None)
        if kept is not None:
            self.share.give_back(tenant, kept.cost_bytes)
        return kept is not None
