"""The state of the core, and the operations that its parts share: change a request's state, end it, or withdraw it."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator

import msgspec

from coordinator.accounting.billing import Billing
from coordinator.accounting.goodput import Goodput, Times
from coordinator.accounting.tombstones import Remembered
from coordinator.accounting.usage import Closed, Opened
from coordinator.events import Action, Limits, Send, StateChanged
from coordinator.room import cluster_state
from coordinator.spread import Spread
from proto.errors import Interrupt
from proto.messages import Hello, Interrupted, Message, Release, Role, Submit
from proto.status import AutopilotStatus
from runtime.tenancy.tenants import open_tenants
from scheduler.fairness.fair_node import Path
from scheduler.lifecycle import TERMINAL, RequestState, Trigger
from scheduler.observer import Watch
from scheduler.request import LOST_PROCESSES_MAX, RETAINED, LostProcess, Request, RetainedAllocation, Suspicion
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.flip import RunningFlip
from scheduler.workers.pool import Pool
from scheduler.workers.worker import Allocation, Where, Worker

FLIPS_SHOWN = 64


class Last(msgspec.Struct, frozen=True, gc=False):
    attempt: int
    drained: int
    """How many attempts up to this one were cut short by drains; -1: the request was never accepted here."""
    suspicion: Suspicion | None = None


class State:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.priority_classes_lowest_first = sorted(
            self.limits.priority_classes, key=lambda name: self.limits.priority_classes[name].weight
        )
        self.billing = Billing(open_tenants(), self.limits.remembered_s, self.limits.remembered_max)
        self.now = 0.0
        """The time of the present event."""
        self.peers: dict[int, Hello] = {}
        self.workers: dict[int, Worker] = {}
        self.where: Where = {}
        """The workers that hold something for each attempt."""
        self.fenced: OrderedDict[int, Hello] = OrderedDict()
        """Incarnations of the last workers that hung, oldest first."""
        self.lost_processes: deque[LostProcess] = deque(maxlen=LOST_PROCESSES_MAX)
        self.pools: dict[str, Pool] = {}
        """Pools by model id. A pool stays for a while when its workers go, so that its model stays known."""
        self.empty_pools: OrderedDict[str, float] = OrderedDict()
        """Models without a worker, and since when; longest first."""
        self.queues: dict[str, WaitQueue] = {}
        self.requests: dict[str, Request] = {}
        """All requests that have not ended."""
        self.alive: Counter[str] = Counter()
        """How many live requests each model has."""
        self.interrupted: OrderedDict[str, Request] = OrderedDict()
        """Interrupted requests that wait for their gateway, longest first."""
        self.ended: Remembered[Last] = Remembered(self.limits.remembered_s, self.limits.remembered_max)
        """Requests that ended lately, with their last attempts. A repeated submit does not start them again, and a worker that
        comes back with one is told to release it."""
        self.leaving: dict[str, None] = {}
        """Tenants that are no longer in the tenants file, until they hold nothing any more."""
        self.orphans: dict[str, Request] = {}
        """Requests whose gateway is gone, until they are ended."""
        self.lost_gateways: dict[int, Hello] = {}
        """Their gateways."""
        self.spread = Spread()
        self.names: OrderedDict[str, int] = OrderedDict()
        """Names of the last processes that joined, and their incarnations."""
        self.outcomes: Counter[str] = Counter()
        self.draining: dict[int, Worker] = {}
        """Workers on which nothing new is placed."""
        self.drain_orders: OrderedDict[int, float | None] = OrderedDict()
        """The last drain orders from people, by the worker's incarnation: the time after which running requests are handed
        over; None: the drain was undone."""
        self.flipping: dict[int, RunningFlip] = {}
        """Workers that are changing their role, by their incarnations in the old role; at most `flips_at_once` for each
        model."""
        self.flips: deque[RunningFlip] = deque(maxlen=FLIPS_SHOWN)
        """The last role changes, including those in `flipping`."""
        self.autopilots: dict[str, tuple[AutopilotStatus, float]] = {}
        """The last status of each model's autopilot, and its time."""
        self.unproven: dict[int, RunningFlip] = {}
        """Role changes that are done, by the new incarnation, until its first step in the new role."""
        self.keeping: dict[RunningFlip, None] = {}
        """Role changes whose streams wait to be resumed from the KV that the process has kept."""
        self.counters: Counter[str] = Counter()
        self.goodput = Goodput()
        self.out: list[Action] = []
        """The actions of the event in hand so far."""
        self.watch: Watch | None = None
        """A callback that is told of the core's decisions in a replay."""

    def path(self, submit: Submit) -> tuple[str, str, str]:
        """Returns a request's path in the fair queue. Its priority class is the one that it asks for, or else its tenant's."""
        organisation, _, user = submit.tenant.partition("/")
        priority_class, priority_classes = submit.priority_class, self.limits.priority_classes
        if priority_class not in priority_classes:
            policy = self.billing.quotas.tenants.policy(submit.tenant)
            priority_class = (
                policy.priority_class
                if policy is not None and policy.priority_class in priority_classes
                else self.priority_classes_lowest_first[0]
            )
        return priority_class, organisation, user

    def set_targets(self, request: Request) -> None:
        """Set a request's targets from its priority class, as the tenants file is now."""
        priority_class = self.limits.priority_classes[request.path[0]]
        request.ttft_ms, request.tpot_ms = priority_class.ttft_ms or 0.0, priority_class.tpot_ms or 0.0
        pool = self.pools[request.submit.model]
        if request.tpot_ms and not pool.targets.used:
            pool.targets.begin(pool.decode.values())

    def count_finished(self, request: Request, output_tokens: int) -> None:
        """Count a finished request in goodput. `output_tokens`: over all choices."""
        if not request.counted:
            return
        first = request.first_token_at or self.now
        later = max(-(-output_tokens // request.submit.choices) - 1, 1)
        took = Times(1000 * (first - request.arrived), 1000 * (self.now - first) / later)
        self.goodput.finished(request.path, took, Times(request.ttft_ms, request.tpot_ms), request.arrived)

    def stepped(self, incarnation: int) -> None:
        """Note that a worker has run a step, which confirms a role change of its process."""
        flip = self.unproven.pop(incarnation, None)
        if flip is not None and not flip.first_step_at:
            flip.first_step_at = self.now

    def current(self, request_id: str, attempt: int) -> Request | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.submit.attempt == attempt else None

    def move(self, request: Request, trigger: Trigger, now: float, why: str = "") -> None:
        if trigger is Trigger.PLACE:
            self.queues[request.submit.model].projection.place(request, now)
        request.fire(trigger, now)
        self.out.append(StateChanged(request.id, request.submit.attempt, request.state, why or trigger))

    def end(self, request: Request, trigger: Trigger, why: str, now: float) -> None:
        self.withdraw(request)
        self.drop_retained(request)
        self.interrupted.pop(request.id, None)
        self.move(request, trigger, now, why)
        assert request.state in TERMINAL
        request.blob = b""  # rows and lists may know it for a while yet
        pool, queue = self.pools[request.submit.model], self.queues[request.submit.model]
        request.end_turn(pool.sessions, queue.weight(request.path), now)
        self.outcomes[request.state] += 1
        del self.requests[request.id]
        self.alive[request.submit.model] -= 1
        self.remember(*request.key, request.submit.drained_attempts, request.suspicion)
        pool.suspects.pop(request.id, None)
        self.record_usage(self.billing.end(request.id, request.state, now))

    def record_usage(self, entry: Opened | Closed | None) -> None:
        if entry is None:
            return
        self.out.append(entry)
        if isinstance(entry, Closed):
            self.let_leave(self.billing.quotas.take_vacated())

    def let_leave(self, tenants: Iterable[str]) -> None:
        """Forget those of these tenants that are gone and have nothing left here."""
        for tenant in tenants:
            if tenant in self.leaving and self.billing.quotas.forget(tenant, self.now):
                del self.leaving[tenant]
                for queue in self.queues.values():
                    queue.forget(tenant)

    def remember(self, request_id: str, attempt: int, drained: int = -1, suspicion: Suspicion | None = None) -> None:
        attempt = max(attempt, self.last_attempt(request_id))
        suspicion = suspicion or self.last_suspicion(request_id)
        self.ended.put(request_id, Last(attempt, max(drained, self.last_drained(request_id)), suspicion), self.now)

    def last_suspicion(self, request_id: str) -> Suspicion | None:
        last = self.ended.get(request_id)
        return last.suspicion if last is not None else None

    def last_attempt(self, request_id: str) -> int:
        """The number of the last attempt of a request that ended lately; 0 for any other."""
        last = self.ended.get(request_id)
        return last.attempt if last is not None else 0

    def last_drained(self, request_id: str) -> int:
        """How many attempts of a request that ended lately were cut short by drains; -1 where it was never accepted here."""
        last = self.ended.get(request_id)
        return last.drained if last is not None else -1

    def interrupt(self, request: Request, reason: Interrupt, why: str, now: float, *, tell: bool = True) -> None:
        """Interrupt a request's attempt. `tell`: tell its gateway now, so that it resubmits the request at once."""
        self.counters[f"interrupted_{reason}"] += 1
        request.preempted += reason is Interrupt.PREEMPTED
        if reason is Interrupt.DRAINED:
            attempt_progress = request.attempt_progress
            attempt_progress.paid_tokens = max(attempt_progress.paid_tokens, request.dispatched_tokens)
        self.withdraw(request)
        self.move(request, Trigger.INTERRUPT, now, f"{reason}: {why}")
        self.interrupted[request.id] = request
        if tell:
            self.send(request.gateway_incarnation, Interrupted(*request.key, reason, why))

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
            self.record_usage(self.billing.release(request.id, self.now))

    def _keep_retained(self, request: Request, worker: Worker, allocation: Allocation) -> None:
        """Pass the attempt's allocation to its request, unless it does not fit in full: the attempt may have shared blocks."""
        assert worker.admission is not None and allocation.demand is not None
        if worker.admission.fits(allocation.demand):
            worker.hold((request.id, RETAINED), allocation)
            self.billing.hold(request.id)
        else:
            self.drop_retained(request)

    def drop_retained_on(self, worker: Worker) -> None:
        for request in list(self.pools[worker.hello.model].retained.values()):
            retained = request.attempt_progress.retained
            if retained is not None and retained.decode_incarnation == worker.incarnation:
                self.drop_retained(request)

    def withdraw(self, request: Request) -> None:
        """Take the attempt out of the queue or off its workers, and refund the estimate of its output to its tenant."""
        queue = self.queues[request.submit.model]
        self.pools[request.submit.model].end_trial(request)
        queue.count_uncomputed(request, 0)
        queue.projection.leave(request, self.now)
        queue.remove(request)
        queue.refund_output(request)
        if request.state is RequestState.QUEUED:
            pool = self.pools[request.submit.model]
            pool.bindings.unbind(request)
            pool.wakeups.waits_no_more(request)
            if pool.room_for_large.request is request:
                self.end_room_for_large(request)
            return
        prefill = self.workers.get(request.prefill_incarnation)
        if prefill is not None:
            prefill.expect_no_more(request)
        self.release_everywhere(request.key)

    def release(self, incarnation: int, key: tuple[str, int], emitted_tokens: int, *, first: bool = False) -> None:
        """Release a worker's allocation for an attempt that has emitted `emitted_tokens` there. `first`: the first token of
        each choice was emitted before them."""
        worker = self.workers[incarnation]
        allocation = worker.release(key)
        if allocation is None:
            return
        self.pools[worker.hello.model].freed(worker)
        self.charge_room_for_large(worker, key, allocation)
        self.emitted(
            worker.hello.model, allocation.path, key[0], allocation.resumed_tokens, emitted_tokens, first=first
        )
        request = self.requests.get(key[0])
        if request is not None and request.attempt_progress.retained == (incarnation, key[1]):
            self._keep_retained(request, worker, allocation)
        self.record_usage(self.billing.release(key[0], self.now))

    def end_room_for_large(self, request: Request) -> None:
        """Stop keeping room for a large request. Charge its tenant for the work that could not run there."""
        pool = self.pools[request.submit.model]
        self.queues[request.submit.model].charge(request.path, pool.room_for_large.end(self.now))
        pool.wakeups.look_anew()

    def charge_room_for_large(self, worker: Worker, key: tuple[str, int], allocation: Allocation) -> None:
        """Charge an attempt for which room had been kept: see `reserved_workers`."""
        kept = self.pools[worker.hello.model].room_for_large
        if worker.admission is None or key not in kept.charges:
            return
        due, bill, prices = (
            kept.charge_due(key, self.now),
            self.billing.bills.get(key[0]),
            self.limits.prices,
        )
        if bill is not None:
            paid = prices.prompt_token * bill.counters.prompt_tokens + prices.output(bill.counters.output_tokens)
            self.queues[worker.hello.model].charge(allocation.path, due - paid)

    def unbind_all(self, prefill: Worker) -> None:
        """Let requests that wait for this worker and its cached prefixes run anywhere again."""
        pool, queue = self.pools[prefill.hello.model], self.queues[prefill.hello.model]
        for request in list(prefill.bound.values()):
            pool.bindings.unbind(request)
            queue.unsettle(request)

    def unbind_without_pair(self, pool: Pool) -> None:
        """Let requests run anywhere again if their prefill worker may not send KV to any decode worker now."""
        for prefill in [pool.workers[incarnation] for incarnation in pool.bindings.hosts]:
            if not pool.has_pair(prefill, self.now):
                self.unbind_all(prefill)
                pool.wakeups.request_came()

    def emitted(
        self, model: str, path: Path, request_id: str, resumed_tokens: int, tokens: int, *, first: bool = False
    ) -> None:
        """Count the `tokens` that an attempt emitted after `resumed_tokens`, and charge those that were not known before."""
        new = self.billing.emitted(request_id, resumed_tokens, tokens, first=first)
        if new and path:
            self.queues[model].emitted(path, new)

    def release_everywhere(self, key: tuple[str, int]) -> None:
        for incarnation in self.where.get(key, ()):
            self.send(incarnation, Release(*key))

    def refresh_eligibility(self, model: str) -> None:
        """Find anew which requests can have a turn, after workers came, left, or began or stopped taking work."""
        pool = self.pools[model]
        pool.wakeups.look_anew()
        self.unbind_without_pair(pool)
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

    def send(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        if incarnation in self.peers:
            self.out.append(Send(incarnation, message, blob))

    def tell_gateways(self) -> None:
        state = cluster_state(self.pools)
        for incarnation, hello in self.peers.items():
            if hello.role is Role.GATEWAY:
                self.send(incarnation, state)
