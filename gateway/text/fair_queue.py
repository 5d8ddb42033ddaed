"""The order in which prompts are tokenized, and grammars compiled. Pure.

Deficit round robin over organisations, by bytes of their prompts, and round robin over the users of one (Shreedhar and
Varghese, 1995). Large jobs may not take every thread, so a small job never waits for a large job to end.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from gateway.fair_share import organisation_of

QUANTUM_BYTES: Final = 64 << 10  # Bytes that an organisation may have tokenized in one round
COST_BYTES_MIN: Final = 1 << 10  # The cost of the smallest prompt: a job costs something, however short its text
LARGE_BYTES: Final = 256 << 10  # Jobs of this size or more are large. A job of this size takes about half a second.

T = TypeVar("T")


@dataclass(eq=False)
class TokenizerJob(Generic[T]):
    tenant: str
    cost: int
    work: T
    dropped: bool = False  # The caller no longer waits for the job


@dataclass
class _Organisation(Generic[T]):
    credit: int = 0  # Bytes that it may have tokenized before its visit ends
    visited: bool = False  # It is being served, and has got the credit of this round
    users: OrderedDict[str, deque[TokenizerJob[T]]] = field(default_factory=OrderedDict)
    """Those with jobs; the first is served next."""

    def next(self) -> TokenizerJob[T] | None:
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


class TokenizerQueue(Generic[T]):
    def __init__(self) -> None:
        self._organisations: OrderedDict[str, _Organisation[T]] = OrderedDict()
        """Those with jobs; the first is served next."""

    def push(self, tenant: str, size_bytes: int, work: T) -> TokenizerJob[T]:
        job = TokenizerJob(tenant, max(size_bytes, COST_BYTES_MIN), work)
        organisation = self._organisations.setdefault(organisation_of(tenant), _Organisation())
        organisation.users.setdefault(tenant, deque()).append(job)
        return job

    def pop(self, *, large: bool = True, passing: Callable[[str], bool] = lambda _: False) -> TokenizerJob[T] | None:
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
