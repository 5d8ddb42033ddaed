"""The workers as the scheduler knows them, and what is reserved on them: `PrefillWorker` and `DecodeWorker`.

Both may be given chunks of prompts: a decode worker computes a prompt whose beginning it has.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from math import ceil, inf
from typing import Any, ClassVar

import msgspec

from proto.messages import Chunk, Hello, Role, Step, Submit
from proto.parts import STEP_TOKENS, Held
from proto.status import KvHeld, KvPair
from scheduler.fairness.fair_node import Path
from scheduler.fairness.held_shares import HeldShares, HeldStream
from scheduler.kv_admission.admission import NEVER, Key, KvAdmission, KvDemand
from scheduler.kv_admission.shared_blocks import chains
from scheduler.limits import START_LONG_TOKENS
from scheduler.request import Request
from scheduler.step_times import StepFit, StepLimits, StepPace
from scheduler.workers.circuit_breakers import NOBODY, Pair

ROUND_TRIP_S = 0.002  # the time of a fetch beside that for its tokens
FETCH_PAUSE_S = 60.0

WORKERS = (Role.PREFILL, Role.DECODE)
Where = dict[tuple[str, int], list[int]]  # the workers that hold something for each attempt
_Rank = tuple[float, float, int]  # two measures and the worker's incarnation, which makes it unique


class Ordered:
    """Workers in an order that changes: the first few are found without a look at the others. An insert moves the pointers
    after it; for some thousand workers, that costs less than examining one of them."""

    def __init__(self) -> None:
        self._keys: dict[int, _Rank] = {}
        self._rows: list[_Rank] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, incarnation: int) -> bool:
        return incarnation in self._keys

    def __iter__(self) -> Iterator[int]:
        """Iterates over incarnations, least key first. Do not change the list meanwhile."""
        return (row[2] for row in self._rows)

    def put(self, incarnation: int, first: float, second: float) -> None:
        """Add a worker, or give it another key."""
        key, before = (first, second, incarnation), self._keys.get(incarnation)
        if before == key:
            return
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]
        self._keys[incarnation] = key
        insort(self._rows, key)

    def least(self) -> float:
        """The first measure of the first worker; there is one."""
        return self._rows[0][0]

    def drop(self, incarnation: int) -> None:
        before = self._keys.pop(incarnation, None)
        if before is not None:
            del self._rows[bisect_left(self._rows, before)]


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """The blocks that one attempt has reserved on one worker, until that worker itself says that it has let go."""

    kv_blocks: int
    """Its blocks; on a decode worker, those at its full length, while `admission` counts the blocks until then."""
    seqs: int
    path: Path = ()  # the tenant that pays for tokens which the worker reports; empty for adopted requests
    demand: KvDemand | None = None  # its demand in decode; None if it was adopted and only its blocks are known
    resumed_tokens: int = 0  # answer tokens from before this attempt
    adopted: bool = False  # the worker had it when it registered
    tpot_ms: float = 0.0  # its target for the time per token in decode; 0: none, or not known


class WorkerBase:
    """The state that workers of both roles have: attempts that hold something, and chunks of prompts to compute."""

    is_decode: ClassVar[bool]

    def __init__(self, hello: Hello) -> None:
        assert hello.capacity is not None
        self.incarnation, self.hello, self.capacity = hello.incarnation, hello, hello.capacity
        self.free_seqs = hello.capacity.max_seqs
        self.allocations: dict[Key, Allocation] = {}
        self.where: Where = {}  # the workers on which each attempt holds something, shared by all workers
        self.on_change: Callable[[Any], None] = lambda worker: None  # told of changed allocations and steps
        self.placed: dict[str, Request] = {}  # prompts with tokens not yet dispatched, oldest first
        self.bound: dict[str, Request] = {}  # requests not placed yet that wait for this worker, oldest first
        self.undispatched: dict[str, int] = {}  # prompt tokens still to be sent, by request placed or bound here
        self.undispatched_tokens = 0  # the sum
        self.begun: Request | None = None
        """The prompt that had the last chunk of the last step, if it may be finished in the next one."""
        self.steps: dict[int, tuple[Step, list[Request]]] = {}  # steps in flight, by id, with each chunk's request
        self.next_step_id = self.tokens_in_flight = 0
        self.tokens_per_s = 0.0  # measured rate of prompts, smoothed; 0 until the first step is done
        self.pace = StepPace(StepLimits(STEP_TOKENS))
        self.tokens_forwarded = 0
        self.steps_done = 0  # steps done in its present role, as last heard
        self.kv_pairs: tuple[KvPair, ...] = ()
        self.kv_held = KvHeld(0, 0, 0)  # both as it last reported, for people alone
        self.loss_counted = False
        """It or the other half of its process was lost, and the requests that ran there are already suspected."""
        self.draining = False  # nothing new is placed here
        self.leaving = False  # it has announced that it is about to end
        self.hand_over_at = inf  # when its running requests are handed over, while it is draining
        self.dismissed = False  # it was told that nothing will come any more

    @property
    def alone(self) -> Pair:
        """The worker by itself, for the circuit breakers."""
        return (NOBODY, self.incarnation) if self.is_decode else (self.incarnation, NOBODY)

    def is_same_process(self, other: "WorkerBase") -> bool:
        """Whether the two are the halves of one mixed worker."""
        own, there = self.hello, other.hello
        return own.name != there.name and own.pid > 0 and (own.host, own.pid) == (there.host, there.pid)

    @property
    def process_name(self) -> str:
        """The name of its process for people: a mixed one is two workers."""
        return self.hello.process or self.hello.name

    @property
    def kv_tokens(self) -> int:
        return self.capacity.kv_blocks * self.capacity.block_size

    # --- what attempts hold ---------------------------------------------------------------------------------------------

    def hold(self, key: Key, allocation: Allocation) -> None:
        """The caller has asked `fits`."""
        assert allocation.seqs <= self.free_seqs and key not in self.allocations
        self.allocations[key] = allocation
        self.where.setdefault(key, []).append(self.incarnation)
        self.free_seqs -= allocation.seqs
        self.on_change(self)

    def release(self, key: Key) -> Allocation | None:
        """Count an allocation as free again; None if there is none, as when a message is repeated."""
        allocation = self.allocations.pop(key, None)
        if allocation is None:
            return None
        self._forget_allocation(key)
        self.free_seqs += allocation.seqs
        self.on_change(self)
        return allocation

    def _forget_allocation(self, key: Key) -> None:
        incarnations = self.where[key]
        incarnations.remove(self.incarnation)
        if not incarnations:
            del self.where[key]

    def leave(self) -> None:
        """Take the attempts of a lost worker out of `where`; `allocations` keeps them."""
        for key in self.allocations:
            self._forget_allocation(key)

    # --- prompts --------------------------------------------------------------------------------------------------------

    def begin_step(self, chunks: list[Chunk], requests: list[Request]) -> Step:
        step = Step(self.next_step_id, tuple(chunks))
        self.next_step_id += 1
        self.steps[step.step_id] = step, requests
        self.tokens_in_flight += sum(chunk.length for chunk in chunks)
        self.on_change(self)
        return step

    def end_step(self, step_id: int) -> tuple[tuple[Chunk, ...], list[Request]]:
        """The chunks of a step that is over, and their requests; empty if it is not known."""
        found = self.steps.pop(step_id, None)
        if found is None:
            return (), []
        step, requests = found
        self.tokens_in_flight -= sum(chunk.length for chunk in step.chunks)
        self.on_change(self)
        return step.chunks, requests

    @property
    def tokens_before(self) -> int:
        """Prompt tokens that a request which came to it now would find before it."""
        return self.tokens_in_flight + self.undispatched_tokens

    def expect(self, request: Request) -> None:
        """Count the undispatched tokens of a request that was placed here, bound here, or partly dispatched."""
        left = request.submit.prompt_tokens - request.dispatched_tokens
        self.undispatched_tokens += left - self.undispatched.get(request.id, 0)
        self.undispatched[request.id] = left
        self.on_change(self)

    def expect_no_more(self, request: Request) -> None:
        """Forget a request that is no longer bound to this worker and has nothing left to dispatch here."""
        self.placed.pop(request.id, None)
        self.bound.pop(request.id, None)
        self.undispatched_tokens -= self.undispatched.pop(request.id, 0)
        self.on_change(self)


class PrefillWorker(WorkerBase):
    is_decode = False

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello)
        self.kv_blocks_taken = 0  # allocations do not grow here
        self.has_run_full = False
        """It has computed a step that was at least half full, so deadlines can be judged by its rate."""
        self.prompts_ms = 0.0  # the time of all its steps
        self.fetch_token_s = 0.0  # what it takes to fetch a token's KV, beside the round trip; 0: not measured yet
        self.fetch_paused_until: dict[int, float] = {}
        """Decode workers from which it fetches nothing for a while, as that has failed."""

    @property
    def free_blocks(self) -> int:
        return self.capacity.kv_blocks - self.kv_blocks_taken

    def whole_blocks(self, submit: Submit) -> int:
        """The most blocks that a request comes to hold here."""
        return -(-submit.prompt_tokens // self.capacity.block_size)

    def could_ever_take(self, submit: Submit) -> bool:
        """Whether it has room if nothing else is there."""
        return self.whole_blocks(submit) <= self.capacity.kv_blocks

    def fits(self, submit: Submit) -> bool:
        return self.free_seqs > 0 and self.whole_blocks(submit) <= self.free_blocks

    def reserve(self, request: Request) -> None:
        submit = request.submit
        self.hold(request.key, Allocation(self.whole_blocks(submit), 1, request.path, None, submit.resumed_tokens))

    def adopt(self, held: Held, kv_overcommit: float) -> bool:
        """Count what the worker held before it registered; returns False if that is impossible."""
        key, blocks = (held.request_id, held.attempt), held.kv_blocks
        if key in self.allocations or held.seqs > self.free_seqs or blocks > self.free_blocks:
            return False
        self.hold(key, Allocation(blocks, held.seqs, resumed_tokens=held.resumed_tokens, adopted=True))
        return True

    def hold(self, key: Key, allocation: Allocation) -> None:
        self.kv_blocks_taken += allocation.kv_blocks
        super().hold(key, allocation)

    def release(self, key: Key) -> Allocation | None:
        self.kv_blocks_taken -= self.allocations[key].kv_blocks if key in self.allocations else 0
        return super().release(key)

    def forwarded(self, key: Key) -> int:
        return 0

    def measure(self, tokens: int, step_ms: float) -> None:
        """The first rate is taken as it is. A short step may raise a rate that full steps gave, but not lower it."""
        rate, full = tokens * 1000 / step_ms, self.pace.is_full(tokens)
        self.prompts_ms += step_ms
        self.pace.measure(tokens, step_ms)
        if not self.tokens_per_s or (full and not self.has_run_full):
            self.tokens_per_s = rate
        elif full or rate > self.tokens_per_s or not self.has_run_full:
            self.tokens_per_s += 0.2 * (rate - self.tokens_per_s)
        self.has_run_full |= full

    def measure_fetch(self, tokens: int, ms: float) -> None:
        """Learn from a fetch how long it takes per token."""
        token_s = max(ms / 1000 - ROUND_TRIP_S, 0.1 * ms / 1000) / tokens
        self.fetch_token_s += (0.2 if self.fetch_token_s else 1.0) * (token_s - self.fetch_token_s)

    def pause_fetches(self, decode_incarnation: int, now: float) -> None:
        """Fetch nothing from a decode worker for `FETCH_PAUSE_S`, as that has failed."""
        paused = {one: until for one, until in self.fetch_paused_until.items() if until > now}
        self.fetch_paused_until = {**paused, decode_incarnation: now + FETCH_PAUSE_S}


class DecodeWorker(WorkerBase):
    is_decode = True

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello)
        self.admission = KvAdmission(self.capacity.kv_blocks, self.capacity.block_size)
        self.shares: HeldShares | None = None  # the shares of its pool, while it is in the pool
        self.seqs_by_target: dict[float, int] = {}  # sequences held, by `Allocation.tpot_ms`
        self.streams: set[Key] = set()  # attempts that run in its steps; the others wait for their KV
        self.charged_at = 0.0  # when answers beyond their estimates were last charged
        self.step_fit = StepFit()
        """How long its steps take without prompts between them, learnt while targets are in use or if it is mixed."""
        self.token_ms = 0.0  # how long its streams waited for each token lately; 0: not measured yet
        self.token_seqs = 0.0  # how many sequences it had then
        self.measured_at = 0  # how many requests of its pool had finished then
        self.prompts_seen_ms = 0.0  # of a mixed worker: `prompts_ms` of its other half when it last reported

    @property
    def free_blocks(self) -> int:
        return max(self.capacity.kv_blocks - self.admission.taken, 0)  # more may have been adopted than is sure to fit

    @property
    def fullness(self) -> float:
        """How full its blocks or its sequences are, whichever is more: 0 to 1."""
        return 1 - min(self.free_blocks / self.capacity.kv_blocks, self.free_seqs / self.capacity.max_seqs)

    def could_ever_take(self, submit: Submit) -> bool:
        """Whether it has room if nothing else is there."""
        whole = self.whole_blocks(submit)
        return whole <= self.capacity.kv_blocks and submit.choices <= self.capacity.max_seqs

    def whole_blocks(self, submit: Submit) -> int:
        """The most blocks that a request comes to hold here."""
        return KvDemand.of(submit).whole(self.capacity.block_size)

    def fits(
        self, submit: Submit, expected_left: int = NEVER, without: Collection[Key] = (), *, leaves: float = 0.0
    ) -> bool:
        """Whether there is room for a request now, or when these attempts are gone. `leaves`: the part that it leaves to
        others."""
        free_seqs = self.free_seqs + sum(self.allocations[key].seqs for key in without)
        free_seqs -= int(leaves * self.capacity.max_seqs) if self.allocations else 0
        demand = KvDemand.of(submit, expected_left)
        return submit.choices <= free_seqs and self.admission.fits(demand, without, leaves=leaves)

    def reserve(self, request: Request) -> None:
        submit = request.submit
        demand, blocks = KvDemand.of(submit, request.expected_left), self.whole_blocks(submit)
        allocation = Allocation(
            blocks, submit.choices, request.path, demand, submit.resumed_tokens, tpot_ms=request.tpot_ms
        )
        self.hold(request.key, allocation)

    def adopt(self, held: Held, kv_overcommit: float) -> bool:
        """Count what the worker held before it registered; returns False if that is impossible. If only the reservations of
        streams are known, they may add up to more than the pool, because the streams end at different times."""
        key, demand = (held.request_id, held.attempt), None
        if held.prompt_tokens:
            demand = KvDemand(held.prompt_tokens, held.left_tokens, held.seqs, expected_again(held, kv_overcommit))
            if demand._replace(expected=NEVER).whole(self.capacity.block_size) > held.kv_blocks:
                demand = None  # these do not fit together: the reservation counts
        if key in self.allocations or held.seqs > self.free_seqs or held.kv_blocks > self.capacity.kv_blocks:
            return False
        self.admission.reached(held.steps)
        self.hold(key, Allocation(held.kv_blocks, held.seqs, (), demand, held.resumed_tokens, adopted=True))
        if demand is None:
            return True
        if held.joined_step is not None:
            self.admission.joined(key, held.joined_step)
        return self.admission.shares(key, chains(held.prefix))

    def hold(self, key: Key, allocation: Allocation) -> None:
        self._count_target(allocation.tpot_ms, allocation.seqs)
        if allocation.adopted:
            self.streams.add(key)
        if self.shares is not None and allocation.path:
            assert allocation.demand is not None
            self.shares.add(allocation.path, self.incarnation, key, self.stream(allocation.seqs, allocation.demand))
        if allocation.demand is None:
            self.admission.adopt(key, allocation.kv_blocks)
        else:
            self.admission.place(key, allocation.demand)
        super().hold(key, allocation)

    def release(self, key: Key) -> Allocation | None:
        if (allocation := self.allocations.get(key)) is None:
            return None
        self._count_target(allocation.tpot_ms, -allocation.seqs)
        self.streams.discard(key)
        if self.shares is not None and allocation.path:
            self.shares.remove(allocation.path, self.incarnation, key)
        self.admission.release(key)
        if len(self.allocations) == 1:
            self.admission.short = False  # nothing runs there any more that would say so
        return super().release(key)

    def _count_target(self, tpot_ms: float, seqs: int) -> None:
        held = self.seqs_by_target.get(tpot_ms, 0) + seqs
        if held:
            self.seqs_by_target[tpot_ms] = held
        else:
            self.seqs_by_target.pop(tpot_ms, None)

    def stream(self, seqs: int, demand: KvDemand) -> HeldStream:
        """Returns the larger part of this worker that an attempt takes, in millionths: of its sequences, or of its blocks on
        average over its life."""
        size, capacity = self.capacity.block_size, self.capacity
        blocks = (demand.grown(0, size) + demand.whole(size)) // 2
        held = max(1_000_000 * seqs // capacity.max_seqs, 1_000_000 * blocks // capacity.kv_blocks, 1)
        return HeldStream(held, seqs if demand.expected < demand.left else 0)

    def forwarded(self, key: Key) -> int:
        """Tokens that an attempt has emitted for certain, first ones aside, by the worker's steps."""
        return self.admission.forwarded(key) if key in self.admission else 0

    def measure(self, tokens: int, step_ms: float) -> None:
        """It has computed so much of a prompt, beside what runs there."""
        rate = tokens * 1000 / step_ms
        self.tokens_per_s += (rate - self.tokens_per_s) * (0.3 if self.tokens_per_s else 1.0)

    def measure_decode(self, sequences: float, step_ms: float) -> None:
        """The mean of some decode steps, with the time between them."""
        gain = 0.2 if self.token_ms else 1.0
        self.token_ms += (step_ms - self.token_ms) * gain
        self.token_seqs += (sequences - self.token_seqs) * gain


Worker = PrefillWorker | DecodeWorker


def worker_of(hello: Hello) -> Worker:
    return DecodeWorker(hello) if hello.role is Role.DECODE else PrefillWorker(hello)


def expected_again(held: Held, kv_overcommit: float) -> int:
    """Returns the tokens that an earlier coordinator's stream is counted with, since its tenant is not known: see
    `preemption`."""
    if kv_overcommit <= 1 or held.attempt > 1 or held.resumed_tokens:
        return NEVER
    return max(ceil(max((held.left_tokens + 1) / kv_overcommit, START_LONG_TOKENS)) - 1, 0)
