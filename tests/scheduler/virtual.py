"""Virtual workers around the scheduler alone, in virtual time: no coordinator, no messages on their way."""

from collections import Counter
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from proto.errors import Interrupt
from proto.messages import Role, StepDone, Submit
from scheduler.decisions import Decision, Dispatched, Interruption, Withdrawn
from scheduler.lifecycle import RequestState, Trigger
from scheduler.limits import SchedulerLimits
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.workers.worker import worker_of
from tests.coordinator.world import worker_hello

PREFILL_TOKENS_PER_S = 10_000.0
TOKEN_S = 0.02


class Ending(NamedTuple):
    """An attempt emits its last token."""

    request: Request
    attempt: int


class VirtualWorkers:
    """Each request emits all of its tokens. An interrupted request comes back at once, and begins anew."""

    def __init__(self, prefill: int, decode: int, limits: SchedulerLimits | None = None, **capacity: int) -> None:
        self.scheduler, self.now = Scheduler(limits or SchedulerLimits()), 0.0
        self.finished: list[Request] = []
        self.served: Counter[str] = Counter()
        """Prompt tokens computed, by tenant."""
        self._due: list[tuple[float, int, Dispatched | Submit | Ending]] = []
        self._made = 0
        for incarnation in (*range(10, 10 + prefill), *range(100, 100 + decode)):
            role = Role.PREFILL if incarnation < 100 else Role.DECODE
            hello = worker_hello(role, incarnation, **capacity)  # type: ignore[arg-type]
            self.scheduler.worker_up(worker_of(hello), 0.0)
        self.scheduler.cluster.refresh_eligibility("m", 0.0)

    def submit(self, submit: Submit, at: float) -> None:
        self._at(at, submit)

    def lose(self, incarnation: int) -> None:
        """Lose a worker. Its requests go on elsewhere."""
        cluster = self.scheduler.cluster
        worker = cluster.workers[incarnation]
        lost = [request for key in worker.allocations if (request := cluster.current(*key)) is not None]
        self.scheduler.worker_down(worker, self.now)
        for request in lost:
            cluster.interrupt(request, Interrupt.DECODE_LOST, "killed", self.now)
        cluster.refresh_eligibility("m", self.now)
        self._carry_out(self.scheduler.decide(self.now))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, due = heappop(self._due)
            match due:
                case Submit():
                    request = Request(due.request_id, 1, due, b"", self.now, self.now, ("standard", due.tenant, ""))
                    self.scheduler.cluster.set_targets(request)
                    self.scheduler.admit(request, self.now)
                    self.scheduler.submit(request, self.now)
                case Dispatched():
                    self._step_done(due)
                case Ending(request, attempt):
                    self._finish(request, attempt)
            self._carry_out(self.scheduler.decide(self.now))
        self.now = until

    def _at(self, at: float, due: Dispatched | Submit | Ending) -> None:
        self._made += 1
        heappush(self._due, (at, self._made, due))

    def _carry_out(self, decisions: list[Decision]) -> None:
        cluster = self.scheduler.cluster
        for decision in decisions:
            match decision:
                case Dispatched(_, step, _, _):
                    tokens = sum(chunk.length for chunk in step.chunks)
                    self._at(self.now + tokens / PREFILL_TOKENS_PER_S, decision)
                case Withdrawn(key):
                    for incarnation in list(cluster.where.get(key, ())):
                        cluster.release(cluster.workers[incarnation], key)
                case Interruption(request):
                    request.renew(msgspec.structs.replace(request.submit, attempt=request.attempt + 1), b"")
                    request.fire(Trigger.RESUBMIT, self.now)
                    self.scheduler.submit(request, self.now)
                    self._carry_out(self.scheduler.decide(self.now))

    def _step_done(self, dispatched: Dispatched) -> None:
        worker, step = dispatched.worker, dispatched.step
        if worker.incarnation not in self.scheduler.cluster.workers:
            return
        tokens = sum(chunk.length for chunk in step.chunks)
        done = StepDone(step.step_id, step.chunks, 1000 * tokens / PREFILL_TOKENS_PER_S, 0)
        ended = self.scheduler.step_done(worker, done, self.now)
        assert ended is not None
        for request in ended.prompts_done:
            self.served[request.submit.tenant] += request.submit.prompt_tokens
            self.scheduler.cluster.release(worker, request.key)
            self.scheduler.handed_over(request, 1.0, self.now)
            self._at(self.now + TOKEN_S * request.submit.sampling.max_tokens, Ending(request, request.attempt))

    def _finish(self, request: Request, attempt: int) -> None:
        if request.attempt != attempt or request.state is not RequestState.DECODING:
            return
        decode, tokens = self.scheduler.cluster.workers[request.decode_incarnation], request.submit.sampling.max_tokens
        self.scheduler.cluster.release(decode, request.key)
        self.scheduler.finished(request, decode, tokens, self.now)
        self.scheduler.cluster.end(request, Trigger.FINISH, tokens, self.now)
        self.finished.append(request)
