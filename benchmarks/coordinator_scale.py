"""The cost of a request at the coordinator with many workers against few: the real core around a cluster in virtual time.

Each pair of workers serves the same number of requests a second, whatever the number of pairs. A backlog of many tenants
waits all the time. Prompts begin with one of some shared prefixes, workers report their caches, and decode workers report
progress. It measures the CPU time of `Core.handle` alone, per request and for the slowest event.

The case "prefill" has decode workers with room for all requests, so there is always something to place. The case "decode" has
room for three quarters of them, so requests wait for room, and every end of a stream lets one more in. Figures of single kinds
of events are of the same run: the time in which `Core.handle` handles one, and then decides what runs next.
"""

import gc
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median, quantiles

from coordinator.core import Core
from coordinator.events import Action, Event, Limits, Received
from lab.cluster.surroundings import ClientRequest, Timing
from launcher.tables import Table
from proto.limits import HASH_BYTES
from runtime.tenancy.priority_classes import PriorityClass
from tests.uniform_cluster import UniformCluster

LIMITS = ("prefill", "decode")
KINDS = ("Submit", "StepDone")  # events whose times are shown by themselves
PER_S = 20.0  # requests that one pair of workers serves
_PROMPT_TOKENS, _STEP_TOKENS, _BLOCK_SIZE = 512, 256, 16
_MAX_TOKENS, _STREAM_S = 128, 2.0
_PREFIXES, _PREFIX_BLOCKS = 500, 16
_CACHED_BLOCKS = 2_000  # blocks in the cache of a prefill worker


@dataclass(frozen=True)
class Cost:
    """The cost of a number of requests that were served."""

    workers: int
    limited_by: str
    cpu_us: float  # per request
    event_ms_max: float
    slowest: str  # the kind of the slowest event
    events: float  # per request
    virtual_s: float
    event_ms: dict[str, tuple[float, float]]  # median and 99th percentile of each kind in `KINDS`


class TimedCore(Core):
    """Counts its events and the CPU time of each, without the time for reading the clock."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self._clock_ns = clock_ns()
        self.reset()

    def reset(self) -> None:
        self.took_ns: defaultdict[str, list[int]] = defaultdict(list)  # the CPU time of each event, by its kind

    def handle(self, event: Event, now: float) -> list[Action]:
        began_ns = time.thread_time_ns()
        actions = super().handle(event, now)
        took_ns = time.thread_time_ns() - began_ns - self._clock_ns
        kind = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        self.took_ns[kind].append(took_ns)
        return actions

    @property
    def cpu_ns(self) -> int:
        return sum(map(sum, self.took_ns.values()))


class ScaledCluster:
    """A cluster of `pairs` pairs of workers, with clients that can keep the number of requests constant."""

    def __init__(self, pairs: int, tenants: int, limited_by: str, seed: int = 0) -> None:
        many = 10**9
        limits = Limits(
            queue_requests_max=many,
            queue_tokens_max=many,
            tenant_queue_max=many,
            queue_wait_s_max=float(many),
            step_tokens=_STEP_TOKENS,
            priority_classes={"standard": PriorityClass()},  # nothing is refused for its target
        )
        per_stream = -(-(_PROMPT_TOKENS + _MAX_TOKENS) // _BLOCK_SIZE)
        streams = PER_S * _STREAM_S * (4.0 if limited_by == "prefill" else 0.75)
        self.cluster = UniformCluster(
            limits,
            Timing(PER_S * _PROMPT_TOKENS, decode_step_s=_STREAM_S / _MAX_TOKENS),
            prefill=pairs,
            decode=pairs,
            prefill_blocks=_CACHED_BLOCKS,
            decode_blocks=int(per_stream * streams),
            block_size=_BLOCK_SIZE,
            max_seqs=1000,
            core=TimedCore,
        )
        self.cluster.on_end = self._ended
        self.finished = 0
        self._refill = False
        self._random = random.Random(seed)
        self._tenants = [f"o{number // 10}/u{number}" for number in range(tenants)]
        self._prefixes = [self._random.randbytes(_PREFIX_BLOCKS * HASH_BYTES) for _ in range(_PREFIXES)]

    def submit(self) -> None:
        prefix = self._random.choice(self._prefixes) if self._random.random() < 0.5 else b""
        rest = _PROMPT_TOKENS // _BLOCK_SIZE * HASH_BYTES - len(prefix)
        self.cluster.submit(
            f"r{len(self.cluster.requests)}",
            self._random.choice(self._tenants),
            _PROMPT_TOKENS,
            _MAX_TOKENS,
            block_hashes=prefix + self._random.randbytes(rest),
        )

    def run(self, until_finished: int, refill: bool) -> None:
        self._refill = refill
        while self.finished < until_finished:
            self.cluster.step()

    def _ended(self, request: ClientRequest) -> None:
        self.finished += 1
        if self._refill:
            self.submit()


def clock_ns() -> int:
    """Measures the cost of reading the clock: a system call, which adds 0.3 µs or more to each measurement."""
    gaps = []
    for _ in range(1_000):
        began_ns = time.thread_time_ns()
        gaps.append(time.thread_time_ns() - began_ns)
    return round(median(gaps))


def scale_table(costs: list[Cost], tenants: int, waiting: int) -> Table:
    title = f"{tenants:,} tenants, {waiting:,} requests waiting, {PER_S:g} requests/s for each pair of workers"
    percentiles = [f"{kind} {name}, ms" for kind in KINDS for name in ("p50", "p99")]
    figures = ("CPU µs a request", "x one pair", "events a request", *percentiles, "slowest event, ms")
    table = Table(title, "limited by", "workers", *figures, keys=2)
    first = {cost.limited_by: cost.cpu_us for cost in costs if cost.workers == 1}
    for cost in costs:
        ratio = cost.cpu_us / first[cost.limited_by]
        events = [f"{ms:.2f}" for kind in KINDS for ms in cost.event_ms[kind]]
        slowest = f"{cost.event_ms_max:.1f} {cost.slowest}"
        row = (f"{cost.cpu_us:.0f}", f"{ratio:.2f}", f"{cost.events:.1f}", *events, slowest)
        table.row(cost.limited_by, f"{cost.workers} + {cost.workers}", *row)
    return table


def measure(pairs: int, tenants: int, waiting: int, served: int, limited_by: str) -> Cost:
    """Measures `served` requests, after as many others that fill the workers' caches and streams."""
    scaled = ScaledCluster(pairs, tenants, limited_by)
    cluster, core = scaled.cluster, scaled.cluster.core
    assert isinstance(core, TimedCore)
    for _ in range(waiting):
        scaled.submit()
    warm = max(served // 4, int(2 * pairs * PER_S * _STREAM_S))
    scaled.run(warm, refill=True)
    core.reset()
    began_s = cluster.now
    gc.collect()
    gc.freeze()
    gc.disable()  # the collector's time is measured separately
    try:
        scaled.run(warm + served, refill=True)
    finally:
        gc.enable()
        gc.unfreeze()
    kind, took_ns = max(core.took_ns.items(), key=lambda one: max(one[1]))
    percentiles = {kind: quantiles(core.took_ns[kind], n=100) for kind in KINDS}
    return Cost(
        pairs,
        limited_by,
        core.cpu_ns / 1000 / served,
        max(took_ns) / 1e6,
        kind,
        sum(map(len, core.took_ns.values())) / served,
        cluster.now - began_s,
        {kind: (found[49] / 1e6, found[98] / 1e6) for kind, found in percentiles.items()},
    )
