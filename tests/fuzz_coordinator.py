"""Random messages from gateways, workers and observers to the coordinator's core. See `fuzz_cores`."""

import random
from collections import deque

from coordinator.core import HANDLERS, Core
from coordinator.events import Configured, Event, Limits, PeerDown, PeerUp, ProtocolViolation, Received, Send, Tick
from proto import limits
from proto.codec import decode, to_frames
from proto.errors import RemoteProtocolError
from proto.messages import (
    CacheMiss,
    Finished,
    HandedOver,
    Hello,
    Message,
    Prefill,
    Release,
    Released,
    Reserve,
    Role,
    StatusRequest,
    Step,
    StepDone,
    Submit,
    WorkFailed,
)
from proto.parts import Capacity, Held
from proto.progress import Hung
from runtime.tenancy.tenants import open_tenants
from tests.random_messages import FLOATS, RandomMessages
from tests.world.invariants import check

ROLES = {
    11: Role.GATEWAY, 12: Role.GATEWAY, 21: Role.PREFILL, 22: Role.PREFILL, 23: Role.DECODE, 31: Role.DECODE, 32: Role.DECODE,
    33: Role.PREFILL, 41: Role.OBSERVER,
}  # fmt: skip
"""By incarnation."""
REQUESTS = (*(f"r{number}" for number in range(1, 7)), "r1.c0", "r1.c1")
LARGEST = (0, 5, (1 << 40) - 1)


class CoordinatorWorld:
    def __init__(self, seed: int) -> None:
        self.random = source = random.Random(seed)
        self.messages = RandomMessages(
            source,
            {
                "request_id": REQUESTS,
                "attempt": (1, 1, 1, 2, 2, 3, 4),
                "decode_incarnation": tuple(ROLES),
                "model": ("m", "m", "m", "m2", "unknown"),
                "worker": ("w21", "w23", "w31", "w32", "mixed", "unknown"),
                "tenant": ("default", "a/b", "a/c", "d"),
                "priority_class": ("", "batch", "interactive"),
                "prompt_tokens": (1, 5, 16, 33, 100, 500),
                "max_tokens": (1, 1, 5, 50, 400),
                "kv_blocks": (0, 1, 5, 60),
                "seqs": (0, 1, 2),
            },
        )
        self.core = Core(
            Limits(
                kv_overcommit=source.choice([1.0, 2.0, 64.0]),
                queue_requests_max=source.choice([2, 1024]),
                tenant_queue_max=source.choice([2, 1024]),
                remembered_max=source.choice([3, 1000]),
            )
        )
        self.now = 1_000.0
        self.sent: deque[Send] = deque(maxlen=400)
        self.trail: deque[Event] = deque(maxlen=4)
        self.by_role = {role: [kind for kind, handler in HANDLERS.items() if role in handler.roles] for role in Role}
        self.feed(Configured(open_tenants(), 0.0))
        for incarnation in ROLES:
            self.join(incarnation)
        for queue in self.core.cluster.queues.values():
            queue.lengths.of(()).long_tokens = 4.0  # so that answers outlive what they are counted with

    def step(self) -> None:
        source = self.random
        self.now += source.choice(
            [0, 0, 0.001, 0.01, 0.3, 5, 40, 4_000] if source.random() < 0.1 else [0, 0.001, 0.01, 0.3]
        )
        chance = source.random()
        if chance < 0.03:
            self.join(source.choice(list(ROLES)))
        elif chance < 0.045:
            self.feed(PeerDown(source.choice(list(ROLES)), "lost"))
        elif chance < 0.08:
            self.feed(Tick())
        elif self.core.members.peers:
            incarnation = source.choice(list(self.core.members.peers))
            try:
                message, blob = decode(self.messages.frames(self.word_of(incarnation)))
            except RemoteProtocolError:
                return
            self.feed(Received(incarnation, message, blob))

    def end(self) -> None:
        for incarnation in list(self.core.members.peers):
            self.feed(PeerDown(incarnation, "the end"))
        self.now += 10_000
        self.feed(Tick())
        assert not self.core.cluster.requests and not self.core.cluster.workers

    def feed(self, event: Event) -> None:
        self.trail.append(event)
        for action in self.core.handle(event, self.now):
            if isinstance(action, Send):
                decode(to_frames(action.message, action.blob))
                self.sent.append(action)
        check(self.core, honest=False)
        self.core.next_deadline()
        for action in list(self.core.state.out):
            # The driver drops the peer in the loop's next turn; other events may come first.
            if (
                isinstance(action, ProtocolViolation)
                and action.incarnation in self.core.members.peers
                and self.random.random() < 0.7
            ):
                self.feed(PeerDown(action.incarnation, action.reason))

    def join(self, incarnation: int) -> None:
        hello = self.hello(incarnation)
        if self.core.refusal(hello) is None:
            self.feed(PeerUp(incarnation, hello))

    def hello(self, incarnation: int) -> Hello:
        source, role = self.random, ROLES[incarnation]
        version = source.choice([limits.PROTOCOL_VERSION, limits.MIN_PROTOCOL_VERSION])
        if role not in (Role.PREFILL, Role.DECODE):
            return Hello(version, role, incarnation, f"w{incarnation}")
        capacity = Capacity(
            source.choice([64, 1000, 1 << 30]),
            source.choice([16, 16, 16, 32]),
            source.choice([4, 64]),
            source.choice([512, 4096]),
        )
        hello: Hello = self.messages.make(
            Hello,
            version=version,
            role=role,
            incarnation=incarnation,
            name=f"w{incarnation}",
            model=source.choice(["m"] * 5 + ["m2"]),
            fingerprint="f",
            address="tcp://127.0.0.1:1",
            capacity=capacity,
            held=tuple(self.messages.make(Held) for _ in range(source.choice([0, 0, 0, 1, 3]))),
            process=source.choice(["", "", "mixed"]),
            flipped_from=source.choice([0, 0, *ROLES]),
        )
        return hello

    def word_of(self, incarnation: int) -> Message:
        """An answer to what it was told, in part; or anything that its role may say."""
        source, role = self.random, ROLES[incarnation]
        kinds = [kind for kind in self.by_role.get(role, []) if kind is not Hung or source.random() < 0.1] or [
            StatusRequest
        ]
        told = [send.message for send in self.sent if send.incarnation == incarnation][-6:]
        if role is Role.GATEWAY and source.random() < 0.7:
            kinds, told = [Submit], []
        if told and source.random() < 0.6 and (answer := self.answer(source.choice(told))) is not None:
            return answer
        made: Message = self.messages.make(source.choice(kinds))
        return made

    def answer(self, order: Message) -> Message | None:
        source, make = self.random, self.messages.make
        match order:
            case Step(step_id, chunks):
                computed = chunks if source.random() < 0.7 else chunks[:1]
                return StepDone(step_id, computed, source.choice(FLOATS), source.choice(LARGEST))
            case Prefill(request_id, attempt):
                kind = source.choice([HandedOver, HandedOver, CacheMiss, Finished, WorkFailed])
            case Reserve(request_id, attempt):
                kind = source.choice([Finished, WorkFailed])
            case Release(request_id, attempt):
                kind = Released
            case _:
                return None
        answer: Message = make(kind, request_id=request_id, attempt=attempt)
        return answer
