"""`python -m benchmarks coordinator`: what a decision costs, in CPU time of the deciding thread.

- the fair queue alone: taking the next chunk (and its request out) and adding a request, at a constant backlog; with deadlines
  as the core sets them (nearly in order of arrival) and, for the worst case inside a tenant, at random;
- the whole core: one request's life of four chunks, from `Submit` to `Finished`, seven messages in and seven out;
- memory of one waiting request, its message included;
- the whole core with many workers against one pair: see `coordinator_scale`.

The time for reading the clock is subtracted.

The floor, for one thread of CPython at about 50 ns per simple operation: a pop takes the first entries of two rings (of
organisations and of users) and of one tenant, and puts the first two back: about 60 operations, so 3 µs if all data is in the
core's cache. If 10,000 tenants wait, it is not: each visit reads its organisation, user, entry and the entry's neighbours from
memory, some 15-20 cache lines at 0.1-0.2 µs each. A life is seven messages with about 300 operations each.

CPU time also depends on other work on the core: beside a busy hyperthread, or at a low clock, the same instructions take twice
as long. So a plain loop is timed in between. Compare figures of different hours or machines by their ratio to it.
"""

import gc
import random
import resource
import time
from dataclasses import asdict
from itertools import count, product
from statistics import fmean, quantiles
from typing import Any

from benchmarks.coordinator_scale import LIMITS, TimedCore, clock_ns, measure, scale_table
from benchmarks.settings import CoordinatorBenchSettings
from coordinator.events import Limits, PeerUp, Received, Send
from lab.cluster.cluster import hello
from launcher import tables
from launcher.reports import console_for, write_json
from proto.codec import decode, encode
from proto.messages import Chunk, Finished, HandedOver, Role, Step, StepDone, Submit
from proto.parts import Capacity
from proto.sampling import Sampling
from scheduler.fairness.fair_queue import FairQueue, Terms

_TENANTS = (100, 1_000, 10_000)
_DEADLINES = ("core's own", "random")
_PER_S = 3_000.0  # requests that arrive
_SAMPLES = 20_000
_LIVES = 9_000
"""More than the number of ended requests that the core remembers, so that forgetting them is measured too."""
_CHUNKS = 4
_STEP_TOKENS = 256
_KEY = -1


def run(settings: CoordinatorBenchSettings) -> int:
    """`python -m benchmarks coordinator`."""
    console = console_for(settings)
    with console.status("measuring") as status:
        request_bytes = _memory(min(settings.requests, 200_000))
        queue: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in _DEADLINES}
        for kind, tenants in product(_DEADLINES, _TENANTS):
            status.update(f"fair queue of {settings.requests:,} requests, {tenants:,} tenants, {kind} deadlines")
            queue[kind][tenants] = _fair_queue(tenants, settings.requests, kind)
        status.update("whole core")
        life_us, loop_ns = _lives()
        scale = []
        for limited_by, pairs in product(LIMITS, sorted({1, settings.workers} if settings.workers else ())):
            status.update(f"{pairs} + {pairs} workers, limited by {limited_by}")
            scale.append(measure(pairs, settings.tenants, settings.requests, settings.served, limited_by))
    _queue_table(queue, settings.requests).show(console)
    console.print(
        f"A request's life of {_CHUNKS} chunks in the core: {life_us:.0f} µs, so {1e6 / life_us:,.0f} requests/s"
    )
    console.print(
        f"A plain loop beside it: {loop_ns:.1f} ns an iteration, of which a life costs {1e3 * life_us / loop_ns:,.0f}"
    )
    console.print(f"A waiting request: {request_bytes:.0f} bytes, its message included")
    if scale:
        scale_table(scale, settings.tenants, settings.requests).show(console)
    write_json(
        settings,
        {
            "fair_queue_us": queue,
            "life_us": life_us,
            "loop_ns": loop_ns,
            "request_bytes": request_bytes,
            "scale": [asdict(cost) for cost in scale],
        },
    )
    return 0


def _queue_table(queue: dict[str, dict[int, dict[str, float]]], requests: int) -> tables.Table:
    title = f"Fair queue, {requests:,} requests waiting, µs of CPU"
    table = tables.Table(title, "deadlines", "tenants", "pop p50", "pop p99", "enqueue p50", "enqueue p99", keys=2)
    for kind, tenants in product(_DEADLINES, _TENANTS):
        table.row(kind, f"{tenants:,}", *(f"{figure:.1f}" for figure in queue[kind][tenants].values()))
    return table


