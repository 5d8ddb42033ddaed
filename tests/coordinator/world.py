"""Fake workers and gateways around the real core, driven by a seeded random order of messages. No sockets, no clock."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from coordinator.core import Core
from coordinator.events import (
    Action,
    Event,
    Limits,
    PeerDown,
    PeerUp,
    ProtocolViolation,
    Received,
    Send,
    StateChanged,
    Tick,
)
from proto.codec import decode, pack_tokens, to_frames
from proto.errors import CancelReason, Interrupt
from proto.limits import PROTOCOL_VERSION
from proto.messages import (
    Accepted,
    CacheEvents,
    CacheMiss,
    Cancel,
    ClusterState,
    Finished,
    HandedOver,
    Hello,
    Interrupted,
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
    WorkFailed,
)
from proto.parts import Capacity
from proto.sampling import Sampling
from scheduler.lifecycle import TERMINAL
from tests.world import invariants

MODEL = "m"


def worker_hello(
    role: Role,
    incarnation: int,
    *,
    kv_blocks: int = 1000,
    block_size: int = 4,
    max_seqs: int = 64,
    context_tokens: int = 4096,
    fingerprint: str = "f",
) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        role,
        incarnation,
        f"{role}-{incarnation}",
        MODEL,
        fingerprint,
        "tcp://w:1",
        Capacity(kv_blocks, block_size, max_seqs, context_tokens),
    )


def gateway_hello(incarnation: int) -> Hello:
    return Hello(PROTOCOL_VERSION, Role.GATEWAY, incarnation, f"gateway-{incarnation}", address="tcp://g:1")


def submit(
    request_id: str, tokens: int = 10, *, attempt: int = 1, max_tokens: int = 4, choices: int = 1, resumed: int = 0
) -> Submit:
    return Submit(request_id, attempt, MODEL, tokens, Sampling(max_tokens=max_tokens), choices, resumed_tokens=resumed)


def named(request: Submit, text: int | None) -> Submit:
    """Prompts of one text begin alike, to the last full block of 4 tokens; without one, nothing of it is to be cached."""
    if text is None:
        return request
    hashes = b"".join(bytes([text, block]) * 8 for block in range(request.prompt_tokens // 4))
    return msgspec.structs.replace(request, block_hashes=hashes, hash_block_size=4)


@dataclass
class Harness:
    """The core with one event at a time; records what it said, and checks its invariants after each event."""

    core: Core = field(default_factory=Core)
    now: float = 0.0
    sent: list[Send] = field(default_factory=list)
    ended: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    protocol_violation: list[ProtocolViolation] = field(default_factory=list)

    @staticmethod
    def make(
        prefill: int = 1, decode: int = 1, limits: Limits | None = None, core: type[Core] = Core, **worker: int
    ) -> "Harness":
        """Gateway incarnation 1; prefill incarnations from 10; decode incarnations from 20."""
        harness = Harness(core(limits))
        harness.post(PeerUp(1, gateway_hello(1)))
        for index in range(prefill):
            harness.post(PeerUp(10 + index, worker_hello(Role.PREFILL, 10 + index, **worker)))  # type: ignore[arg-type]
        for index in range(decode):
            harness.post(PeerUp(20 + index, worker_hello(Role.DECODE, 20 + index, **worker)))  # type: ignore[arg-type]
        harness.sent.clear()
        return harness

    def post(self, event: Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        for action in actions:
            match action:
                case Send():
                    decode(to_frames(action.message, action.blob))  # a value out of its range would end the link
                    self.sent.append(action)
                case StateChanged(request_id, _, state, _) if state in TERMINAL:
                    self.ended[request_id].append(state)
                case ProtocolViolation():
                    self.protocol_violation.append(action)
        invariants.check(self.core)
        return actions

    def receive(self, incarnation: int, message: Message) -> list[Action]:
        blob = pack_tokens(range(message.prompt_tokens)) if isinstance(message, Submit) else b""
        return self.post(Received(incarnation, message, blob))

    def cluster_states(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Takes what the gateway was told: (models, tokens of each hash)."""
        told = self.take(ClusterState, 1)
        return [(one.servable_models, one.hash_block_sizes) for one in told if isinstance(one, ClusterState)]

    def take(self, kind: type[Message], incarnation: int | None = None) -> list[Message]:
        """Remove and return what was sent of one type (to one process)."""
        hits = [s for s in self.sent if isinstance(s.message, kind) and incarnation in (None, s.incarnation)]
        self.sent = [s for s in self.sent if s not in hits]
        return [s.message for s in hits]


