"""Several workers in virtual time around the real core, each with the real block allocator: what caching brings and costs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from coordinator.core import Core
from coordinator.events import Limits, PeerUp, Received, Send
from coordinator.fairness.cost import Prices
from coordinator.score import Weights
from engine.kv.allocator import BlockAllocator
from gateway.text.block_hashes import block_hashes
from prefill_worker.prompts import PrefillRequest, PromptTable
from proto.codec import pack_tokens, unpack_tokens
from proto.messages import (
    CacheEvents,
    CacheMiss,
    Finished,
    HandedOver,
    Message,
    Prefill,
    Released,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
)
from proto.sampling import Sampling
from tests.coordinator.world import MODEL, gateway_hello, worker_hello

BLOCK = 16
RATE = 2000.0
"""Prefill tokens per second of one worker."""
DECODE = 20
OUTPUT = 8
LONGEST_PREFIX_FIRST = Weights(queue=0.0, compute=1.0, room_s=0.0)
LOAD_ONLY = Weights(compute=0.0, room_s=0.0)


@dataclass
class Arrival:
    at: float
    prompt: list[int]
    tenant: str = "default"


@dataclass
class CacheWorld:
    """Give it arrivals; afterwards read what was computed, cached and charged."""

    prefill: int
    blocks: int = 2000
    """Of each prefill worker."""
    weights: Weights = field(default_factory=Weights)
    false_beliefs: float = 0.0
    """Share of prompts of which some worker is believed to have the first half."""
    now: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    charged: float = 0.0
    misses: int = 0
    cached_of: dict[str, int] = field(default_factory=dict)
    ttft_s: dict[str, float] = field(default_factory=dict)
    worker_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Output is free here, so that what tenants are charged can be compared with what was computed for them.
        many = 10**9
        limits = Limits(
            placement=self.weights,
            prices=Prices(1.0, 0.0),
            queue_requests_max=100_000,
            queue_tokens_max=many,
            tenant_queue_max=many,
            queue_wait_s_max=many,
            step_tokens=512,
        )
        self.core = Core(limits)
        self.random = random.Random(0)
        self.events: list[tuple[float, int, int, Message, bytes]] = []
        self.order = count()
        self.tables = {10 + n: PromptTable(BlockAllocator(self.blocks), BLOCK) for n in range(self.prefill)}
        self.busy_until = dict.fromkeys(self.tables, 0.0)
        self.steps: dict[int, list[Step]] = {incarnation: [] for incarnation in self.tables}
        self.post(PeerUp(1, gateway_hello(1)))
        for incarnation in self.tables:
            self.post(PeerUp(incarnation, self.hello(Role.PREFILL, incarnation, self.blocks)))
        self.post(PeerUp(DECODE, self.hello(Role.DECODE, DECODE, 1_000_000)))
        self.count_charges()

    def hello(self, role: Role, incarnation: int, blocks: int):
        return worker_hello(
            role, incarnation, kv_blocks=blocks, block_size=BLOCK, max_seqs=10_000, context_tokens=1 << 20
        )

    def count_charges(self) -> None:
        fair = self.core.queues[MODEL].fair
        pop, go_on, adjust = fair.pop, fair.go_on, fair.adjust

        def counted_pop(*arguments):
            found = pop(*arguments)
            self.charged += found.cost
            return found

        def counted_go_on(entry, terms):
            self.charged += terms.cost
            go_on(entry, terms)

        def counted_adjust(path, cost):
            self.charged += cost
            adjust(path, cost)

        fair.pop, fair.go_on, fair.adjust = counted_pop, counted_go_on, counted_adjust

    def run(self, arrivals: Sequence[Arrival]) -> None:
        for number, arrival in enumerate(arrivals):
            packed = pack_tokens(arrival.prompt)
            hashes = block_hashes(packed, BLOCK, f"tenant:{arrival.tenant}")
            self.prompt_tokens += len(arrival.prompt)
            message = Submit(
                f"r{number}", 1, MODEL, len(arrival.prompt), Sampling(max_tokens=OUTPUT), tenant=arrival.tenant,
                block_hashes=hashes, hash_block_size=BLOCK,
            )  # fmt: skip
            heappush(self.events, (arrival.at, next(self.order), 1, message, packed))
        started = {f"r{number}": arrival.at for number, arrival in enumerate(arrivals)}
        while self.events:
            self.now, _, incarnation, message, blob = heappop(self.events)
            if isinstance(message, HandedOver):
                self.ttft_s[message.request_id] = self.now - started[message.request_id]
            if isinstance(message, Submit) and self.random.random() < self.false_beliefs:
                believed = message.block_hashes[: len(message.block_hashes) // 32 * 16]
                self.post(Received(self.random.choice(list(self.tables)), CacheEvents(believed, b"")))
            self.post(Received(incarnation, message, blob))
            if isinstance(message, StepDone):
                self.start_step(incarnation)
        assert not self.core.requests, "something was never done"
        for table in self.tables.values():
            assert not table.prompts
            table.allocator.check_invariants()

    def post(self, event: PeerUp | Received) -> None:
        for action in self.core.handle(event, self.now):
            if isinstance(action, Send):
                self.obey(action.incarnation, action.message, action.blob)

    def say(self, incarnation: int, message: Message, after_s: float = 0.0) -> None:
        heappush(self.events, (self.now + after_s, next(self.order), incarnation, message, b""))

    def obey(self, incarnation: int, message: Message, blob: bytes) -> None:
        match message:
            case Prefill():
                prompt = self.tables[incarnation].take_in(message, unpack_tokens(blob, message.prompt_tokens))
                assert isinstance(prompt, PrefillRequest), "reserved, and no room: cached blocks must count as room"
                prompt.sending = True
                self.cached_of[message.request_id] = prompt.cached_tokens
                self.worker_of[message.request_id] = incarnation
                if prompt.cached_tokens < message.cached_tokens:
                    self.misses += 1
                    self.say(incarnation, CacheMiss(*prompt.key, prompt.cached_tokens))
            case Step():
                self.steps[incarnation].append(message)
                if len(self.steps[incarnation]) == 1:
                    self.start_step(incarnation)
            case Reserve():
                pass
            case _:
                assert incarnation == 1 or not isinstance(message, Released)

    def start_step(self, incarnation: int) -> None:
        """Compute the next step of a worker; called when the one before is done."""
        table, steps = self.tables[incarnation], self.steps[incarnation]
        if not steps or self.busy_until[incarnation] > self.now:
            return
        step = steps[0]
        work = table.runnable(step.chunks)
        tokens = sum(chunk.length for _, chunk in work)
        self.computed_tokens += tokens
        took_s = tokens / RATE
        self.busy_until[incarnation] = self.now + took_s
        table.begin_step(work)
        steps.pop(0)
        said = table.end_step(work)
        assert not said
        done = StepDone(step.step_id, tuple(chunk for _, chunk in work), took_s * 1000, 0)
        self.say(incarnation, done, took_s)
        inserted, evicted = table.allocator.take_changes(4096)
        self.say(incarnation, CacheEvents(inserted, evicted), took_s)
        for prompt, _ in work:
            if prompt.done:
                for final_report in table.sent(prompt, HandedOver(*prompt.key, 0, 1.0)):
                    self.say(incarnation, final_report, took_s)
                self.say(DECODE, Finished(*prompt.key, OUTPUT, 0), took_s + 0.01)


def hot_traffic(seed: int, requests: int, per_s: float, hot: int, *, tenants: int = 1) -> list[Arrival]:
    """90 % of the prompts begin with one of `hot` texts of 1,024 tokens; what follows, and the others, are new."""
    rng = random.Random(seed)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(1 << 16) for _ in range(tokens)]

    beginnings = [text(1024) for _ in range(hot)]
    at, found = 0.0, []
    for _ in range(requests):
        at += rng.expovariate(per_s)
        begin = rng.choice(beginnings) if rng.random() < 0.9 else text(1024)
        found.append(Arrival(at, begin + text(rng.randint(20, 200)), f"org/u{rng.randrange(tenants)}"))
    return found