def _fair_queue(tenants: int, requests: int, deadlines: str) -> dict[str, float]:
    rnd, arrivals, priority_class = random.Random(0), count(), Limits().priority_classes["standard"]

    def due(cost: int) -> float:
        """Returns a deadline as the core sets it, by arrival and the length of the prompt, or a random one, as if each request
        asked for its own."""
        chunks = -(-cost // _STEP_TOKENS)
        return (
            rnd.random()
            if deadlines == "random"
            else next(arrivals) / _PER_S + chunks * priority_class.ttft_s_per_chunk
        )

    queue = FairQueue[int](1024.0)
    paths = [("standard", f"o{tenant // 10}", f"u{tenant}") for tenant in range(tenants)]
    for _ in range(requests):
        cost = rnd.randint(1, 512)
        queue.push(cost, paths[rnd.randrange(tenants)], _KEY, due(cost), 1)
    pops, pushes, look_ns = [], [], clock_ns()
    with _Steady():
        for _ in range(_SAMPLES):
            cost, path = rnd.randint(1, 512), paths[rnd.randrange(tenants)]
            deadline = due(cost)
            begin = time.thread_time_ns()
            entry = queue.first((1, _KEY))
            assert entry is not None
            queue.take(entry, Terms(float(entry.item), True, _KEY), (1, _KEY))
            middle = time.thread_time_ns()
            queue.push(cost, path, _KEY, deadline, 1)
            pops.append((middle - begin - look_ns) / 1000)
            pushes.append((time.thread_time_ns() - middle - look_ns) / 1000)
    pop, push = quantiles(pops, n=100), quantiles(pushes, n=100)
    return {"pop_p50": pop[49], "pop_p99": pop[98], "enqueue_p50": push[49], "enqueue_p99": push[98]}


class _Steady:
    """Keeps the garbage collector away from objects that were there before the measurement."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()


class _World:
    """A core with one pair of workers that has room for everything. There is no virtual cluster: nothing else is computed
    between two events, so that the core's data stays in the processor's caches."""

    def __init__(self, steps_in_flight: int = 2) -> None:
        many = 10**7
        self.core = TimedCore(
            Limits(
                queue_requests_max=many,
                queue_tokens_max=many * 4096,
                tenant_queue_max=many,
                step_tokens=_STEP_TOKENS,
                steps_in_flight=steps_in_flight,
            )
        )
        self.now = 0.0
        self.steps: list[Step] = []
        capacity = Capacity(10**6, 16, 10**4, 100_000)
        for incarnation, role in ((1, Role.GATEWAY), (2, Role.PREFILL), (3, Role.DECODE)):
            has = None if role is Role.GATEWAY else capacity
            self.core.handle(PeerUp(incarnation, hello(role, incarnation, has)), self.now)

    def receive(self, incarnation: int, message: Any, blob: bytes = b"") -> None:
        self.now += 0.0001
        actions = self.core.handle(Received(incarnation, message, blob), self.now)
        self.steps += [
            action.message for action in actions if isinstance(action, Send) and isinstance(action.message, Step)
        ]


def _submit(number: int, prompt_tokens: int) -> Submit:
    tenant = f"org{number % 1000 // 10}/user{number % 1000}"
    return Submit(f"req-{number:08d}", 1, "m", prompt_tokens, Sampling(max_tokens=64), tenant=tenant)


def _loop_ns() -> float:
    """Returns the nanoseconds of CPU for one iteration of a loop that needs no memory: the present speed of this core."""
    total, times = 0, 5_000
    begin = time.thread_time_ns()
    for number in range(times):
        total += number & 3
    return (time.thread_time_ns() - begin) / times


def _lives() -> tuple[float, float]:
    """Returns the core's microseconds per request while a thousand requests of a thousand tenants wait, and `_loop_ns` at that
    time."""
    world = _World()
    tokens = _CHUNKS * _STEP_TOKENS
    computed: dict[str, int] = {}
    for number in range(1000):
        world.receive(1, _submit(number, tokens), bytes(4 * tokens))
    ended = 0
    world.core.reset()
    loops_ns: list[float] = []
    with _Steady():
        for number in range(1000, 1000 + _LIVES):
            if number % 30 == 0:
                loops_ns.append(_loop_ns())
            world.receive(1, _submit(number, tokens), bytes(4 * tokens))
            for _ in range(_CHUNKS):
                ended += _compute(world, world.steps.pop(0), computed, tokens)
    return world.core.cpu_ns / 1000 / ended, fmean(loops_ns)


def _compute(world: _World, step: Step, computed: dict[str, int], prompt_tokens: int) -> int:
    """Ends one step; returns the number of requests that ended with it."""
    world.receive(2, StepDone(step.step_id, step.chunks, 20.0, 0))
    ended = 0
    for chunk in step.chunks:
        computed[chunk.request_id] = computed.get(chunk.request_id, 0) + chunk.length
        if computed[chunk.request_id] == prompt_tokens:
            _end(world, chunk)
            ended += 1
    return ended


def _end(world: _World, last: Chunk) -> None:
    world.receive(2, HandedOver(last.request_id, last.attempt, 1, 1.0))
    world.receive(3, Finished(last.request_id, last.attempt, 64, 0))


def _memory(requests: int) -> float:
    """Returns the bytes of this process per waiting request with a one-token prompt, as decoded from the wire."""
    world = _World(steps_in_flight=0)
    before = 0
    warm = requests // 10  # fills the tables of tenants and the allocator
    for number in range(warm + requests):
        if number == warm:
            gc.collect()
            before = _peak_bytes()
        message, blob = decode([encode(_submit(number, 1)), bytes(4)])
        world.receive(1, message, blob)
    return (_peak_bytes() - before) / requests


def _peak_bytes() -> int:
    """Returns the peak memory of this process. That is the present use too, as long as it only grows."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
