"""The state of the core, and the operations that its parts share: change a request's state, end it, or withdraw it."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

import msgspec

from coordinator.accounting.billing import Billing
from coordinator.accounting.goodput import Goodput, Times
from coordinator.accounting.tombstones import Remembered
from coordinator.accounting.usage import Closed, Opened
from coordinator.events import Action, Limits, Send, StateChanged
from coordinator.placement_messages import placement_messages
from coordinator.room import cluster_state
from proto.errors import Interrupt
from proto.messages import Hello, Interrupted, Message, Release, Role, Submit
from proto.status import AutopilotStatus
from runtime.tenancy.tenants import open_tenants
from scheduler.decisions import Decision, Dispatched, Interruption, Placement, Withdrawn
from scheduler.fairness.fair_node import Path
from scheduler.lifecycle import TERMINAL, RequestState, Trigger
from scheduler.request import LOST_PROCESSES_MAX, LostProcess, Request, Suspicion
from scheduler.scheduler import Scheduler
from scheduler.spread import Spread
from scheduler.workers.flip import RunningFlip
from scheduler.workers.worker import Allocation, Worker

FLIPS_SHOWN = 64


class Last(msgspec.Struct, frozen=True, gc=False):
    attempt: int
    drained: int  # how many attempts up to this one were cut short by drains; -1: the request was never accepted here
    suspicion: Suspicion | None = None


class State:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.priority_classes_lowest_first = sorted(
            self.limits.priority_classes, key=lambda name: self.limits.priority_classes[name].weight
        )
        self.billing = Billing(open_tenants(), self.limits.remembered_s, self.limits.remembered_max)
        self.now = 0.0  # the time of the present event
        self.peers: dict[int, Hello] = {}
        self.scheduler = Scheduler(self.limits)
        self.cluster = self.scheduler.cluster
        self.fenced: OrderedDict[int, Hello] = OrderedDict()  # incarnations of the last workers that hung, oldest first
        self.lost_processes: deque[LostProcess] = deque(maxlen=LOST_PROCESSES_MAX)
        self.empty_pools: OrderedDict[str, float] = OrderedDict()
        """Models without a worker, and since when; longest first."""
        self.alive: Counter[str] = Counter()  # how many live requests each model has
        self.interrupted: OrderedDict[str, Request] = OrderedDict()
        """Interrupted requests that wait for their gateway, longest first."""
        self.ended: Remembered[Last] = Remembered(self.limits.remembered_s, self.limits.remembered_max)
        """Requests that ended lately, with their last attempts. A repeated submit does not start them again, and a worker that
        comes back with one is told to release it."""
        self.leaving: dict[str, None] = {}
        """Tenants that are no longer in the tenants file, until they hold nothing any more."""
        self.orphans: dict[str, Request] = {}  # requests whose gateway is gone, until they are ended
        self.lost_gateways: dict[int, Hello] = {}  # their gateways
        self.spread = Spread()
        self.names: OrderedDict[str, int] = OrderedDict()
        """Names of the last processes that joined, and their incarnations."""
        self.outcomes: Counter[str] = Counter()
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
        self.counters = self.cluster.counters
        self.goodput = Goodput()
        self.out: list[Action] = []  # the actions of the event in hand so far

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

    def tell_state(self, request: Request, why: str) -> None:
        """Note for the log and metrics that a request has changed its state."""
        self.out.append(StateChanged(request.id, request.submit.attempt, request.state, why))

    def end(self, request: Request, trigger: Trigger, why: str, now: float) -> None:
        bill = self.billing.bills.get(request.id)
        output_tokens = bill.counters.output_tokens if bill is not None else request.submit.resumed_tokens
        self.cluster.end(request, trigger, output_tokens, now)
        self.interrupted.pop(request.id, None)
        assert request.state in TERMINAL
        self.tell_state(request, why)
        self.outcomes[request.state] += 1
        self.alive[request.submit.model] -= 1
        self.remember(*request.key, request.submit.drained_attempts, request.suspicion)
        self.carry_out(self.scheduler.take_decisions())
        self.record_usage(self.billing.end(request.id, request.state, now))

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Placement():
                    self._tell_of_placement(decision)
                case Dispatched(worker, step, requests, begun):
                    self.send(worker.incarnation, step)
                    for request in requests:
                        self.billing.hold(request.id)
                    for request in begun:
                        changed = StateChanged(request.id, request.attempt, RequestState.PREFILLING, Trigger.DISPATCH)
                        self.out.append(changed)
                case Withdrawn(key):
                    self.release_everywhere(key)
                case Interruption(request, attempt, reason, why, tell):
                    self.counters[f"interrupted_{reason}"] += 1
                    changed = StateChanged(request.id, attempt, RequestState.INTERRUPTED, f"{reason}: {why}")
                    self.out.append(changed)
                    self.interrupted[request.id] = request
                    if tell:
                        self.send(request.gateway_incarnation, Interrupted(request.id, attempt, reason, why))

    def _tell_of_placement(self, placed: Placement) -> None:
        request, prefill, decode = placed.request, placed.prefill, placed.decode
        self.billing.hold(request.id, 1 if prefill is decode else 2)
        self.counters["suffixes_on_decode"] += prefill is decode
        self.counters["prefixes_fetched"] += request.attempt_progress.fetched_tokens > 0
        gateway = self.peers.get(request.gateway_incarnation) or self.lost_gateways[request.gateway_incarnation]
        reserve, take_in = placement_messages(placed, gateway)
        self.send(decode.incarnation, reserve)
        self.send(prefill.incarnation, take_in, request.blob)
        request.blob = b""
        names = dict.fromkeys((prefill.hello.name, decode.hello.name))
        self.out.append(StateChanged(request.id, request.attempt, RequestState.PLACED, " + ".join(names)))

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
                for queue in self.cluster.queues.values():
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
        """Interrupt a request's attempt: see `Cluster.interrupt`."""
        self.cluster.interrupt(request, reason, why, now, tell=tell)
        self.carry_out(self.scheduler.take_decisions())

    def release(self, incarnation: int, key: tuple[str, int], emitted_tokens: int, *, first: bool = False) -> None:
        """Release a worker's allocation for an attempt that has emitted `emitted_tokens` there. `first`: the first token of
        each choice was emitted before them."""
        worker = self.cluster.workers[incarnation]
        allocation = self.cluster.release(worker, key)
        if allocation is None:
            return
        self.charge_room_for_large(worker, key, allocation)
        self.emitted(
            worker.hello.model, allocation.path, key[0], allocation.resumed_tokens, emitted_tokens, first=first
        )
        self.record_usage(self.billing.release(key[0], self.now))

    def charge_room_for_large(self, worker: Worker, key: tuple[str, int], allocation: Allocation) -> None:
        """Charge an attempt for which room had been kept: see `reserved_workers`."""
        kept = self.cluster.pools[worker.hello.model].room_for_large
        if not worker.is_decode or key not in kept.charges:
            return
        due, bill, prices = kept.charge_due(key, self.now), self.billing.bills.get(key[0]), self.limits.prices
        if bill is not None:
            paid = prices.prompt_token * bill.counters.prompt_tokens + prices.output(bill.counters.output_tokens)
            self.cluster.queues[worker.hello.model].charge(allocation.path, due - paid)

    def emitted(
        self, model: str, path: Path, request_id: str, resumed_tokens: int, tokens: int, *, first: bool = False
    ) -> None:
        """Count the `tokens` that an attempt emitted after `resumed_tokens`, and charge those that were not known before."""
        new = self.billing.emitted(request_id, resumed_tokens, tokens, first=first)
        if new and path:
            self.cluster.queues[model].emitted(path, new)

    def release_everywhere(self, key: tuple[str, int]) -> None:
        for incarnation in self.cluster.where.get(key, ()):
            self.send(incarnation, Release(*key))

    def send(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        if incarnation in self.peers:
            self.out.append(Send(incarnation, message, blob))

    def tell_gateways(self) -> None:
        state = cluster_state(self.cluster.pools)
        for incarnation, hello in self.peers.items():
            if hello.role is Role.GATEWAY:
                self.send(incarnation, state)
