"""A cluster in virtual time around the real core: workers with fixed rates, clients that come when a test says.

Prefill: a step takes `step_s` plus its tokens over `tokens_per_s`. Decode: every sequence gets a token each `itl_s`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from coordinator.core import Core
from coordinator.events import Event, Limits, PeerUp, Received, Send, StateChanged, Tick
from coordinator.lifecycle import TERMINAL
from proto.errors import CancelReason
from proto.messages import (
    Cancel,
    Finished,
    HandedOver,
    Message,
    Prefill,
    Rejected,
    Release,
    Released,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
)
from proto.sampling import Sampling
from tests.coordinator.world import MODEL, gateway_hello, worker_hello


@dataclass
class Machine:
    """One prefill worker: runs its steps one after the other."""

    incarnation: int
    steps: list[Step] = field(default_factory=list)
    busy: bool = False
    busy_s: float = 0.0
    computed: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass
class Virtual:
    limits: Limits = field(default_factory=Limits)
    prefill: int = 1
    decode: int = 1
    tokens_per_s: float = 8192.0
    step_s: float = 0.0
    itl_s: float = 0.0
    kv_blocks: int = 10**6
    max_seqs: int = 10**4
    output: Callable[[Submit], int] = lambda submit: submit.sampling.max_tokens
    make: type[Core] = Core

    def __post_init__(self) -> None:
        self.now = 0.0
        self.core = self.make(self.limits)
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.machines: dict[int, Machine] = {}
        self.orders: dict[tuple[str, int], Prefill] = {}
        self.decoding: dict[tuple[str, int], tuple[int, float, int]] = {}
        """Decode worker's incarnation, start, and tokens to come."""
        self.emitted_tokens: Counter[str] = Counter()
        """By tenant."""
        self.held: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self.submitted: dict[str, tuple[float, Submit]] = {}
        self.ttft_s: dict[str, float] = {}
        self.rejected: list[tuple[float, Rejected]] = []
        self.on_rejected: Callable[[Submit, Rejected], None] = lambda submit, rejected: None
        self.ended: dict[str, str] = {}
        self.idle_with_work_s = 0.0
        self.post(PeerUp(1, gateway_hello(1)))
        shape = {"kv_blocks": self.kv_blocks, "max_seqs": self.max_seqs, "block_size": 16, "context_tokens": 200_000}
        for index in range(self.decode):
            self.post(PeerUp(200 + index, worker_hello(Role.DECODE, 200 + index, **shape)))
        for index in range(self.prefill):
            self.machines[100 + index] = Machine(100 + index)
            self.post(PeerUp(100 + index, worker_hello(Role.PREFILL, 100 + index, **shape)))

    # --- what a test does -----------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        self.count += 1
        heappush(self.agenda, (when, self.count, what))

    def submit(self, name: str, tenant: str, tokens: int, max_tokens: int = 2, deadline_ms: float = 0.0) -> None:
        submit = Submit(name, 1, MODEL, tokens, Sampling(max_tokens=max_tokens), tenant=tenant, deadline_ms=deadline_ms)
        self.submitted[name] = (self.now, submit)
        self.post(Received(1, submit, bytes(4 * tokens)))

    def cancel(self, name: str) -> None:
        if name not in self.ended:
            self.post(Received(1, Cancel(name, 1, CancelReason.DISCONNECTED)))

    def run(self, until: float) -> None:
        while self.agenda and self.agenda[0][0] <= until:
            due = self.core.next_deadline()
            if due is not None and due < self.agenda[0][0]:
                self.advance(due)
                self.post(Tick())
                continue
            when, _, what = heappop(self.agenda)
            self.advance(when)
            what()
        self.advance(max(self.now, until))

    # --- the machines ---------------------------------------------------------------------------------------------------

    def advance(self, when: float) -> None:
        """Time passes; idle machines are counted while something waits that could run anywhere."""
        passed = when - self.now
        if passed > 0 and any(len(queue) for queue in self.core.queues.values()):
            self.idle_with_work_s += passed * sum(not machine.busy for machine in self.machines.values())
        self.now = max(self.now, when)

    def post(self, event: Event) -> None:
        for action in self.core.handle(event, self.now):
            match action:
                case Send(incarnation, message, _):
                    self.react(incarnation, message)
                case StateChanged(request_id, _, state, _) if state in TERMINAL:
                    self.ended[request_id] = state

    def react(self, incarnation: int, message: Message) -> None:
        match message:
            case Rejected():
                self.rejected.append((self.now, message))
                self.on_rejected(self.submitted[message.request_id][1], message)
            case Prefill():
                self.held[incarnation].add((message.request_id, message.attempt))
                self.orders[(message.request_id, message.attempt)] = message
            case Reserve():
                self.held[incarnation].add((message.request_id, message.attempt))
            case Step():
                self.machines[incarnation].steps.append(message)
                self.begin(self.machines[incarnation])
            case Release():
                key = (message.request_id, message.attempt)
                if key in self.held[incarnation]:
                    self.held[incarnation].discard(key)
                    # First tokens are counted in prefill.
                    emitted = self.emitted(key) - 1 if incarnation in self.decoding.get(key, ()) else 0
                    self.at(self.now, lambda: self.post(Received(incarnation, Released(*key, emitted))))
            case _:
                pass

    def begin(self, machine: Machine) -> None:
        if machine.busy or not machine.steps:
            return
        step = machine.steps.pop(0)
        alive = tuple(c for c in step.chunks if (c.request_id, c.attempt) in self.held[machine.incarnation])
        took_s = self.step_s + sum(chunk.length for chunk in alive) / self.tokens_per_s if alive else 0.0
        machine.busy = True
        machine.busy_s += took_s
        self.at(self.now + took_s, lambda: self.done(machine, step, alive, took_s))

    def done(self, machine: Machine, step: Step, computed: tuple[object, ...], took_s: float) -> None:
        machine.busy = False
        self.begin(machine)
        self.post(Received(machine.incarnation, StepDone(step.step_id, computed, took_s * 1000, 0)))  # type: ignore[arg-type]
        for chunk in step.chunks:
            key = (chunk.request_id, chunk.attempt)
            if chunk not in computed:
                continue
            machine.computed[key] = machine.computed.get(key, 0) + chunk.length
            order = self.orders[key]
            if machine.computed[key] == order.prompt_tokens and key in self.held[machine.incarnation]:
                self.ttft_s[chunk.request_id] = self.now - self.submitted[chunk.request_id][0]
                self.held[machine.incarnation].discard(key)
                self.post(Received(machine.incarnation, HandedOver(*key, 0, 0.0)))
                self.decode_on(order)

    def decode_on(self, order: Prefill) -> None:
        key, incarnation = (order.request_id, order.attempt), order.decode.incarnation
        tokens = self.output(self.submitted[order.request_id][1])

        self.decoding[key] = (incarnation, self.now, tokens)

        def finish() -> None:
            if key in self.held[incarnation]:
                self.held[incarnation].discard(key)
                self.post(Received(incarnation, Finished(*key, self.emitted(key), 0)))

        self.at(self.now + tokens * self.itl_s, finish)

    def emitted(self, key: tuple[str, int]) -> int:
        """What a decode that ends now has emitted; counted once."""
        _, start, tokens = self.decoding.pop(key)
        passed = tokens if self.itl_s == 0 else min(max(round((self.now - start) / self.itl_s), 1), tokens)
        self.emitted_tokens[self.submitted[key[0]][1].tenant] += passed
        return passed


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
