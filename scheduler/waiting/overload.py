"""The backlog by tenant, and the choice of requests to shed when it is too long. Pure.

The size of a backlog counts requests and tokens together: a request adds its prompt's tokens and its part of the room for
requests (`queue_tokens_max / queue_requests_max`). So a million tiny requests count, and so do a few huge ones.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import exp
from typing import Generic, TypeVar

from scheduler.fairness.fair_node import Path
from scheduler.request import Request

K = TypeVar("K", bound=Hashable)
_TAU_S = 10.0


class Rate:
    """Amount per second over about the last ten seconds: exponentially weighted, right from the first second on."""

    __slots__ = ("_amount", "_at", "_since")

    def __init__(self, now: float) -> None:
        self._amount, self._at, self._since = 0.0, now, now

    def add(self, amount: float, now: float) -> None:
        self._amount = self._amount * exp((self._at - now) / _TAU_S) + amount
        self._at = now

    def per_s(self, now: float) -> float:
        seen_s = max(now - self._since, 1.0)
        return self._amount * exp((self._at - now) / _TAU_S) / (_TAU_S * (1 - exp(-seen_s / _TAU_S)))


class Ranked(Generic[K]):
    """Amounts by key, and the largest of them to within a factor of two, in O(1): keys are kept by their binary order."""

    def __init__(self) -> None:
        self._amounts: dict[K, float] = {}
        self._orders: dict[int, OrderedDict[K, None]] = {}

    def __getitem__(self, key: K) -> float:
        return self._amounts.get(key, 0.0)

    def __len__(self) -> int:
        return len(self._amounts)

    def add(self, key: K, amount: float) -> None:
        before = self._amounts.get(key, 0.0)
        after = before + amount
        old, new = int(before).bit_length(), int(after).bit_length()
        if old != new and old:
            order = self._orders[old]
            del order[key]
            if not order:
                del self._orders[old]
        if not new:
            self._amounts.pop(key, None)
            return
        self._amounts[key] = after
        if old != new:
            there = self._orders.get(new)
            if there is None:
                there = self._orders[new] = OrderedDict()
            there[key] = None

    def largest(self) -> K | None:
        return next(iter(self._orders[max(self._orders)])) if self._orders else None


@dataclass(eq=False)
class WaitingTenant:
    cost: Rate  # cost of what was dispatched, with answers as estimated
    requests: dict[str, Request] = field(default_factory=dict)  # those that wait and may be shed, oldest first
    tokens: int = 0  # tokens of all requests that wait, also of those that may not be shed


class Backlog:
    """The waiting work of one model's queue, and how fast it is dispatched. The owner reports requests that come and go, and
    dispatched costs."""

    def __init__(self, tokens_per_request: float) -> None:
        self._tokens_per_request = tokens_per_request
        self._tenants: dict[Path, WaitingTenant] = {}
        self._organisations: dict[str, Ranked[str]] = {}
        self._users: dict[Path, Ranked[Path]] = {}
        self._borrowed: dict[str, OrderedDict[str, Request]] = {}  # requests by priority class, oldest first
        self.tokens = 0

    # --- what happens ---------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        self._count(request, 1, self.tenant(request.path, now))

    def remove(self, request: Request) -> None:
        self._count(request, -1, self._tenants[request.path])

    def dispatched(self, path: Path, cost: float, now: float) -> None:
        self.tenant(path, now).cost.add(cost, now)

    def waiting(self, path: Path) -> int:
        """Returns how many requests of a tenant wait, without resumed ones."""
        tenant = self._tenants.get(path)
        return len(tenant.requests) if tenant else 0

    def tenant(self, path: Path, now: float) -> WaitingTenant:
        found = self._tenants.get(path)
        if found is None:
            found = self._tenants[path] = WaitingTenant(Rate(now))
        return found

    def tenants(self) -> Iterable[Path]:
        return self._tenants.keys()

    def forget(self, path: Path) -> None:
        """A tenant; not while something of it waits, as it may under the bill of another one."""
        if path in self._tenants and self._tenants[path].tokens:
            return
        self._tenants.pop(path, None)
        users = self._users.get(path[:2])
        if users is not None and not users:
            del self._users[path[:2]]

    def _count(self, request: Request, sign: int, tenant: WaitingTenant) -> None:
        tokens = sign * request.submit.prompt_tokens
        tenant.tokens += tokens
        self.tokens += tokens
        if request.submit.attempt > 1:
            return  # Its client has had tokens already: it is no candidate.
        if sign > 0:
            tenant.requests[request.id] = request
        else:
            del tenant.requests[request.id]
        if request.borrowed:
            borrowed = self._borrowed.setdefault(request.path[0], OrderedDict())
            if sign > 0:
                borrowed[request.id] = request
            else:
                del borrowed[request.id]
        size = tokens + sign * self._tokens_per_request
        above = priority_class, organisation = request.path[:2]
        organisations, users = self._organisations.get(priority_class), self._users.get(above)
        if organisations is None:
            organisations = self._organisations[priority_class] = Ranked()
        if users is None:
            users = self._users[above] = Ranked()
        organisations.add(organisation, size)
        users.add(request.path, size)

    # --- who goes -------------------------------------------------------------------------------------------------------

    def victim(self, newcomer: Request, priority_classes_lowest_first: Iterable[str]) -> Request | None:
        """The request that has to make room for `newcomer`: the newest borrower of its priority class or a lower one, else in
        the lowest priority class the newest request of the tenant with the largest backlog; None if that is the newcomer
        itself."""
        priority_classes_lowest_first = list(priority_classes_lowest_first)
        own = priority_classes_lowest_first.index(newcomer.path[0])
        for priority_class in () if newcomer.borrowed else priority_classes_lowest_first[: own + 1]:
            if borrowed := self._borrowed.get(priority_class):
                return next(reversed(borrowed.values()))
        size = newcomer.submit.prompt_tokens + self._tokens_per_request
        for priority_class in priority_classes_lowest_first:
            if priority_class == newcomer.path[0]:
                return self._victim_beside(newcomer, size)
            ranked = self._organisations.get(priority_class)
            organisation = ranked.largest() if ranked else None
            if organisation is not None:
                return self._newest((priority_class, organisation))
        return None

    def _victim_beside(self, newcomer: Request, size: float) -> Request | None:
        """Returns a request of the newcomer's priority class, from a tenant with a larger backlog than the newcomer's tenant
        would have, or None."""
        priority_class, own, _ = newcomer.path
        organisations = self._organisations.setdefault(priority_class, Ranked())
        organisation = organisations.largest()
        if organisation is None:
            return None
        if organisation != own and organisations[organisation] > organisations[own] + size:
            return self._newest((priority_class, organisation))
        users = self._users.get((priority_class, own))
        user = users.largest() if users else None
        if users is None or user is None or user == newcomer.path or users[user] <= users[newcomer.path] + size:
            return None
        return self._newest((priority_class, own))

    def _newest(self, organisation: Path) -> Request:
        path = self._users[organisation].largest()
        assert path is not None
        return next(reversed(self._tenants[path].requests.values()))