class RandomWorld(Harness):
    """Honest but unpredictable workers: every reply comes, in link order, after an arbitrary number of other events; now and
    then a worker dies, an attempt fails, a client leaves."""

    def __init__(self, seed: int, *, chaos: float = 0.05, make: type[Core] = Core) -> None:
        super().__init__(make(Limits(queue_requests_max=20, step_tokens=8)))
        self.random = random.Random(seed)
        self.chaos = chaos
        self.next_incarnation = 100
        self.replies: dict[int, list[Message]] = defaultdict(list)
        self.holding: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
        self.prompts: dict[tuple[int, str, int], tuple[Prefill, int]] = {}
        self.cached: dict[int, set[bytes]] = defaultdict(set)
        """By prefill worker; it forgets at random and does not always say so."""
        self.accepted: set[str] = set()
        self.live: dict[str, Submit] = {}
        self.post(PeerUp(1, gateway_hello(1)))
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
            self.add_worker(role)

    def add_worker(self, role: Role) -> None:
        self.next_incarnation += 1
        self.post(
            PeerUp(
                self.next_incarnation,
                worker_hello(role, self.next_incarnation, kv_blocks=40, max_seqs=6, context_tokens=100),
            )
        )

    def incarnations(self, role: Role) -> list[int]:
        return [e for e, hello in self.core.members.peers.items() if hello.role is role]

    def step(self) -> None:
        self.now += self.random.random()
        choices: list[Callable[[], None]] = [self.submit_new, *[self.deliver_one] * 12]
        if self.random.random() < self.chaos:
            choices = [self.kill_worker, self.cancel_one, self.fail_one, self.repeat_submit]
        self.random.choice(choices)()
        self.obey()

    def submit_new(self) -> None:
        request = submit(
            f"r{len(self.ended)}-{len(self.live)}-{self.next_incarnation}-{self.random.randrange(10**9)}",
            self.random.randint(1, 40),
            max_tokens=self.random.randint(1, 20),
            choices=self.random.choice([1, 1, 2]),
        )
        request = named(request, text=self.random.choice([None, 0, 1]))
        self.live[request.request_id] = request
        self.receive(1, request)

    def repeat_submit(self) -> None:
        if self.live:
            self.receive(1, self.random.choice(list(self.live.values())))

    def deliver_one(self) -> None:
        ready = [incarnation for incarnation, queue in self.replies.items() if queue]
        if ready:
            incarnation = self.random.choice(ready)
            self.receive(incarnation, self.replies[incarnation].pop(0))

    def kill_worker(self) -> None:
        role = self.random.choice([Role.PREFILL, Role.DECODE])
        incarnation = self.random.choice(self.incarnations(role))
        self.replies.pop(incarnation, None)
        self.holding.pop(incarnation, None)
        self.post(PeerDown(incarnation, "killed"))
        self.add_worker(role)

    def cancel_one(self) -> None:
        if self.live:
            request = self.live.pop(self.random.choice(list(self.live)))
            self.receive(1, Cancel(request.request_id, request.attempt, CancelReason.DISCONNECTED))

    def fail_one(self) -> None:
        held = [(incarnation, key) for incarnation, keys in self.holding.items() for key in keys]
        if held:
            incarnation, key = self.random.choice(held)
            del self.holding[incarnation][key]
            self.replies[incarnation].append(WorkFailed(*key, Interrupt.TRANSFER_FAILED, "planted"))

    def obey(self) -> None:
        """Workers and the gateway react to what the core has sent."""
        while self.sent:
            batch, self.sent = self.sent, []
            for send in batch:
                self.react(send.incarnation, send.message)

    def react(self, incarnation: int, message: Message) -> None:
        replies = self.replies[incarnation]
        match message:
            case Accepted():
                self.accepted.add(message.request_id)
            case Rejected():
                self.live.pop(message.request_id, None)
            case Interrupted():
                self.resubmit(message)
            case Reserve():
                self.hold(incarnation, message, message.kv_blocks)
            case Prefill():
                self.hold(incarnation, message, -(-message.prompt_tokens // 4))
                self.take_in(incarnation, message)
            case Step():
                self.compute(incarnation, message)
            case Release():
                self.holding[incarnation].pop((message.request_id, message.attempt), None)
                replies.append(Released(message.request_id, message.attempt))
            case _:
                pass

    def hold(self, incarnation: int, message: Reserve | Prefill, blocks: int) -> None:
        held = self.holding[incarnation]
        held[(message.request_id, message.attempt)] = blocks
        assert sum(held.values()) <= 40, "the core gave a worker more than it has"

    def take_in(self, incarnation: int, message: Prefill) -> None:
        """Start behind what is cached, and say so where that is less than believed."""
        if self.random.random() < 0.2:
            self.cached[incarnation].clear()
        cached = 0
        while (
            cached < message.cached_tokens
            and message.block_hashes[4 * cached : 4 * cached + 16] in self.cached[incarnation]
        ):
            cached += 4
        self.prompts[(incarnation, message.request_id, message.attempt)] = (message, cached)
        if cached < message.cached_tokens:
            self.replies[incarnation].append(CacheMiss(message.request_id, message.attempt, cached))

    def compute(self, incarnation: int, step: Step) -> None:
        assert sum(c.length for c in step.chunks) <= 8
        done = []
        for c in step.chunks:
            key = (c.request_id, c.attempt)
            if key in self.holding[incarnation] and c.start == self.prompts[(incarnation, *key)][1]:
                done.append(c)
            elif key in self.holding[incarnation]:
                assert self.prompts[(incarnation, *key)][0].cached_tokens > 0, "chunks come in order and without gaps"
        self.replies[incarnation].append(StepDone(step.step_id, tuple(done), 1.0, 0))
        for chunk in done:
            key = (chunk.request_id, chunk.attempt)
            order, computed = self.prompts[(incarnation, *key)]
            fresh = order.block_hashes[: (chunk.start + chunk.length) // 4 * 16]
            self.cached[incarnation] |= {fresh[at : at + 16] for at in range(0, len(fresh), 16)}
            self.replies[incarnation].append(CacheEvents(fresh, b""))
            self.prompts[(incarnation, *key)] = (order, computed + chunk.length)
            if computed + chunk.length == order.prompt_tokens:
                del self.holding[incarnation][key]
                if order.sampling.max_tokens == 1:
                    self.replies[incarnation].append(Finished(*key, 1, 0))
                elif key in self.holding[order.decode.incarnation]:
                    del self.holding[order.decode.incarnation][key]
                    self.replies[incarnation].append(HandedOver(*key, 100, 1.0))
                    self.replies[order.decode.incarnation].append(Finished(*key, order.sampling.max_tokens, 0))
                else:
                    self.replies[incarnation].append(WorkFailed(*key, Interrupt.TRANSFER_FAILED, "no receiver"))

    def resubmit(self, message: Interrupted) -> None:
        if self.ended.get(message.request_id):
            return  # it had asked what became of it, and meanwhile its tokens have come
        request = self.live.get(message.request_id)
        if request is not None and request.attempt == message.attempt:
            again = msgspec.structs.replace(request, attempt=request.attempt + 1)
            self.live[request.request_id] = again
            self.receive(1, again)

    def heal(self) -> None:
        """No more faults: everything accepted must end."""
        for _ in range(100_000):
            self.obey()
            if not self.core.cluster.requests and not any(self.replies.values()):
                return
            self.now += 0.01
            self.post(Tick())
            self.deliver_one()
        raise AssertionError(f"stuck: {[(r.id, r.state) for r in self.core.cluster.requests.values()]}")
