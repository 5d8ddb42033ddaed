"""One worker as the scheduler knows it, and what is reserved on it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import ceil, inf

import msgspec

from proto.messages import Chunk, Hello, Role, Step, Submit
from proto.parts import STEP_TOKENS, Capacity, Held
from proto.status import KvHeld, KvPair
from scheduler.fairness.cost import START_LONG_TOKENS
from scheduler.fairness.fair_node import Path
from scheduler.fairness.held_shares import HeldShares, HeldStream
from scheduler.kv_admission.admission import Key, KvAdmission
from scheduler.kv_admission.demand import NEVER, KvDemand
from scheduler.kv_admission.shared_blocks import chains
from scheduler.request import Request
from scheduler.step_fit import StepFit
from scheduler.step_pace import StepLimits, StepPace

WORKERS = (Role.PREFILL, Role.DECODE)
Where = dict[tuple[str, int], list[int]]  # the workers that hold something for each attempt


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


@dataclass(eq=False)
class Worker:
    incarnation: int
    hello: Hello
    capacity: Capacity
    free_seqs: int
    admission: KvAdmission | None = None
    """Decode only. Allocations on a prefill worker do not grow: `kv_blocks_taken` is enough."""
    seqs_by_target: dict[float, int] = field(default_factory=dict)
    """Decode only: sequences held, by `Allocation.tpot_ms`."""
    charged_at: float = 0.0  # decode only: when answers beyond their estimates were last charged
    step_fit: StepFit = field(default_factory=StepFit)
    """Decode only: how long its steps take without prompts between them, learnt while targets are in use or if it is mixed."""
    token_ms: float = 0.0  # decode only: how long its streams waited for each token lately; 0: not measured yet
    token_seqs: float = 0.0  # decode only: how many sequences it had then
    measured_at: int = 0  # decode only: how many requests of its pool had finished then
    prompts_ms: float = 0.0
    """The time of all prefill steps; of a mixed worker's decode half, those of the other half when it last reported."""
    kv_blocks_taken: int = 0
    allocations: dict[tuple[str, int], Allocation] = field(default_factory=dict)
    placed: dict[str, Request] = field(default_factory=dict)
    """Prefill only: prompts with tokens not yet dispatched, oldest first."""
    begun: Request | None = None
    """Prefill only: the prompt that had the last chunk of the last step, if it may be finished in the next one."""
    bound: dict[str, Request] = field(default_factory=dict)
    """Prefill only: requests not placed yet that wait for this worker, as it has more of them cached; oldest first."""
    undispatched: dict[str, int] = field(default_factory=dict)
    """Prompt tokens still to be sent to this worker, by request placed on it or bound to it."""
    undispatched_tokens: int = 0  # the sum
    where: Where = field(default_factory=dict)
    """The workers on which each attempt holds something, shared by all workers."""
    shares: HeldShares | None = None  # decode only: the shares of its pool, while it is in the pool
    on_change: Callable[["Worker"], None] = lambda worker: None  # told when its allocations or steps have changed
    steps: dict[int, tuple[Step, list[Request]]] = field(default_factory=dict)
    """Steps in flight, by id, with the request of each chunk."""
    tokens_in_flight: int = 0
    fetch_token_s: float = 0.0
    """Prefill only: what it takes to fetch a token's KV, beside the round trip; 0: not measured yet."""
    fetch_paused_until: dict[int, float] = field(default_factory=dict)
    """Prefill only: decode workers from which it fetches nothing for a while, as that has failed."""
    kv_pairs: tuple[KvPair, ...] = ()  # prefill only, as it last reported
    kv_held: KvHeld = KvHeld(0, 0, 0)  # noqa: RUF009 (it is frozen)
    """As it last reported, for people alone."""
    next_step_id: int = 0
    tokens_forwarded: int = 0
    steps_done: int = 0  # steps done in its present role, as last heard
    tokens_per_s: float = 0.0  # measured prefill rate, smoothed; 0 until the first step is done
    pace: StepPace = field(default_factory=lambda: StepPace(StepLimits(STEP_TOKENS)))  # prefill only
    has_run_full: bool = False
    """It has computed a step that was at least half full, so deadlines can be judged by its rate."""
    failure_rate: float = 0.0
    """How much of what it was given lately had failed, 0 to 1, when `trouble_at` requests of the pool had finished."""
    trouble_at: int = 0
    """Requests of the pool that had finished when `failure_rate` was counted; `Pool.failure_rate` lets it fall from there."""
    loss_counted: bool = False
    """It or the other half of its process was lost, and the requests that ran there are already suspected."""
    draining: bool = False  # nothing new is placed here
    leaving: bool = False  # it has announced that it is about to end
    hand_over_at: float = inf  # when its running requests are handed over, while it is draining
    dismissed: bool = False  # it was told that nothing will come any more

    @staticmethod
    def from_hello(hello: Hello) -> "Worker":
        assert hello.capacity is not None
        capacity = hello.capacity
        admission = KvAdmission(capacity.kv_blocks, capacity.block_size) if hello.role is Role.DECODE else None
        return Worker(hello.incarnation, hello, capacity, capacity.max_seqs, admission)

    def is_same_process(self, other: "Worker") -> bool:
        """Whether the two are the halves of one mixed worker."""
        own, there = self.hello, other.hello
        return own.name != there.name and own.pid > 0 and (own.host, own.pid) == (there.host, there.pid)

    @property
    def is_decode(self) -> bool:
        return self.admission is not None

    @property
    def process_name(self) -> str:
        """The name of its process for people: a mixed one is two workers."""
        return self.hello.process or self.hello.name

    @property
    def free_blocks(self) -> int:
        """Blocks that nothing held here will ever need."""
        taken = self.kv_blocks_taken if self.admission is None else self.admission.taken
        return max(self.capacity.kv_blocks - taken, 0)  # more may have been adopted than is sure to fit

    @property
    def fullness(self) -> float:
        """How full a decode worker's blocks or its sequences are, whichever is more: 0 to 1."""
        return 1 - min(self.free_blocks / self.capacity.kv_blocks, self.free_seqs / self.capacity.max_seqs)

    @property
    def kv_tokens(self) -> int:
        return self.capacity.kv_blocks * self.capacity.block_size

    def fits(
        self, submit: Submit, expected_left: int = NEVER, without: Collection[Key] = (), *, leaves: float = 0.0
    ) -> bool:
        """Whether there is room for it now; on a decode worker, or when these attempts are gone. `leaves`: the part of a decode
        worker that it leaves to others."""
        if self.admission is None:
            return self.free_seqs > 0 and self.whole_blocks(submit) <= self.free_blocks
        free_seqs = self.free_seqs + sum(self.allocations[key].seqs for key in without)
        free_seqs -= int(leaves * self.capacity.max_seqs) if self.allocations else 0
        demand = KvDemand.of(submit, expected_left)
        return submit.choices <= free_seqs and self.admission.fits(demand, without, leaves=leaves)

    def could_ever_take(self, submit: Submit) -> bool:
        """Whether it has room if nothing else is there."""
        seqs = 1 if self.admission is None else submit.choices
        return self.whole_blocks(submit) <= self.capacity.kv_blocks and seqs <= self.capacity.max_seqs

    def hold(self, key: tuple[str, int], allocation: Allocation) -> None:
        """The caller has asked `fits`."""
        assert allocation.seqs <= self.free_seqs
        self._count(key, allocation)

    def adopt(self, held: Held, kv_overcommit: float) -> bool:
        """Count what the worker held before it registered; returns False if that is impossible. If only the reservations of
        decode streams are known, they may add up to more than the pool, because the streams end at different times."""
        key, life = (held.request_id, held.attempt), None
        if self.admission is not None and held.prompt_tokens:
            life = KvDemand(held.prompt_tokens, held.left_tokens, held.seqs, expected_again(held, kv_overcommit))
            if life._replace(expected=NEVER).whole(self.capacity.block_size) > held.kv_blocks:
                life = None  # these do not fit together: the reservation counts
        allocation = Allocation(held.kv_blocks, held.seqs, (), life, held.resumed_tokens, adopted=True)
        blocks = self.capacity.kv_blocks if self.admission is not None else self.free_blocks
        if key in self.allocations or allocation.seqs > self.free_seqs or allocation.kv_blocks > blocks:
            return False
        if self.admission is not None:
            self.admission.reached(held.steps)
        self._count(key, allocation)
        if self.admission is not None and life is not None:
            if held.joined_step is not None:
                self.admission.joined(key, held.joined_step)
            return self.admission.shares(key, chains(held.prefix))
        return True

    def _count(self, key: tuple[str, int], allocation: Allocation) -> None:
        assert key not in self.allocations
        self.allocations[key] = allocation
        self.where.setdefault(key, []).append(self.incarnation)
        self.free_seqs -= allocation.seqs
        self._count_target(allocation.tpot_ms, allocation.seqs)
        if self.shares is not None and allocation.path:
            assert allocation.demand is not None
            self.shares.add(allocation.path, self.incarnation, key, self.stream(allocation.seqs, allocation.demand))
        if self.admission is None:
            self.kv_blocks_taken += allocation.kv_blocks
        elif allocation.demand is None:
            self.admission.adopt(key, allocation.kv_blocks)
        else:
            self.admission.place(key, allocation.demand)
        self.on_change(self)

    def release(self, key: tuple[str, int]) -> Allocation | None:
        """Count an allocation as free again; None if there is none, as when a message is repeated."""
        allocation = self.allocations.pop(key, None)
        if allocation is None:
            return None
        self._forget_allocation(key)
        self.free_seqs += allocation.seqs
        self._count_target(allocation.tpot_ms, -allocation.seqs)
        if self.shares is not None and allocation.path:
            self.shares.remove(allocation.path, self.incarnation, key)
        if self.admission is None:
            self.kv_blocks_taken -= allocation.kv_blocks
        else:
            self.admission.release(key)
            if not self.allocations:
                self.admission.short = False  # nothing runs there any more that would say so
        self.on_change(self)
        return allocation

    def stream(self, seqs: int, demand: KvDemand) -> HeldStream:
        """Returns the larger part of this worker that an attempt takes, in millionths: of its sequences, or of its blocks on
        average over its life."""
        size, capacity = self.capacity.block_size, self.capacity
        blocks = (demand.grown(0, size) + demand.whole(size)) // 2
        held = max(1_000_000 * seqs // capacity.max_seqs, 1_000_000 * blocks // capacity.kv_blocks, 1)
        return HeldStream(held, seqs if demand.expected < demand.left else 0)

    def _count_target(self, tpot_ms: float, seqs: int) -> None:
        held = self.seqs_by_target.get(tpot_ms, 0) + seqs
        if held:
            self.seqs_by_target[tpot_ms] = held
        else:
            self.seqs_by_target.pop(tpot_ms, None)

    def _forget_allocation(self, key: tuple[str, int]) -> None:
        incarnations = self.where[key]
        incarnations.remove(self.incarnation)
        if not incarnations:
            del self.where[key]

    def leave(self) -> None:
        """Take the attempts of a lost worker out of `where`; `allocations` keeps them."""
        for key in self.allocations:
            self._forget_allocation(key)

    def forwarded(self, key: tuple[str, int]) -> int:
        """Tokens that an attempt has emitted for certain in decode, first ones aside, by the worker's steps."""
        return self.admission.forwarded(key) if self.admission is not None and key in self.admission else 0

    def begin_step(self, chunks: list[Chunk], requests: list[Request]) -> Step:
        step = Step(self.next_step_id, tuple(chunks))
        self.next_step_id += 1
        self.steps[step.step_id] = step, requests
        for chunk in chunks:
            self.tokens_in_flight += chunk.length
        self.on_change(self)
        return step

    def end_step(self, step_id: int) -> tuple[tuple[Chunk, ...], list[Request]]:
        """The chunks of a step that is over, and their requests; empty if it is not known."""
        found = self.steps.pop(step_id, None)
        if found is None:
            return (), []
        step, requests = found
        for chunk in step.chunks:
            self.tokens_in_flight -= chunk.length
        self.on_change(self)
        return step.chunks, requests

    def measure(self, tokens: int, step_ms: float) -> None:
        """A prefill step is computed. The first rate is taken as it is. A short step may raise a rate that full steps gave, but
        not lower it."""
        rate, full = tokens * 1000 / step_ms, self.pace.is_full(tokens)
        self.prompts_ms += step_ms
        self.pace.measure(tokens, step_ms)
        if not self.tokens_per_s or (full and not self.has_run_full):
            self.tokens_per_s = rate
        elif full or rate > self.tokens_per_s or not self.has_run_full:
            self.tokens_per_s += 0.2 * (rate - self.tokens_per_s)
        self.has_run_full |= full

    def measure_decode(self, sequences: float, step_ms: float) -> None:
        """The mean of some decode steps, with the time between them."""
        gain = 0.2 if self.token_ms else 1.0
        self.token_ms += (step_ms - self.token_ms) * gain
        self.token_seqs += (sequences - self.token_seqs) * gain

    def measure_suffix(self, tokens: int, step_ms: float) -> None:
        """A decode worker has computed so much of a prompt, beside what runs there."""
        rate = tokens * 1000 / step_ms
        self.tokens_per_s += (rate - self.tokens_per_s) * (0.3 if self.tokens_per_s else 1.0)

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

    def whole_blocks(self, submit: Submit) -> int:
        """The most blocks it comes to hold here."""
        size = self.capacity.block_size
        return -(-submit.prompt_tokens // size) if self.admission is None else KvDemand.of(submit).whole(size)

    def prefill_allocation(self, submit: Submit, path: Path = ()) -> Allocation:
        return Allocation(self.whole_blocks(submit), 1, path, None, submit.resumed_tokens)

    def decode_allocation(
        self, submit: Submit, path: Path = (), expected_left: int = NEVER, tpot_ms: float = 0.0
    ) -> Allocation:
        life = KvDemand.of(submit, expected_left)
        longest = life if expected_left == NEVER else KvDemand.of(submit)
        blocks = longest.whole(self.capacity.block_size)
        return Allocation(blocks, submit.choices, path, life, submit.resumed_tokens, tpot_ms=tpot_ms)

    def check_invariants(self) -> None:
        assert self.free_seqs + sum(h.seqs for h in self.allocations.values()) == self.capacity.max_seqs
        assert self.free_seqs >= 0
        assert self.free_seqs + sum(self.seqs_by_target.values()) == self.capacity.max_seqs
        assert all(self.incarnation in self.where[key] for key in self.allocations)
        assert self.undispatched_tokens == sum(self.undispatched.values())
        assert self.undispatched.keys() == self.placed.keys() | self.bound.keys()
        if self.admission is None:
            assert (
                self.kv_blocks_taken == sum(h.kv_blocks for h in self.allocations.values()) <= self.capacity.kv_blocks
            )
        else:
            assert len(self.admission) == len(self.allocations) and all(
                key in self.admission for key in self.allocations
            )


def expected_again(held: Held, kv_overcommit: float) -> int:
    """Returns the tokens that an earlier coordinator's stream is counted with, since its tenant is not known: see
    `preemption`."""
    if kv_overcommit <= 1 or held.attempt > 1 or held.resumed_tokens:
        return NEVER
    return max(ceil(max((held.left_tokens + 1) / kv_overcommit, START_LONG_TOKENS)) - 1, 0)
