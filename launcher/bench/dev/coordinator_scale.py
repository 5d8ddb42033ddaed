"""What a request costs the coordinator with many workers against few: the real core around a cluster in virtual time.

Each pair of workers serves the same number of requests a second, whatever the number of pairs. A backlog of many tenants
waits all the time. Prompts begin with one of some shared prefixes, workers report their caches, and decode workers report
progress. What is measured is CPU time of `Core.handle` alone, per request and for the slowest event.

"prefill" has decode workers with room for all: there is always something to place. "decode" has decode workers with room for
three quarters of that, so that requests wait for room, and every end of a stream lets one more in.
"""

import gc
import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from coordinator.core import Core
from coordinator.events import Event, Limits, PeerUp, Received, Send
from launcher.tables import Table
from proto.held import Capacity
from proto.limits import HASH_BYTES, PROTOCOL_VERSION
from proto.messages import (
    CacheEvents,
    Chunk,
    Finished,
    HandedOver,
    Hello,
    Prefill,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
)
from proto.progress import DecodeProgress, Joined
from proto.sampling import Sampling

LIMITS = ("prefill", "decode")
PER_S = 20.0
"""Requests that one pair of workers serves."""
_PROMPT_TOKENS, _STEP_TOKENS, _BLOCK_SIZE = 512, 256, 16
_MAX_TOKENS, _STREAM_S, _PROGRESS_S = 128, 2.0, 0.1
_PREFIXES, _PREFIX_BLOCKS = 500, 16
_CACHED_BLOCKS = 2_000
_GATEWAY = 1


@dataclass(frozen=True)
class Cost:
    """Of a number of requests that were served."""

    workers: int
    limited_by: str
    cpu_us: float
    """Per request."""
    event_ms_max: float
    slowest: str
    """The kind of that event."""
    events: float
    """Per request."""
    virtual_s: float


