"""The virtual workers: what the scheduler knows of each (`core`), and what it does meanwhile."""

from collections import deque
from heapq import heapify
from math import inf
from typing import NamedTuple

from lab.play.batch import VirtualBatch
from lab.play.request import PlayedRequest
from lab.profile import DecodeCost, PrefillCost
from proto.messages import Chunk, Step
from proto.progress import DecodeProgress, Joined
from scheduler.request import Request
from scheduler.workers.worker import DecodeWorker, PrefillWorker

SAME_TIME_S = 1e-7
HORIZON_STEPS = 32  # as `decode_worker.progress.WARN_STEPS`


class PlayedBatch(VirtualBatch):
    """The running batch of a decode worker, with the KV blocks that it holds."""

    def __init__(self, number: int, core: DecodeWorker, cost: DecodeCost) -> None:
        capacity = core.capacity
        super().__init__(number, cost)
        self.core = core
        self.newly_joined: list[Joined] = []
        self.reports_at = inf  # when the next report is due; infinite while nothing runs
        self.said_at = -inf
        self._said = (0, 0.0, 0.0)  # steps, their seconds and their tokens at the last report
        self._offsets = [0] * capacity.block_size
        """How many sequences have a length that is this number more than the steps, modulo the block size."""
        self._blocks = 0  # full blocks of all sequences at step 0

    def join(self, job: PlayedRequest, now: float) -> None:
        super().join(job, now)
        self._count(job.prompt + 1 - self.steps, 1)
        self.newly_joined.append(Joined(str(job.number), job.attempt, self.steps))

    def ended(self) -> list[PlayedRequest]:
        found = super().ended()
        for job in found:
            self._count(job.prompt + job.output - self.steps, -1)
        return found

    def leave(self, job: PlayedRequest, now: float) -> int:
        """Takes a sequence out before its end. Returns how many tokens it has emitted, the first one included; 0 if it has not
        joined."""
        self.sync(now)
        end = next((end for end, number, _ in self._ends if number == job.number), None)
        if end is None:
            return 0
        emitted = job.output - (end - self.steps)
        self._ends = [one for one in self._ends if one[1] != job.number]
        heapify(self._ends)
        self.sequences -= 1
        self.kv_tokens -= job.prompt + emitted
        self._count(job.prompt + emitted - self.steps, -1)
        return emitted

    def _count(self, offset: int, sign: int) -> None:
        size = len(self._offsets)
        self._offsets[offset % size] += sign
        self._blocks += sign * (offset // size)

    def held_blocks(self, steps: int) -> int:
        """The blocks of all sequences at this step, if none joins or ends until then."""
        size = len(self._offsets)
        return self._blocks + sum(
            count * -(-(offset + steps) // size) for offset, count in enumerate(self._offsets) if count
        )

    @property
    def has_plenty(self) -> bool:
        """Whether its pool holds all that it has at their full lengths, and three times as much again."""
        return 4 * self.core.admission.wholes <= self.core.capacity.kv_blocks

    def _short_blocks(self) -> int:
        """The blocks that are about to be missing, as `decode_worker.progress.shortage` counts them."""
        if self.has_plenty:
            return 0
        size, room = len(self._offsets), self.core.capacity.kv_blocks
        coming = self._coming_blocks() if len(self.core.allocations) > self.sequences else 0
        if self.held_blocks(self.steps + HORIZON_STEPS) + coming <= room:
            return 0
        ends = [(end, job) for end, _, job in sorted(self._ends) if end < self.steps + HORIZON_STEPS]
        most = freed = at = 0
        for step in range(self.steps, self.steps + HORIZON_STEPS + 1):
            while at < len(ends) and ends[at][0] < step:
                freed += -(-(ends[at][1].prompt + ends[at][1].output + step - ends[at][0]) // size)
                at += 1
            most = max(most, self.held_blocks(step) - freed)
        return max(most + coming - room, 0)

    def _coming_blocks(self) -> int:
        running = {str(number) for _, number, _ in self._ends}
        size = len(self._offsets)
        allocations = self.core.allocations.items()
        return sum(
            -(-one.demand.prompt_tokens // size) for key, one in allocations if one.demand and key[0] not in running
        )

    def report(self, now: float) -> DecodeProgress | None:
        """The report that is due; None if the present step has not ended."""
        self.sync(now)
        if self.begin_s > now + SAME_TIME_S:
            return None
        begun = self.steps + (self.sequences > 0)
        joined, self.newly_joined = tuple(self.newly_joined), []
        steps, busy_s, tokens = self._said
        self._said, self.said_at = (self.steps, self.busy_s, self.token_steps), now
        timed, sequences = self.steps - steps, int(self.token_steps - tokens)
        if not timed:
            return DecodeProgress(begun, 0, self._short_blocks(), joined)
        timed_ms = 1000 * (self.busy_s - busy_s)
        return DecodeProgress(
            begun, 0, self._short_blocks(), joined, (), timed, timed_ms, sequences, timed * self.kv_tokens
        )


class PlayedStep(NamedTuple):
    step: Step
    requests: tuple[Request, ...]
    tokens: int
    took_s: float  # alone on its cores


class PlayedPrefill:
    """A prefill worker, or the prefill half of a mixed one, with the steps that it is to compute."""

    def __init__(self, number: int, core: PrefillWorker, cost: PrefillCost, batch: PlayedBatch | None) -> None:
        """`batch`: of the mixed worker's other half."""
        self.number, self.core, self.batch, self._cost = number, core, batch, cost
        self.block_size = core.capacity.block_size
        self.steps: deque[PlayedStep] = deque()  # in flight; the first one runs
        self.tokens_forwarded = 0
        self.running = False
        self.left_s = 0.0  # of the present step at `since_s`, if it ran alone
        self.since_s = self.began_s = 0.0
        self.free_s = self.after_s = 0.0  # next step may begin; how long the present one waited for that
        self.version = 0
        self.busy_s = self.link_busy_s = self.link_free_s = 0.0
        self.fetched_s: dict[str, float] = {}  # when the KV is here that a request's first step needs, by request

    def send(self, tokens: int, now: float, token_s: float) -> None:
        """Sends the KV of these tokens after the step; prompts are sent one after the other."""
        took_s = tokens * token_s
        self.link_free_s = max(self.link_free_s, now) + took_s
        self.link_busy_s += took_s

    def fetched_in_s(self, now: float) -> float:
        """How long the first of its steps waits for KV."""
        if not self.fetched_s:
            return 0.0
        return max((self.fetched_s.pop(request.id, now) for request in self.steps[0].requests), default=now) - now

    def order(self, step: Step, requests: tuple[Request, ...]) -> None:
        tokens = sum(chunk.length for chunk in step.chunks)
        pairs = sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in step.chunks)
        self.steps.append(PlayedStep(step, requests, tokens, self._cost.step_ms(tokens, pairs) / 1000))


def computed(step: Step, requests: tuple[Request, ...]) -> tuple[Chunk, ...]:
    """The chunks that were computed: those of attempts that were not withdrawn meanwhile."""
    chunks = step.chunks
    for chunk, request in zip(chunks, requests, strict=True):
        if request.attempt != chunk.attempt or not request.attempt_progress.prefill_incarnation:
            return tuple(
                chunk
                for chunk, request in zip(chunks, requests, strict=True)
                if request.attempt == chunk.attempt and request.attempt_progress.prefill_incarnation
            )
    return chunks
