"""Plays a workload on the virtual cluster and keeps a record of every request. Pure: virtual time only."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from coordinator.events import Configured, PeerDown, PeerUp
from engine.kv.split import prefill_blocks
from lab.cluster.cluster import FIRST_STARTED, OBSERVER, VirtualCluster, hello
from lab.cluster.decode import ClusterDecodeWorker
from lab.cluster.prefill import ClusterPrefillWorker
from lab.cluster.surroundings import ClientRequest, ClusterEngine, Timing
from lab.cluster.workload import LoadRequest, LoadStepTimes, Loop, PlannedFailure, WorkerSpec, Workload
from proto.drain import DrainRequest
from proto.errors import CrossdockError
from proto.messages import Hello, Role
from proto.parts import Capacity
from scheduler.lifecycle import RequestState

RETRY_JITTER = 0.1  # share by which clients come again later than told, at most
LOOK_EVERY_S = 0.25
WINDOW_S = 20.0  # of figures by window
RESTART_S = 5.0  # until a worker that a request has ended is started again
UNSERVED_WAIT_S = 1.0
"""A client in a closed loop waits at least this long after a request that did not finish, as `Loop` says. Otherwise it would
send requests without end at one virtual moment."""
REQUESTS_MAX = 1_000_000  # of all kinds, repeated ones included


class TooManyRequests(CrossdockError):
    """The clients of the workload have sent more than `REQUESTS_MAX`."""


@dataclass(eq=False)
class LoadOutcome:
    """The end of one request, over all its tries."""

    ask: LoadRequest
    came_s: float
    number: int = 0
    """Its place among all requests. It makes its prompt differ from those of others."""
    rejections: int = 0
    state: RequestState | None = None  # None: running at the end of the run
    reason: str = ""
    ttft_s: float | None = None  # since it first came, waits between tries included
    tpot_s: float | None = None
    interruptions: int = 0
    computed_tokens: int = 0  # of the prompt, over all tries and attempts
    cached_tokens: int = 0  # of the prompt, in the last attempt
    recomputed_tokens: int = 0  # of the prompt, in attempts after the first
    seen: Counter[int] = field(default_factory=Counter)  # decode's looks at it, by window, up to the last arrival

    @property
    def is_good(self) -> bool:
        goal = self.ask.goal
        if self.state is not RequestState.FINISHED or self.ttft_s is None:
            return False
        in_time = not goal.ttft_ms or 1000 * self.ttft_s <= goal.ttft_ms
        return in_time and (not goal.tpot_ms or 1000 * (self.tpot_s or 0.0) <= goal.tpot_ms)


@dataclass
class Played:
    workload: Workload
    outcomes: list[LoadOutcome] = field(default_factory=list)
    computed_tokens: int = 0  # on all prefill workers, for unfinished requests too
    kv_in_use: dict[int, list[float]] = field(default_factory=dict)  # share of all decode workers' blocks, by window
    streams_seen: dict[str, Counter[int]] = field(default_factory=dict)  # by decode worker and window, summed
    deaths: int = 0
    flips: int = 0


def play(workload: Workload, progress: Callable[[float], None] = lambda now_s: None) -> Played:
    """Plays the workload. Calls `progress` with the virtual time several times in each virtual second. Raises
    `TooManyRequests`."""
    return _Player(workload).play(progress)


class _Player:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        timing = Timing(hand_over_s=workload.hand_over_s, report_s=workload.report_s)
        self._cluster = VirtualCluster(workload.limits, timing, block_size=workload.block_size, seed=workload.seed)
        self._cluster.resume_delay_s = 0.05
        self._cluster.on_end = self._ended
        self._cluster.on_death = self._died
        self._cluster.start_flipped = self._start_flipped
        self._cluster.post(Configured(workload.tenants, 0.0))
        self._played = Played(workload)
        self._outcomes: dict[str, LoadOutcome] = {}  # not ended, by the id of the current try
        self._tries: dict[str, LoadOutcome] = {}  # by the id of any try
        self._loops: dict[str, tuple[Loop, int]] = {}  # (client, its next request), by the id of the present try
        self._running: dict[str, tuple[list[int], ClusterEngine]] = {}  # (incarnations, engine)
        self._names: dict[int, str] = {}
        self._all_prefill: list[ClusterPrefillWorker] = []
        self._numbers = iter(range(1 << 62))
        self._awaited = 0  # requests not ended for good, or waiting to come again

    def play(self, progress: Callable[[float], None]) -> Played:
        workload, cluster = self._workload, self._cluster
        for worker in workload.workers:
            self._start(worker)
        for at_s, ask in workload.arrivals:
            cluster.at(at_s, self._come, ask)
        for loop in workload.loops:
            cluster.at(loop.from_s, self._go_round, loop, 0)
        for failure in workload.failures:
            cluster.at(failure.at_s, self._fail, failure)
        cluster.at(LOOK_EVERY_S, self._look, progress)
        end_s = workload.duration_s + workload.settle_s
        while cluster.due_s <= end_s and (cluster.now < workload.duration_s or self._awaited):
            cluster.step()
        self._sum_up()
        return self._played

    def _look(self, progress: Callable[[float], None]) -> None:
        cluster = self._cluster
        progress(min(cluster.now, self._workload.duration_s))
        if cluster.now > self._workload.duration_s:
            return
        window, held, blocks = int(cluster.now / WINDOW_S), 0, 0
        for incarnation, decode in cluster.decode.items():
            seen = self._played.streams_seen.setdefault(self._names[incarnation], Counter())
            seen[window] += len(decode.table.batch.running)
            for running in decode.table.batch.running:
                self._tries[running.key[0]].seen[window] += 1
            held += decode.allocator.held_count
            blocks += decode.allocator.total
        self._played.kv_in_use.setdefault(window, []).append(held / max(blocks, 1))
        cluster.at(cluster.now + LOOK_EVERY_S, self._look, progress)

    # --- requests -------------------------------------------------------------------------------------------------------

    def _go_round(self, loop: Loop, number: int) -> None:
        if self._cluster.now < loop.until_s and not (loop.once and number >= len(loop.asks)):
            name = self._come(loop.asks[number % len(loop.asks)])
            self._loops[name] = loop, number + 1

    def _come(self, ask: LoadRequest) -> str:
        outcome = LoadOutcome(ask, self._cluster.now, len(self._played.outcomes))
        self._played.outcomes.append(outcome)
        self._awaited += 1
        return self._try(outcome)

    def _try(self, outcome: LoadOutcome) -> str:
        if len(self._tries) >= REQUESTS_MAX:
            raise TooManyRequests(f"clients have sent {REQUESTS_MAX:,} requests by second {self._cluster.now:.1f}")
        ask, name = outcome.ask, f"r{next(self._numbers)}"
        self._outcomes[name] = self._tries[name] = outcome
        self._cluster.submit(
            name,
            f"{ask.tenant}/{ask.user}" if ask.user else ask.tenant,
            ask.prompt_tokens,
            ask.max_tokens,
            output_tokens=(min(ask.output_tokens, ask.max_tokens),),
            prompt=outcome.number.to_bytes(4, "little") + bytes(4 * (ask.prompt_tokens - 1)),
            deadline_ms=ask.deadline_ms,
            priority_class=ask.priority_class,
            block_hashes=ask.block_hashes,
            answer_hashes=ask.answer_hashes,
            deadly_at=ask.deadly_at,
        )
        return name

    def _ended(self, request: ClientRequest) -> None:
        name = request.submit.request_id
        outcome = self._outcomes.pop(name)
        loop = self._loops.pop(name, None)
        outcome.interruptions += request.interruptions
        outcome.recomputed_tokens += request.recomputed_tokens
        outcome.cached_tokens = request.cached_tokens
        rejected, cluster = request.rejected, self._cluster
        if rejected is not None:
            outcome.rejections, outcome.reason = outcome.rejections + 1, rejected.reason.value
            if rejected.retry_after_s and outcome.rejections <= outcome.ask.retries:
                told_s = outcome.ask.retry_s or rejected.retry_after_s
                wait_s = told_s * (1 + RETRY_JITTER * cluster.random.random())
                cluster.at(cluster.now + wait_s, self._retry, outcome, loop)
                return
        outcome.state = request.state
        self._awaited -= 1
        first_s = cluster.ttft_s.get(name)
        if first_s is not None:
            outcome.ttft_s = request.submitted_s + first_s - outcome.came_s
            later = request.emitted_tokens[0] - 1
            outcome.tpot_s = (cluster.now - request.submitted_s - first_s) / later if later > 0 else 0.0
        if loop is not None:
            told_s = rejected.retry_after_s if rejected is not None else 0.0
            least_s = 0.0 if outcome.state is RequestState.FINISHED else max(told_s, UNSERVED_WAIT_S)
            turns, following = loop
            is_turn = turns.once and following < len(turns.asks)
            think_s = turns.asks[following].think_s if is_turn else turns.think_s
            cluster.at(cluster.now + max(think_s, least_s), self._go_round, *loop)

    def _retry(self, outcome: LoadOutcome, loop: tuple[Loop, int] | None) -> None:
        name = self._try(outcome)
        if loop is not None:
            self._loops[name] = loop

    # --- workers --------------------------------------------------------------------------------------------------------

    def _start(self, spec: WorkerSpec) -> None:
        engine, started = ClusterEngine(self._cluster, spec.times), list[int]()
        for name in spec.roles:
            role = Role(name)
            incarnation = FIRST_STARTED + next(self._numbers)
            process = spec.name if len(spec.roles) > 1 else ""
            own = hello(role, incarnation, _part(spec, role))
            self._register(msgspec.structs.replace(own, name=spec.name, process=process), engine)
            started.append(incarnation)
        self._running[spec.name] = started, engine

    def _register(self, worker: Hello, engine: ClusterEngine) -> None:
        self._cluster.start(worker, engine)
        self._names[worker.incarnation] = worker.name
        if worker.role is Role.PREFILL:
            self._all_prefill.append(self._cluster.prefill[worker.incarnation])

    def _start_flipped(self, name: str, role: Role, before: int) -> None:
        if self._up(name):
            return  # it has been started again meanwhile
        spec = self._workload.first_with(role)
        incarnation, engine = FIRST_STARTED + next(self._numbers), ClusterEngine(self._cluster, spec.times)
        own = hello(role, incarnation, _part(spec, role))
        self._register(msgspec.structs.replace(own, name=name, flipped_from=before), engine)
        self._running[name] = [incarnation], engine
        self._played.flips += 1

    def _up(self, name: str) -> list[ClusterPrefillWorker | ClusterDecodeWorker]:
        """Returns the roles of a worker; empty if it is lost."""
        prefill, decode = self._cluster.prefill, self._cluster.decode
        found = [prefill.get(one) or decode.get(one) for one in self._running[name][0]]
        return [worker for worker in found if isinstance(worker, ClusterPrefillWorker | ClusterDecodeWorker)]

    def _lose(self, name: str) -> None:
        for incarnation in self._running[name][0] if self._up(name) else ():
            self._cluster.lose(incarnation)

    def _died(self, incarnation: int) -> None:
        name = self._names[incarnation]
        self._lose(name)
        self._played.deaths += 1
        self._cluster.at(self._cluster.now + RESTART_S, self._start_again, name)

    def _start_again(self, name: str) -> None:
        if not self._up(name):
            self._start(self._workload.by_name()[name])

    def _fail(self, failure: PlannedFailure) -> None:
        cluster = self._cluster
        match failure.kind:
            case "slow":
                self._slow(failure.worker, failure.factor)
            case "failing":
                self._running[failure.worker][1].fails_every = failure.every
            case "lost":
                self._lose(failure.worker)
            case "drained":
                cluster.post(PeerUp(OBSERVER, hello(Role.OBSERVER, OBSERVER)))
                cluster.receive(OBSERVER, DrainRequest(failure.worker, False, 0.0))
                cluster.post(PeerDown(OBSERVER, "said goodbye"))
            case "flipped":
                cluster.flip(failure.worker, Role(failure.role))
        if failure.for_s:
            cluster.at(cluster.now + failure.for_s, self._heal, failure)

    def _slow(self, name: str, factor: float) -> None:
        engine = self._running[name][1]
        assert isinstance(engine.timing, LoadStepTimes)
        engine.timing = replace(engine.timing, factor=factor)

    def _heal(self, failure: PlannedFailure) -> None:
        match failure.kind:
            case "slow":
                self._slow(failure.worker, 1.0)
            case "failing":
                self._running[failure.worker][1].fails_every = 0
            case "drained":
                self._lose(failure.worker)
            case "flipped":
                [before] = self._workload.by_name()[failure.worker].roles
                self._cluster.flip(failure.worker, Role(before))
        if failure.kind in ("lost", "drained"):
            self._start_again(failure.worker)

    # --- the end --------------------------------------------------------------------------------------------------------

    def _sum_up(self) -> None:
        by_request: dict[str, int] = {}
        for worker in self._all_prefill:
            self._played.computed_tokens += worker.computed_tokens
            for (name, _), tokens in worker.computed.items():
                by_request[name] = by_request.get(name, 0) + tokens
        for name, outcome in self._tries.items():
            outcome.computed_tokens += by_request.get(name, 0)


def _part(spec: WorkerSpec, role: Role) -> Capacity:
    """The capacity of one role of a worker."""
    whole = spec.capacity
    if len(spec.roles) == 1:
        return whole
    for_prompts = prefill_blocks(whole.kv_blocks, 0)
    blocks = for_prompts if role is Role.PREFILL else whole.kv_blocks - for_prompts
    return msgspec.structs.replace(whole, kv_blocks=blocks)
