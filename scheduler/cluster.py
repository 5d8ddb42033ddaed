"""The requests and workers of all models, and the operations on them that the rules share. Pure.

A rule changes the cluster, and appends to `decisions` what the owner of the scheduler has to carry out.
"""

from collections import Counter
from collections.abc import Hashable, Iterator

from proto.errors import Interrupt
from scheduler.decisions import Decision, Interruption, Watch, Withdrawn
from scheduler.lifecycle import RequestState, Trigger
from scheduler.limits import SchedulerLimits
from scheduler.request import RETAINED, Request, RetainedAllocation
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Allocation, DecodeWorker, Where, Worker

STEPS_PER_EVENT = 128


class Spread:
    """Work that grows with the cluster or the queue, spread over events. A job is an iterator that does a little with each
    step. Each event does at most `STEPS_PER_EVENT` of them, and its owner asks to be called again at once while there are
    more."""

    def __init__(self) -> None:
        self.jobs: dict[Hashable, Iterator[None]] = {}  # oldest first

    def begin(self, key: Hashable, job: Iterator[None]) -> None:
        """Begin a job in place of an earlier one with this key."""
        self.jobs.pop(key, None)
        self.jobs[key] = job

    def go_on(self) -> None:
        steps = STEPS_PER_EVENT
        while self.jobs and steps:
            key, job = next(iter(self.jobs.items()))
            for _ in job:
                steps -= 1
                if not steps:
                    return
            del self.jobs[key]


STRETCH = 2.0  # a prompt may take so many times its own time, if its priority class wants the first token sooner


