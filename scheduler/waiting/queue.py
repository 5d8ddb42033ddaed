"""The requests of one model with chunks left to dispatch, queued and placed alike, and what their tenants are charged."""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import cast

from proto.messages import Chunk, Submit
from proto.parts import STEP_TOKENS
from scheduler.fairness.fair_node import Path
from scheduler.fairness.fair_queue import FairQueue, Terms
from scheduler.fairness.held_shares import HeldShares
from scheduler.limits import SchedulerLimits, ring_weights
from scheduler.request import Request
from scheduler.waiting.answer_lengths import AnswerLengths
from scheduler.waiting.grace import Grace
from scheduler.waiting.line import WaitingLine
from scheduler.waiting.projection import Projection
from scheduler.waiting.queue_keys import PAUSED_KEY, Demand, class_key
from scheduler.waiting.rates import Rate, Ratios
from scheduler.waiting.retries import RetryBudget
from scheduler.waiting.wait_clock import WaitClock

_PRIORITY_S = 1e6  # seconds that one step of a request's own priority counts: more than any deadline
_HEAD_START_S = 1e13  # a request that a drain cut short goes before the other waiting requests of its tenant


class WaitQueue:
    """`len` and iteration cover the requests in the state QUEUED, oldest first. The owner checks its bounds first."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.lengths = AnswerLengths(limits.long_output_tokens, limits.kv_overcommit)
        self.output_ratios: dict[str, Ratios] = {}
        """Tokens of answers as parts of what was expected when they were admitted, by priority class."""
        self.fair: FairQueue[Request] = FairQueue(
            limits.quantum_tokens, {**ring_weights(limits.priority_classes), **limits.weights}, limits.overtaken_max
        )
        self.shares: HeldShares | None = None
        """The shares by which requests without a place take turns, while decode is short of room."""
        self.line = WaitingLine(limits, self.fair.weights)
        self.projection = Projection(self.line)
        self.grace = Grace()
        self.retries = RetryBudget(limits.retry_floor, limits.retry_share)
        self.clock = WaitClock()
        self._served = Rate(0.0)  # cost of what was dispatched, with answers as estimated
        self.served: dict[Path, Rate] = {}  # the same by tenant
        self.step_tokens = STEP_TOKENS  # step budget of workers that are not told another one
        self.attention_tokens = 0  # the model's figure, as in `Prices.chunk`
        self._classes: dict[int, None] = {}
        """Keys of all classes of KV demand that have come up. There are some tens at the most."""
        self._priority_classes: set[str] = set(limits.priority_classes)  # all that there have been

    def __len__(self) -> int:
        return len(self.line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.line)

    def replace_limits(self, limits: SchedulerLimits) -> None:
        """Other priority classes and weights, from the next turn on."""
        self._limits = limits
        self._priority_classes.update(limits.priority_classes)
        self.fair.reweigh({**ring_weights(limits.priority_classes), **limits.weights})
        self.line.replace_limits(limits, self.fair.weights)

    def forget(self, tenant: str) -> None:
        """Forget a tenant that has nothing waiting or running."""
        organisation, _, user = tenant.partition("/")
        for priority_class in self._priority_classes:
            path = (priority_class, organisation, user)
            self.fair.forget(path)
            self.served.pop(path, None)
            self.lengths.forget(path)
            self.clock.forget(path)

    # --- in and out -----------------------------------------------------------------------------------------------------

    def push(self, request: Request, can_run: bool = True, tokens_per_s: float = 0.0) -> None:
        """`can_run`: as in `refresh_eligibility`. `tokens_per_s`: of the fastest prefill worker; 0: not known."""
        assert not request.waits and request.entry is None
        request.waits = True
        submit, expected = request.submit, self.output_estimate(request)
        if submit.attempt == 1:
            request.expected_tokens = submit.resumed_tokens + expected
        request.work = self._work(submit, expected)
        self.line.add(request)
        if can_run:
            self._enter(request, self.class_key(request))
        self.line.watch_deadline(request, tokens_per_s)

    def work(self, submit: Submit, path: Path) -> int:
        """The expected cost of a request, as `Projection` counts it."""
        return self._work(submit, self.lengths.of(path).estimate(submit))

    def _work(self, submit: Submit, output_tokens: float) -> int:
        prices = self._limits.prices
        return ceil(prices.chunk(submit.prompt_tokens) + prices.output(output_tokens))

    def put_back(self, request: Request, dispatched_tokens: int) -> None:
        """Dispatch the tokens after `dispatched_tokens` again, since its worker will skip those in flight. The steps that skip
        them refund their cost."""
        request.dispatched_tokens = dispatched_tokens
        if request.entry is None:
            self.refund_output(request)
            self._enter(request, request.prefill_incarnation)
            self.line.watch_deadline(request)

    def _enter(self, request: Request, key: int) -> None:
        chunks = -(-request.submit.prompt_tokens // (self._limits.step_tokens or self.step_tokens))
        asked = (request.submit.deadline_ms or request.ttft_ms) / 1000
        priority_class = self._limits.priority_classes[request.path[0]]
        due = request.arrived + (asked or priority_class.ttft_s + chunks * priority_class.ttft_s_per_chunk)
        if request.submit.drained_attempts:
            due -= _HEAD_START_S
        due += _PRIORITY_S * request.submit.priority
        request.entry = self.fair.push(request, request.path, key, due, chunks)
        request.path = cast(tuple[str, str, str], request.entry.leaf.path)  # one for all of its tenant's

    def class_key(self, request: Request) -> int:
        key = class_key(Demand.of(request.submit, request.expected_left, request.tpot_ms))
        self._classes[key] = None
        return key

    def refresh_eligibility(self, request: Request, can_run: bool) -> bool:
        """Update a waiting request's turn after workers came or left. If no worker can hold it, it waits without one. Returns
        whether it has one newly."""
        if can_run and request.entry is None:
            self._enter(request, self.class_key(request))
            return True
        if not can_run and request.entry is not None:
            self.fair.remove(request.entry)
            request.entry = None
        return False

    def placed(self, request: Request) -> None:
        """Note that a request waits no longer. Its chunks still compete for turns."""
        request.waits = False
        self.line.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request, so that no more of its chunks are dispatched. Idempotent."""
        if request.waits:
            self.placed(request)
        if request.entry is not None:
            self.fair.remove(request.entry)
            request.entry = None

    # --- service --------------------------------------------------------------------------------------------------------

    def classes(self) -> list[int]:
        """Queue keys of the classes of KV demand in which something waits."""
        return [key for key in self._classes if self.fair.has(key)]

    def first(self, keys: Iterable[int]) -> Request | None:
        """The first that waits under these queue keys: in the fair order, or while decode is short of room, of the tenant that
        holds least there for its weight. Between a placed prompt and a request without a place the fair order decides."""
        if self.shares is None:
            entry = self.fair.first(keys)
            return None if entry is None else entry.item
        keys = list(keys)
        placed = self.fair.first([key for key in keys if key > 0])
        entry = self.fair.first([key for key in keys if key < 0], self.shares)
        if entry is None or (placed is not None and self.fair.goes_before(placed, entry)):
            entry = placed
        return None if entry is None else entry.item

    def take(self, request: Request, length: int, incarnation: int, keys: Sequence[int], now: float) -> None:
        """Charge the next chunk of the request that is first under these keys, for this prefill worker."""
        assert request.entry is not None
        terms = self._terms(request, length, incarnation)
        self.fair.take(request.entry, terms, keys)
        self._dispatched(request, length, terms.cost, now)

    def go_on(self, request: Request, length: int, incarnation: int, now: float) -> None:
        """Charge one more chunk of a prompt, right after the chunk that this prefill worker has had."""
        assert request.entry is not None
        terms = self._terms(request, length, incarnation)
        self.fair.go_on(request.entry, terms)
        self._dispatched(request, length, terms.cost, now)

    def _terms(self, request: Request, length: int, incarnation: int) -> Terms:
        prices = self._limits.prices
        cost = self._chunk_cost(request, request.dispatched_tokens, length)
        if request.dispatched_tokens + length < request.submit.prompt_tokens:
            return Terms(cost, False, incarnation)
        return Terms(cost + prices.output(self.output_estimate(request)), True, incarnation)

    def _chunk_cost(self, request: Request, start: int, length: int) -> float:
        unpaid = request.unpaid_tokens(start, length)
        return self._limits.prices.chunk(unpaid, start + length - unpaid, self.attention_tokens) if unpaid else 0.0

    def _dispatched(self, request: Request, length: int, cost: float, now: float) -> None:
        self._served.add(cost, now)
        own = self.served.get(request.path) or self.served.setdefault(request.path, Rate(now))
        own.add(cost, now)
        request.dispatched_tokens += length
        if request.dispatched_tokens == request.submit.prompt_tokens:
            request.attempt_progress.output_charged = self._limits.prices.output(self.output_estimate(request))
            request.entry = None

    def goes_before(self, one: Request, other: Request) -> bool:
        """Whether the turn of `one` comes before that of `other`; neither is placed."""
        assert one.entry is not None and other.entry is not None
        return self.fair.goes_before(one.entry, other.entry, self.shares)

    def is_bypassed(self, one: Request, by: Request) -> bool:
        """Whether `one`, which has no room, loses its turn if `by` is placed: not while its tenant holds about as much in
        decode, or has paid more. A tenant pays for room that is kept for it, but holds nothing afterwards."""
        if self.shares is not None and one.path != by.path and not self.shares.holds_less(one.path, by.path):
            return False
        assert one.entry is not None and by.entry is not None
        return self.fair.goes_before(one.entry, by.entry)

    def settle_on(self, request: Request, key: int) -> None:
        """Let a request wait under this key: its prefill worker's incarnation if placed, else a class key or `bound_key`."""
        entry = request.entry
        assert entry is not None
        if entry.key != key:
            self.fair.move(entry, key)

    def unsettle(self, request: Request) -> None:
        """Let a request that is not placed wait in its demand class again."""
        self.settle_on(request, self.class_key(request))

    def pause(self, request: Request) -> None:
        """Let a request wait without a turn, and not count as work before others."""
        self.settle_on(request, PAUSED_KEY)
        self.line.pause(request)

    def resume(self, request: Request) -> None:
        self.line.resume(request)
        if request.entry is not None:
            self.unsettle(request)

    def first_paused(self) -> Request | None:
        return self.first((PAUSED_KEY,))

    def served_per_s(self, now: float) -> float:
        """Cost per second of what was dispatched lately, answers as estimated."""
        return self._served.per_s(now)

    def weight(self, path: Path) -> float:
        """The weight of its organisation in its priority class."""
        return self.fair.weights.get("/".join(path[:2]), 1.0)

    def charge(self, path: Path, cost: float) -> None:
        """Charge for room that others could not have."""
        if cost > 0:
            self.fair.charge(path, cost)

    def charge_kept(self, path: Path, prompt_tokens: float) -> None:
        """Charge for KV that was kept between two turns as for computing `prompt_tokens`, if other tenants' requests wait."""
        if len(self) > self.line.waiting(path):
            self.charge(path, self._limits.prices.prompt_token * prompt_tokens)

    # --- true-up --------------------------------------------------------------------------------------------------------

    def skipped(self, request: Request, chunk: Chunk) -> None:
        """Refund the cost of a chunk that was not computed."""
        cost = self._chunk_cost(request, chunk.start, chunk.length)
        if cost:
            self.fair.adjust(request.path, -cost)

    def emitted(self, path: Path, tokens: int) -> None:
        if tokens:
            self.fair.adjust(path, self._limits.prices.output(tokens))

    def is_emitting(self, request: Request, tokens: int) -> None:
        """Charge for output beyond the estimate. `tokens`: emitted so far by each choice in this attempt."""
        charged = request.attempt_progress.output_charged
        more = self._limits.prices.output(tokens * request.submit.choices) - charged
        if charged and more > 0:
            self.fair.adjust(request.path, more)
            request.attempt_progress.output_charged = charged + more

    def refund_output(self, request: Request) -> None:
        """Refund the estimated output, since reported tokens are charged instead."""
        if request.attempt_progress.output_charged:
            self.fair.adjust(request.path, -request.attempt_progress.output_charged)
            request.attempt_progress.output_charged = 0.0

    def learn(self, request: Request, emitted_tokens: int) -> None:
        """Learn the length of this tenant's answers from one that has ended."""
        if request.expected_tokens:
            name = request.path[0]
            found = self.output_ratios.get(name) or self.output_ratios.setdefault(name, Ratios())
            found.add(emitted_tokens / request.expected_tokens)
        each = -(-emitted_tokens // request.submit.choices)
        self.lengths.learn(request.path, each)

    def output_estimate(self, request: Request) -> float:
        return self.lengths.of(request.path).estimate(request.submit)
