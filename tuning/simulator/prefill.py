"""A prefill worker, or the prefill side of a mixed one: the chunks of its next step, by the coordinator's rules."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from proto.limits import MAX_CHUNKS_PER_STEP
from scheduler.placement.steps import BEGUN_MAX
from scheduler.step_times import StepLimits, StepPace
from scheduler.waiting.queue_keys import bound_key, is_class
from tuning.profile import PrefillCost, ProfileCapacity
from tuning.simulator.batch import SimulatedBatch
from tuning.simulator.job import SimulatedRequest
from tuning.simulator.kept import KeptAnswers
from tuning.simulator.order import FairOrder


class SimulatedStep(NamedTuple):
    chunks: list[tuple[SimulatedRequest, int, int]]  # (job, first token, tokens)
    tokens: int
    took_s: float  # alone on its cores


class SimulatedPrefillWorker:
    """A prefill worker as the coordinator counts it."""

    def __init__(
        self, number: int, capacity: ProfileCapacity, limits: StepLimits, mixed_with: SimulatedBatch | None
    ) -> None:
        self.number, self.batch = number, mixed_with
        self.pace = StepPace(limits)
        self.key = number + 1  # in the queue, of what is placed here
        self.bound_key = bound_key(number + 1)  # in the queue, of what waits for this worker, which has it cached
        self.free_blocks, self.free_seqs = capacity.kv_blocks, capacity.seqs_max
        self._kv_blocks = capacity.kv_blocks
        self.block_size = capacity.block_size
        self.steps: deque[SimulatedStep] = deque()  # in flight; the first one runs
        self.tokens_in_flight = self.tokens_forwarded = self.undispatched = 0
        self.placed: dict[int, SimulatedRequest] = {}  # jobs with chunks to dispatch, by number
        self.begun: SimulatedRequest | None = None
        self.stuck: dict[int, SimulatedRequest] = {}  # queue keys whose first job has no room here
        self.running = False
        self.left_s = 0.0  # of the present step at `since_s`, if it ran alone
        self.since_s = self.began_s = 0.0
        self.free_s = self.after_s = 0.0  # next step may begin; how long the present one waited for that
        self.version = 0
        self.busy_s = 0.0
        self.link_free_s = 0.0
        self.link_busy_s = 0.0
        self.cache: OrderedDict[int, None] = OrderedDict()  # prompt blocks, least recently used first
        self.kept = mixed_with.kept if mixed_with is not None else KeptAnswers()

    @property
    def fullness(self) -> float:
        return 1 - self.free_blocks / self._kv_blocks

    @property
    def kv_tokens(self) -> int:
        return self._kv_blocks * self.block_size

    @property
    def idle_tokens(self) -> int:
        """Returns the tokens of room that no running request holds, on both halves of a mixed worker."""
        return self.free_blocks * self.block_size + (self.batch.idle_tokens if self.batch is not None else 0)

    def send(self, tokens: int, now: float, token_s: float) -> None:
        """Sends the KV of these tokens after the step; prompts are sent one after the other."""
        took_s = tokens * token_s
        self.link_free_s = max(self.link_free_s, now) + took_s
        self.link_busy_s += took_s

    def blocks(self, job: SimulatedRequest) -> int:
        return -(-job.prompt // self.block_size)

    def fits(self, job: SimulatedRequest) -> bool:
        return self.free_seqs > 0 and self.blocks(job) <= self.free_blocks

    def hold(self, job: SimulatedRequest) -> None:
        self.free_seqs -= 1
        self.free_blocks -= self.blocks(job)
        self.placed[job.number] = job
        self.undispatched += job.prompt - job.cached

    def release_blocks(self, job: SimulatedRequest) -> None:
        """Frees the blocks of a request whose KV is on the decode worker."""
        self.free_seqs += 1
        self.free_blocks += self.blocks(job)
        self.stuck.clear()


class StepRoom(Protocol):
    """The calls that `compose` makes to the cluster."""

    closed: dict[int, SimulatedRequest]
    classes: dict[int, int]

    def place(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> bool:
        """Reserves room for the job on this worker and on a decode worker. Returns False if it cannot run here now, or should
        run elsewhere: then its key is closed, stuck on the worker, or changed."""


def compose(
    worker: SimulatedPrefillWorker, order: FairOrder, cluster: StepRoom, cost: PrefillCost
) -> SimulatedStep | None:
    """The next step, as by `scheduler.placement.steps.compose`; None if there is nothing that the worker can do."""
    chunks: list[tuple[SimulatedRequest, int, int]] = []
    size = worker.block_size
    left, pairs = max(worker.pace.budget, size), 0.0
    begun, worker.begun = worker.begun, None
    if begun is not None and _may_go_on(begun, left, worker, order, cluster):
        tokens = _fitting(begun, left, size)
        order.go_on(begun, tokens, begun.dispatched + tokens == begun.prompt)
        pairs += _add(begun, tokens, worker, chunks)
        left -= tokens
    while left >= size and len(chunks) < MAX_CHUNKS_PER_STEP:
        keys = open_keys(worker, cluster)
        job = order.first(keys)
        if job is None:
            break
        if job.prefill is None and not cluster.place(job, worker):
            continue
        tokens = _fitting(job, left, size)
        order.take(job, keys, tokens, job.dispatched + tokens == job.prompt, worker.key)
        pairs += _add(job, tokens, worker, chunks)
        left -= tokens
    if not chunks:
        return None
    total = 0
    for _, _, tokens in chunks:
        total += tokens
    worker.tokens_in_flight += total
    return SimulatedStep(chunks, total, cost.step_ms(total, pairs) / 1000)


def open_keys(worker: SimulatedPrefillWorker, cluster: StepRoom) -> Sequence[int]:
    if worker.free_seqs <= 0 or not cluster.classes:
        return (worker.key,)
    closed, stuck, own = cluster.closed, worker.stuck, worker.bound_key
    return [
        worker.key,
        *(k for k in cluster.classes if k not in closed and k not in stuck and (is_class(k) or k == own)),
    ]


def _fitting(job: SimulatedRequest, left: int, block_size: int) -> int:
    remaining = job.prompt - job.dispatched
    return remaining if remaining <= left else left - left % block_size


def _add(
    job: SimulatedRequest, tokens: int, worker: SimulatedPrefillWorker, chunks: list[tuple[SimulatedRequest, int, int]]
) -> float:
    """Returns the pairs of tokens that attend to each other."""
    start = job.dispatched
    chunks.append((job, start, tokens))
    job.dispatched = start + tokens
    worker.undispatched -= tokens
    if job.entry is None:
        worker.placed.pop(job.number, None)
    else:
        worker.begun = job if len(worker.placed) > BEGUN_MAX else None
    return tokens * (start + tokens / 2)


def _may_go_on(
    begun: SimulatedRequest, left: int, worker: SimulatedPrefillWorker, order: FairOrder, cluster: StepRoom
) -> bool:
    if begun.entry is None or worker.placed.get(begun.number) is not begun:
        return False
    keys = open_keys(worker, cluster)
    if order.has_late(keys):
        return False
    if begun.prompt - begun.dispatched <= left:
        return True
    following = order.first(keys)
    if following is None or not order.same_organisation(begun, following):
        return False
    return following.path != begun.path or following.entry.due >= begun.entry.due