class Cluster:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.workers: dict[int, Worker] = {}
        self.where: Where = {}  # the workers that hold something for each attempt
        self.pools: dict[str, Pool] = {}
        """Pools by model id. A pool stays for a while when its workers go, so that its model stays known."""
        self.queues: dict[str, WaitQueue] = {}
        self.requests: dict[str, Request] = {}  # all requests that have not ended
        self.draining: dict[int, Worker] = {}  # workers on which nothing new is placed
        self.decisions: list[Decision] = []  # decisions that the owner has not carried out yet
        self.counters: Counter[str] = Counter()
        self.spread = Spread()
        self.watch: Watch | None = None
        """A callback that is told of each request that was considered for a step; None while serving."""

    def current(self, request_id: str, attempt: int) -> Request | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.submit.attempt == attempt else None

    # --- requests -------------------------------------------------------------------------------------------------------

    def set_targets(self, request: Request) -> None:
        """Set a request's targets from its priority class, as the tenants file is now."""
        priority_class = self.limits.priority_classes[request.path[0]]
        request.ttft_ms, request.tpot_ms = priority_class.ttft_ms or 0.0, priority_class.tpot_ms or 0.0
        pool = self.pools[request.submit.model]
        if request.ttft_ms and (tokens_per_s := pool.fastest_tokens_per_s()):
            request.ttft_ms = max(request.ttft_ms, STRETCH * 1000 * request.submit.prompt_tokens / tokens_per_s)
        pool.targets.came(request.tpot_ms, priority_class.weight)

    def withdraw(self, request: Request, now: float) -> None:
        """Take the attempt out of the queue or off its workers, and refund the estimate of its output to its tenant."""
        queue, pool = self.queues[request.submit.model], self.pools[request.submit.model]
        pool.end_trial(request)
        if pool.paused.pop(request.id, None) is not None:
            queue.resume(request)
        queue.line.count_uncomputed(request, 0)
        queue.projection.leave(request, now, done=True)
        queue.remove(request)
        queue.refund_output(request)
        if request.state is RequestState.QUEUED:
            pool.bindings.unbind(request)
            pool.wakeups.waits_no_more(request)
            if pool.room_for_large.request is request:
                queue.charge(request.path, pool.room_for_large.end().cost(now))
                pool.wakeups.look_anew()
            return
        progress = request.attempt_progress
        if progress.kept_room is not None:
            queue.charge(request.path, progress.kept_room.cost(now))
            progress.kept_room = None
        prefill = self.workers.get(request.prefill_incarnation)
        if prefill is not None:
            prefill.expect_no_more(request)
        if request.key in self.where:
            self.decisions.append(Withdrawn(request.key))

    def interrupt(self, request: Request, reason: Interrupt, why: str, now: float, *, tell: bool = True) -> None:
        """Interrupt a request's attempt. `tell`: its gateway is told now, so that it resubmits the request at once."""
        request.preempted += reason is Interrupt.PREEMPTED
        if reason is Interrupt.DRAINED:
            progress = request.attempt_progress
            progress.paid_tokens = max(progress.paid_tokens, request.dispatched_tokens)
        self.queues[request.submit.model].projection.leave(request, now, done=False)
        self.withdraw(request, now)
        request.fire(Trigger.INTERRUPT, now)
        self.decisions.append(Interruption(request, request.attempt, reason, why, tell))

    def end(self, request: Request, trigger: Trigger, output_tokens: int, now: float) -> None:
        """End a request, and forget it. `output_tokens`: of its answer, over all choices."""
        self.withdraw(request, now)
        self.drop_retained(request)
        request.fire(trigger, now)
        request.blob = b""  # rows and lists may know it for a while yet
        pool = self.pools[request.submit.model]
        request.end_turn(pool.sessions, output_tokens, now)
        del self.requests[request.id]
        pool.suspects.pop(request.id, None)

    # --- room on workers ------------------------------------------------------------------------------------------------

    def release(self, worker: Worker, key: tuple[str, int]) -> Allocation | None:
        """Free what an attempt has on a worker, since the worker has let go of it. Returns it; None if there was nothing."""
        allocation = worker.release(key)
        if allocation is None:
            return None
        self.pools[worker.hello.model].freed(worker)
        request = self.requests.get(key[0])
        if request is not None and request.attempt_progress.retained == (worker.incarnation, key[1]):
            self._keep_retained(request, worker, allocation)
        return allocation

    def retain_allocation(self, request: Request) -> None:
        """Keep the blocks on the decode worker for a request that was interrupted through no fault of that worker. When the
        worker releases the attempt, they pass to the request, so that no other takes them before the next attempt."""
        decode = self.workers.get(request.decode_incarnation)
        allocation = decode.allocations.get(request.key) if decode is not None else None
        if decode is not None and not decode.draining and allocation is not None and allocation.demand is not None:
            request.attempt_progress.retained = RetainedAllocation(request.decode_incarnation, request.attempt)
            self.pools[request.submit.model].retained[request.id] = request

    def drop_retained(self, request: Request) -> None:
        pool = self.pools[request.submit.model]
        if pool.retained.pop(request.id, None) is None:
            return
        retained, request.attempt_progress.retained = request.attempt_progress.retained, None
        worker = self.workers.get(retained.decode_incarnation) if retained is not None else None
        if worker is not None and worker.release((request.id, RETAINED)) is not None:
            pool.freed(worker)

    def drop_retained_on(self, worker: Worker) -> None:
        for request in list(self.pools[worker.hello.model].retained.values()):
            retained = request.attempt_progress.retained
            if retained is not None and retained.decode_incarnation == worker.incarnation:
                self.drop_retained(request)

    def _keep_retained(self, request: Request, worker: Worker, allocation: Allocation) -> None:
        """Pass the attempt's allocation to its request, unless it does not fit in full: the attempt may have shared blocks."""
        assert isinstance(worker, DecodeWorker) and allocation.demand is not None
        if worker.admission.fits(allocation.demand):
            worker.hold((request.id, RETAINED), allocation)
        else:
            self.drop_retained(request)

    # --- what may run where ---------------------------------------------------------------------------------------------

    def unbind_all(self, prefill: Worker) -> None:
        """Let requests that wait for this worker and its cached prefixes run anywhere again."""
        pool, queue = self.pools[prefill.hello.model], self.queues[prefill.hello.model]
        for request in list(prefill.bound.values()):
            pool.bindings.unbind(request)
            queue.unsettle(request)

    def unbind_without_pair(self, pool: Pool, now: float) -> None:
        """Let requests run anywhere again if their prefill worker may not send KV to any decode worker now."""
        for prefill in [pool.workers[incarnation] for incarnation in pool.bindings.hosts]:
            if not pool.has_pair(prefill, now):
                self.unbind_all(prefill)
                pool.wakeups.request_came()

    def refresh_eligibility(self, model: str, now: float) -> None:
        """Find anew which requests can have a turn, after workers came, left, or began or stopped taking work."""
        pool = self.pools[model]
        pool.wakeups.look_anew()
        self.unbind_without_pair(pool, now)
        capacities = pool.capacities()
        if capacities != pool.eligible_for:  # one of many equal workers makes no difference to what waits
            pool.eligible_for = capacities
            self.spread.begin(model, self._refresh(model, list(self.requests.values())))

    def _refresh(self, model: str, requests: list[Request]) -> Iterator[None]:
        for request in requests:
            if request.waits and request.submit.model == model:
                if self.queues[model].refresh_eligibility(request, self.can_run(request)):
                    self.pools[model].wakeups.request_came()
                yield

    def can_run(self, request: Request) -> bool:
        """Whether a worker that takes work could hold the request. True also while none takes work: one may come back."""
        pool = self.pools[request.submit.model]
        able = not pool.servable() or pool.could_place(request.submit)
        if not able:
            pool.bindings.unbind(request)
        return able
