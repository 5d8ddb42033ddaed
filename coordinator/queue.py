"""The requests of one model with chunks left to dispatch, queued and placed alike, and what their tenants are charged."""

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from coordinator.bands import ring_weights
from coordinator.cost import OutputLength
from coordinator.events import Limits
from coordinator.fairqueue import REFUSALS_MAX, FairQueue, Terms
from coordinator.lanes import SPARE, Entry
from coordinator.nodes import Path
from coordinator.overload import Backlog, Rate
from coordinator.request import Request
from proto.messages import Chunk, Submit

_HEAD_START_S = 1e6
"""What a drain cut short goes before whatever else its tenant has waiting."""


class WaitQueue:
    """`len` and iteration are over those in the state QUEUED, oldest first. Bounded by its owner, who asks first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting = 0
        self._lengths: dict[Path, OutputLength] = {}
        self._came: deque[Request] = deque()
        """In the order in which they came to wait, also those that wait no longer until they are first ..."""
        self._came_at: deque[float] = deque()
        """... and when each of them did."""
        self._deadlines: list[tuple[float, int, Request, int]] = []
        self._deadlines_set = 0
        self.nothing_due_before = 0.0
        """A lower bound of `next_timer`: what leaves only makes that later."""
        self.fair: FairQueue[Request] = FairQueue(
            limits.quantum_tokens, {**ring_weights(limits.bands), **limits.weights}, limits.overtaken_max
        )
        self.backlog = Backlog(limits.queue_tokens_max / limits.queue_requests_max)
        self._served = Rate(0.0)
        """Cost of all tenants."""

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        came = zip(self._came_at, self._came, strict=True)
        return iter(dict.fromkeys(request for since, request in came if _waits(since, request)))

    def replace_limits(self, limits: Limits) -> None:
        """Other bands and weights, from the next turn on."""
        self._limits = limits
        self.nothing_due_before = 0.0
        self.fair.reweigh({**ring_weights(limits.bands), **limits.weights})

    def forget(self, tenant: str) -> None:
        """One of which nothing waits or runs."""
        organisation, _, user = tenant.partition("/")
        known = {*self.fair.tenants(), *self._lengths, *self.backlog.tenants()}
        for path in [path for path in known if path[1:] == (organisation, user)]:
            self.fair.forget(path)
            self.backlog.forget(path)
            self._lengths.pop(path, None)

    # --- in and out -----------------------------------------------------------------------------------------------------

    def push(self, request: Request, now: float, can_run: bool = True) -> None:
        """`can_run`: as in `sort_out`."""
        assert not request.waits and request.entry is None
        request.waits = True
        self._waiting += 1
        self.backlog.add(request, now)
        if can_run:
            self._enter(request)
        self._set_deadline(request)
        self._came.append(request)
        self._came_at.append(request.since)
        self.nothing_due_before = min(self.nothing_due_before, request.since + self._limits.queue_wait_s_max)
        if len(self._came) > 2 * self._waiting + SPARE:
            # Behind one that waits long, those that have gone would stay, with all they hold.
            self._came = deque(self)
            self._came_at = deque(waiting.since for waiting in self._came)

    def put_back(self, request: Request, dispatched_tokens: int) -> None:
        """Its worker will skip what was dispatched behind `dispatched_tokens`, so that must be dispatched again. What it cost
        comes back with the steps that skip it."""
        request.dispatched_tokens = dispatched_tokens
        if request.entry is None:
            self.refund_output(request)
            self._enter(request)
            self._set_deadline(request)
            self.settle_on(request, request.prefill_epoch)

    def _enter(self, request: Request) -> None:
        chunks = -(-request.submit.prompt_tokens // self._limits.step_tokens)
        asked = request.submit.deadline_ms / 1000
        band = self._limits.bands[request.path[0]]
        due = request.arrived + (asked or band.ttft_s + chunks * band.ttft_s_per_chunk)
        if request.submit.drained_attempts:
            due -= _HEAD_START_S
        request.entry = self.fair.push(request, request.path, due, chunks)
        request.path = request.entry.leaf.path  # one for all of its tenant's

    def _set_deadline(self, request: Request) -> None:
        """Once for as long as it waits, with a turn or without."""
        if request.deadline is not None:
            self._deadlines_set += 1
            self.nothing_due_before = min(self.nothing_due_before, request.deadline)
            heappush(self._deadlines, (request.deadline, self._deadlines_set, request, request.attempt))
            if len(self._deadlines) > 2 * (len(self.fair) + self._waiting) + SPARE:
                self._deadlines = [due for due in self._deadlines if self._is_due(due[2], due[3])]
                heapify(self._deadlines)

    def _is_due(self, request: Request, attempt: int) -> bool:
        """Whether it has something to dispatch yet."""
        return request.attempt == attempt and (request.entry is not None or request.waits)

    def sort_out(self, can_run: Callable[[Request], bool]) -> None:
        """Workers have come or gone: what none can hold any more waits without a turn, until one comes that can."""
        for request in self:
            if can_run(request) != (request.entry is not None):
                if request.entry is None:
                    self._enter(request)
                else:
                    self.fair.remove(request.entry)
                    request.entry = None

    def placed(self, request: Request) -> None:
        """It waits no longer; its chunks go on competing."""
        request.waits = False
        self._waiting -= 1
        self.backlog.remove(request)

    def remove(self, request: Request) -> None:
        """No chunk of it is to be dispatched any more. Repeating it does no harm."""
        if request.waits:
            self.placed(request)
        if request.entry is not None:
            self.fair.remove(request.entry)
            request.entry = None

    # --- time -----------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        came, came_at, deadlines = self._came, self._came_at, self._deadlines
        while came and not _waits(came_at[0], came[0]):
            came.popleft()
            came_at.popleft()
        while deadlines and not self._is_due(deadlines[0][2], deadlines[0][3]):
            heappop(deadlines)
        waited = came_at[0] + self._limits.queue_wait_s_max if came else None
        if not deadlines:
            return waited
        return deadlines[0][0] if waited is None else min(waited, deadlines[0][0])

    def overdue(self, now: float) -> Iterator[Request]:
        """Those that waited too long, or whose own deadline is past with chunks yet to dispatch; the caller ends each."""
        while (due := self.next_timer()) is not None and due <= now:
            if self._deadlines and self._deadlines[0][0] <= now:
                yield heappop(self._deadlines)[2]
            else:
                self._came_at.popleft()
                yield self._came.popleft()
        self.nothing_due_before = inf if due is None else due

    def too_late(self, now: float, tokens_per_s: float, uncached: Callable[[Submit], int]) -> Request | None:
        """One that waits and cannot have its first token by its deadline any more, of those due first."""
        self.next_timer()
        if not self._deadlines or tokens_per_s <= 0:
            return None
        due, _, request, attempt = self._deadlines[0]
        if attempt > 1 or not request.waits:
            return None
        return request if now + uncached(request.submit) / tokens_per_s > due else None

    # --- service --------------------------------------------------------------------------------------------------------

    def next_chunk(
        self, epoch: int, length_of: Callable[[Request], int], now: float, refusals_max: int = REFUSALS_MAX
    ) -> tuple[Request, int] | None:
        """Charge the next chunk for this prefill worker; `length_of` says how much of a prompt can run there now, or 0."""
        length, output_cost, prices = 0, 0.0, self._limits.prices

        def offer(request: Request) -> Terms | None:
            nonlocal length, output_cost
            length = length_of(request)
            if length == 0:
                return None
            unpaid = request.unpaid_tokens(request.dispatched_tokens, length)
            cost = prices.chunk(unpaid) if unpaid else 0.0
            if request.dispatched_tokens + length < request.submit.prompt_tokens:
                return cost, False
            output_cost = prices.output(self.output_estimate(request))
            return cost + output_cost, True

        found = self.fair.pop(epoch, offer, refusals_max)
        if found is None:
            return None
        request = found[0].item
        self._served.add(found[1], now)
        request.dispatched_tokens += length
        self.backlog.dispatched(request.path, length, found[1], now)
        if request.dispatched_tokens == request.submit.prompt_tokens:
            request.begin().output_charged = output_cost
            request.entry = None
        return request, length

    def settle_on(self, request: Request, epoch: int) -> None:
        """Its chunks run on this prefill worker from now on."""
        entry: Entry[Request] | None = request.entry
        assert entry is not None
        self.fair.settle_on(entry, epoch)

    def served_per_s(self, now: float) -> float:
        """Cost per second of what was dispatched lately, answers as estimated."""
        return self._served.per_s(now)

    def charge(self, path: Path, cost: float) -> None:
        """For room that others could not have."""
        if cost > 0:
            self.fair.charge(path, cost)

    # --- true-up --------------------------------------------------------------------------------------------------------

    def skipped(self, request: Request, chunk: Chunk) -> None:
        """A chunk was not computed: what was charged for it comes back."""
        unpaid = request.unpaid_tokens(chunk.start, chunk.length)
        if unpaid:
            self.fair.adjust(request.path, -self._limits.prices.chunk(unpaid))

    def emitted(self, path: Path, tokens: int) -> None:
        if tokens:
            self.fair.adjust(path, self._limits.prices.output(tokens))

    def refund_output(self, request: Request) -> None:
        """The estimate gives way to what is reported as emitted."""
        if request.course.output_charged:
            self.fair.adjust(request.path, -request.course.output_charged)
            request.begin().output_charged = 0.0

    def learn(self, request: Request, emitted_tokens: int) -> None:
        """From an answer that came to its end: how long this tenant's are."""
        self._length(request.path).learn(-(-emitted_tokens // request.submit.choices))

    def output_estimate(self, request: Request) -> float:
        return self._length(request.path).estimate(request.submit)

    def _length(self, path: Path) -> OutputLength:
        return self._lengths.get(path) or self._lengths.setdefault(path, OutputLength())


def _waits(since: float, request: Request) -> bool:
    """Whether it has waited from then on: it may have been placed, and come back."""
    return request.waits and since == request.since
