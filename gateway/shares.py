"""Divides what is bounded between tenants: `FairShare` what they hold at once, `FairQueue` whose job is next. Pure.

`FairShare` is the dynamic threshold of Choudhury and Hahne (1998) for shared switch buffers, with factor 1: no tenant may hold
more than is left free. A single tenant may hold half. A tenant that holds nothing still finds room. Tenants that want more than
there is reach equal shares as they release what they hold.

`FairQueue` is deficit round robin over organisations, by bytes, and round robin over the users of one (Shreedhar and Varghese,
1995). Large jobs may not take every thread, so a small job never waits for a large job to end.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

QUANTUM_BYTES: Final = 64 << 10  # Bytes that an organisation may have tokenized in one round
COST_BYTES_MIN: Final = 1 << 10  # The cost of the smallest prompt: a job costs something, however short its text
LARGE_BYTES: Final = 256 << 10  # Jobs of this size or more are large. A job of this size takes about half a second.

T = TypeVar("T")


class FairShare:
    def __init__(self, capacity: int, tenant_max: int | None = None) -> None:
        """`tenant_max`: a fixed bound for each tenant beside the dynamic one."""
        self.capacity = capacity
        self._tenant_max = capacity if tenant_max is None else tenant_max
        self.held = 0
        self._held_by: dict[str, int] = {}

    def has_room(self, amount: int = 1) -> bool:
        return self.held + amount <= self.capacity

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Take `amount` for the tenant. Returns whether there was room. A user of an organisation, like `acme/ann`, is bounded
        twice: the organisation by the free amount, and the user by what the organisation could still take."""
        room = self.capacity - self.held
        owners = _owners(tenant)
        for owner in owners:
            held = self._held_by.get(owner, 0)
            if held + amount > min(room, self._tenant_max):
                return False
            room -= held
        for owner in owners:
            self._held_by[owner] = self._held_by.get(owner, 0) + amount
        self.held += amount
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        if not amount:
            return
        self.held -= amount
        for owner in _owners(tenant):
            left = self._held_by[owner] - amount
            assert left >= 0
            if left:
                self._held_by[owner] = left
            else:
                del self._held_by[owner]


def _owners(tenant: str) -> tuple[str, ...]:
    organisation = organisation_of(tenant)
    return (tenant,) if organisation == tenant else (organisation, tenant)


def organisation_of(tenant: str) -> str:
    """`acme/ann` is a user of `acme`."""
    return tenant.partition("/")[0]


@dataclass(eq=False)
class Job(Generic[T]):
    tenant: str
    cost: int
    work: T
    dropped: bool = False  # The caller no longer waits for the job


@dataclass
class _Organisation(Generic[T]):
    credit: int = 0  # Bytes that it may have tokenized before its visit ends
    visited: bool = False  # It is being served, and has got the credit of this round
    users: OrderedDict[str, deque[Job[T]]] = field(default_factory=OrderedDict)  # with jobs; the first is next

    def next(self) -> Job[T] | None:
        """The next job, still in the queue; dropped ones are forgotten."""
        while self.users:
            tenant, jobs = next(iter(self.users.items()))
            while jobs and jobs[0].dropped:
                jobs.popleft()
            if jobs:
                return jobs[0]
            del self.users[tenant]
        return None

    def take(self) -> None:
        """Remove the job that `next` returned, and move its user to the end of the order."""
        tenant, jobs = self.users.popitem(last=False)
        jobs.popleft()
        if jobs:
            self.users[tenant] = jobs


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._organisations: OrderedDict[str, _Organisation[T]] = OrderedDict()  # the first is next

    def push(self, tenant: str, size_bytes: int, work: T) -> Job[T]:
        job = Job(tenant, max(size_bytes, COST_BYTES_MIN), work)
        organisation = self._organisations.setdefault(organisation_of(tenant), _Organisation())
        organisation.users.setdefault(tenant, deque()).append(job)
        return job

    def pop(self, *, large: bool = True, passing: Callable[[str], bool] = lambda _: False) -> Job[T] | None:
        """Returns the next job, or None. `large`: whether a large job is allowed. `passing` returns whether to skip an
        organisation."""
        passed = 0  # Organisations passed over one after the other
        while passed < len(self._organisations):
            name, organisation = next(iter(self._organisations.items()))
            job = organisation.next()
            if job is None:
                del self._organisations[name]  # it is idle, and keeps no credit
                continue
            if (job.cost >= LARGE_BYTES and not large) or passing(name):
                passed += 1
                self._organisations.move_to_end(name)
                continue
            passed = 0
            if not organisation.visited:
                organisation.visited = True
                organisation.credit += QUANTUM_BYTES
            if organisation.credit >= job.cost:
                organisation.credit -= job.cost
                organisation.take()
                return job
            organisation.visited = False
            self._organisations.move_to_end(name)
        return None