class Cluster:
    """Workers that do what they are told in the time that it takes."""

    def __init__(self, pairs: int, tenants: int, limited_by: str, seed: int = 0) -> None:
        many = 10**9
        self.core = Core(
            Limits(
                queue_requests_max=many,
                queue_tokens_max=many,
                tenant_queue_max=many,
                queue_wait_s_max=float(many),
                step_tokens=_STEP_TOKENS,
            )
        )
        self.random = random.Random(seed)
        self.tenants = [f"o{number // 10}/u{number}" for number in range(tenants)]
        self.agenda: list[tuple[float, int, Event]] = []
        self.order = count()
        self.now = 0.0
        self.submitted = self.finished = self.events = 0
        self.cpu_ns = 0
        self.slowest: Counter[str] = Counter()
        self.prefixes = [self.random.randbytes(_PREFIX_BLOCKS * HASH_BYTES) for _ in range(_PREFIXES)]
        self.orders: dict[str, Prefill] = {}
        self.steps: dict[int, deque[Step]] = {}
        self.cached: dict[int, deque[bytes]] = {}
        self.progress: dict[int, int] = {}
        self.joined: dict[int, list[Joined]] = {}
        self.streams: dict[str, int] = {}
        per_stream = -(-(_PROMPT_TOKENS + _MAX_TOKENS) // _BLOCK_SIZE)
        streams = PER_S * _STREAM_S * (4.0 if limited_by == "prefill" else 0.75)
        self._hello(Role.GATEWAY, _GATEWAY, None)
        for number in range(pairs):
            self._hello(Role.DECODE, 10_000 + number, Capacity(int(per_stream * streams), _BLOCK_SIZE, 1000, 100_000))
            self.progress[10_000 + number], self.joined[10_000 + number] = 0, []
            self.later(self.random.random() * _PROGRESS_S, 10_000 + number, DecodeProgress(0, 0, 0))
        for number in range(pairs):
            self.steps[100 + number], self.cached[100 + number] = deque(), deque()
            self._hello(Role.PREFILL, 100 + number, Capacity(10**5, _BLOCK_SIZE, 1000, 100_000))

    def _hello(self, role: Role, incarnation: int, capacity: Capacity | None) -> None:
        hello = Hello(
            PROTOCOL_VERSION, role, incarnation, f"{role}-{incarnation}", "m", "f", "tcp://127.0.0.1:1", capacity
        )
        self.handle(PeerUp(incarnation, hello))

    def submit(self) -> None:
        self.submitted += 1
        prefix = self.random.choice(self.prefixes) if self.random.random() < 0.5 else b""
        rest = _PROMPT_TOKENS // _BLOCK_SIZE * HASH_BYTES - len(prefix)
        submit = Submit(
            f"r{self.submitted}",
            1,
            "m",
            _PROMPT_TOKENS,
            Sampling(max_tokens=_MAX_TOKENS),
            tenant=self.random.choice(self.tenants),
            block_hashes=prefix + self.random.randbytes(rest),
            hash_block_size=_BLOCK_SIZE,
        )
        self.handle(Received(_GATEWAY, submit, bytes(4 * _PROMPT_TOKENS)))

    def later(self, after_s: float, incarnation: int, message: Any) -> None:
        heappush(self.agenda, (self.now + after_s, next(self.order), Received(incarnation, message)))

    def run(self, until_finished: int, refill: bool) -> None:
        while self.finished < until_finished:
            self.now, _, event = heappop(self.agenda)
            assert isinstance(event, Received)
            message, incarnation = event.message, event.incarnation
            if isinstance(message, DecodeProgress):
                self.progress[incarnation] += 5
                event = Received(
                    incarnation, DecodeProgress(self.progress[incarnation], 0, 0, tuple(self.joined[incarnation]))
                )
                self.joined[incarnation] = []
                self.later(_PROGRESS_S, incarnation, DecodeProgress(0, 0, 0))
            self.handle(event)
            if isinstance(message, StepDone):
                self.computed(incarnation, message)
            elif isinstance(message, Finished):
                self.finished += 1
                if refill:
                    self.submit()

    def handle(self, event: Event) -> None:
        begin = time.thread_time_ns()
        actions = self.core.handle(event, self.now)
        took_ns = time.thread_time_ns() - begin
        self.cpu_ns += took_ns
        self.events += 1
        kind = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        self.slowest[kind] = max(self.slowest[kind], took_ns)
        for action in actions:
            if isinstance(action, Send):
                self.obey(action.incarnation, action.message)

    def obey(self, incarnation: int, message: Any) -> None:
        match message:
            case Prefill():
                self.orders[message.request_id] = message
            case Reserve():
                self.streams[message.request_id] = incarnation
            case Step():
                self.steps[incarnation].append(message)
                if len(self.steps[incarnation]) == 1:
                    self.begin(incarnation)

    def begin(self, incarnation: int) -> None:
        step = self.steps[incarnation][0]
        tokens = sum(chunk.length for chunk in step.chunks)
        took_s = tokens / (PER_S * _PROMPT_TOKENS)
        self.later(took_s, incarnation, StepDone(step.step_id, step.chunks, took_s * 1000, 0))

    def computed(self, incarnation: int, done: StepDone) -> None:
        self.steps[incarnation].popleft()
        if self.steps[incarnation]:
            self.begin(incarnation)
        for chunk in done.computed:
            order = self.orders[chunk.request_id]
            self.report_cache(incarnation, chunk, order.block_hashes)
            if chunk.start + chunk.length == _PROMPT_TOKENS:
                del self.orders[chunk.request_id]
                self.handle(Received(incarnation, HandedOver(chunk.request_id, 1, 1, 1.0)))
                decode = self.streams.pop(chunk.request_id)
                self.joined[decode].append(Joined(chunk.request_id, 1, self.progress[decode]))
                self.later(_STREAM_S, decode, Finished(chunk.request_id, 1, _MAX_TOKENS, 0))

    def report_cache(self, incarnation: int, chunk: Chunk, hashes: bytes) -> None:
        first, last = chunk.start // _BLOCK_SIZE, (chunk.start + chunk.length) // _BLOCK_SIZE
        cached, evicted = self.cached[incarnation], b""
        cached.append(hashes[first * HASH_BYTES : last * HASH_BYTES])
        if len(cached) > _CACHED_BLOCKS * _BLOCK_SIZE // _STEP_TOKENS:
            evicted = cached.popleft()
        self.handle(Received(incarnation, CacheEvents(cached[-1], evicted)))


def scale_table(costs: list[Cost], tenants: int, waiting: int) -> Table:
    title = f"{tenants:,} tenants, {waiting:,} requests waiting, {PER_S:g} requests/s for each pair of workers"
    figures = ("CPU µs a request", "x one pair", "events a request", "slowest event, ms")
    table = Table(title, "limited by", "workers", *figures, keys=2)
    first = {cost.limited_by: cost.cpu_us for cost in costs if cost.workers == 1}
    for cost in costs:
        ratio = cost.cpu_us / first[cost.limited_by]
        row = (f"{cost.cpu_us:.0f}", f"{ratio:.2f}", f"{cost.events:.1f}", f"{cost.event_ms_max:.1f} {cost.slowest}")
        table.row(cost.limited_by, f"{cost.workers} + {cost.workers}", *row)
    return table


def measure(pairs: int, tenants: int, waiting: int, served: int, limited_by: str) -> Cost:
    """`served` requests, after as many that fill the workers' caches and streams."""
    cluster = Cluster(pairs, tenants, limited_by)
    for _ in range(waiting):
        cluster.submit()
    warm = max(served // 4, int(2 * pairs * PER_S * _STREAM_S))
    cluster.run(warm, refill=True)
    cluster.cpu_ns = cluster.events = 0
    cluster.slowest.clear()
    began = cluster.now
    gc.collect()
    gc.freeze()
    gc.disable()  # what the collector takes is measured apart
    try:
        cluster.run(warm + served, refill=True)
    finally:
        gc.enable()
        gc.unfreeze()
    [(kind, slowest_ns)] = cluster.slowest.most_common(1)
    return Cost(
        pairs,
        limited_by,
        cluster.cpu_ns / 1000 / served,
        slowest_ns / 1e6,
        kind,
        cluster.events / served,
        cluster.now - began,
    )
