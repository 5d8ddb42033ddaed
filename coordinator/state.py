"""The parts of the core, and the operations that its handlers share: send, end, interrupt, and carry out decisions. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

from coordinator.accounting.billing import Closed, Opened, Remembered
from coordinator.accounts import Accounts
from coordinator.events import Action, Limits, Send, StateChanged
from coordinator.members import Members
from coordinator.rollouts.revisions import Revisions
from proto.errors import Interrupt, Reject, WaitReason
from proto.messages import (
    ClusterState,
    Destination,
    Hello,
    Interrupted,
    Message,
    Prefill,
    Rejected,
    Release,
    Reserve,
    WaitReport,
)
from proto.parts import Room, Waits
from scheduler.decisions import Decision, Dispatched, Interruption, Placement, Withdrawn
from scheduler.lifecycle import TERMINAL, RequestState, Trigger
from scheduler.request import Request, Suspicion
from scheduler.scheduler import Scheduler
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.pool import Pool
from scheduler.workers.prefix_index import usable_hashes


class Last(msgspec.Struct, frozen=True, gc=False):
    """The memory of a request that ended lately."""

    attempt: int = 0
    drained: int = -1  # how many attempts up to this one were cut short by drains; -1: it was never accepted here
    suspicion: Suspicion | None = None


_NEVER = Last()


FELT_MS = 1.0  # shorter waits are not reported
_NO_WORKER = (Reject.NO_CAPACITY, Reject.UNKNOWN_MODEL)
_OVERLOAD = (Reject.QUEUE_FULL, Reject.SHED, Reject.EXPIRED, Reject.DEADLINE)


def because(reason: Reject, path: tuple[str, ...], queue: WaitQueue | None, waits: Waits) -> WaitReason | None:
    """Returns the longest wait of a rejected request; if it is rejected at once, the wait that it would have had."""
    if reason is Reject.QUOTA:
        return WaitReason.QUOTA
    if reason in _NO_WORKER:
        return WaitReason.COLD_START
    if reason not in _OVERLOAD or queue is None:
        return None
    if waits.total:
        return max((WaitReason(name) for name in waits.__struct_fields__), key=lambda name: getattr(waits, name))
    if queue.clock.lacks_room:
        return WaitReason.NO_ROOM
    waiting = len(queue)
    is_own = 2 * queue.line.waiting(path) > waiting
    return (WaitReason.OWN_QUEUE if is_own else WaitReason.OTHER_TENANTS) if waiting else None


class State:
    def __init__(self, limits: Limits) -> None:
        self.now = 0.0  # the time of the present event
        self.out: list[Action] = []  # the actions of the present event so far
        self.scheduler = Scheduler(limits)
        self.cluster = self.scheduler.cluster
        self.members = Members(self.cluster.workers)
        self.revisions = Revisions(self.cluster.pools)
        self.accounts = Accounts(limits, self.cluster)
        self.billing = self.accounts.billing
        self.counters = self.cluster.counters
        self.outcomes: Counter[str] = Counter()
        self.alive: Counter[str] = Counter()  # how many live requests each model has
        self.interrupted: OrderedDict[str, Request] = OrderedDict()
        """Interrupted requests that wait for their gateway, longest first."""
        self.ended: Remembered[Last] = Remembered(limits.remembered_s, limits.remembered_max)
        """Requests that ended lately. A repeated submit does not start them again, and a worker that comes back with one is
        told to release it."""

    @property
    def limits(self) -> Limits:
        return self.accounts.limits

    # --- actions --------------------------------------------------------------------------------------------------------

    def send(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        if incarnation in self.members.peers:
            self.out.append(Send(incarnation, message, blob))

    def send_gateways(self) -> None:
        """Tell all gateways which models can be served."""
        summary = cluster_state(self.revisions.pools_in_force())
        for incarnation in self.members.gateways():
            self.send(incarnation, summary)

    def note_state(self, request: Request, why: str) -> None:
        """Note for the log and metrics that a request has changed its state."""
        self.out.append(StateChanged(request.id, request.submit.attempt, request.state, why))

    def record_usage(self, entry: Opened | Closed | None) -> None:
        if entry is not None:
            self.out.append(entry)

    # --- requests -------------------------------------------------------------------------------------------------------

    def end(self, request: Request, trigger: Trigger, why: str) -> None:
        bill = self.billing.bills.get(request.id)
        output_tokens = bill.counters.output_tokens if bill is not None else request.submit.resumed_tokens
        self.cluster.end(request, trigger, output_tokens, self.now)
        self.interrupted.pop(request.id, None)
        assert request.state in TERMINAL
        self.note_state(request, why)
        self.outcomes[request.state] += 1
        if request.state not in (RequestState.FINISHED, RequestState.CANCELLED):
            self.accounts.goodput.of_pool(request.submit.model).failed += 1
        self.alive[request.submit.model] -= 1
        self.remember(*request.key, request.submit.drained_attempts, request.suspicion)
        self.carry_out(self.scheduler.take_decisions())
        self.record_usage(self.billing.end(request.id, request.state, self.now))

    def reject(self, request: Request, reason: Reject, trigger: Trigger, why: str, retry_after_s: float = 0.0) -> None:
        """End a request that was accepted, and tell its gateway why."""
        self.counters[f"rejected_{reason}"] += 1
        queue = self.cluster.queues[request.submit.model]
        waits = Waits() if request.wait_mark is None else queue.clock.since(request.wait_mark, request.path, self.now)
        why_it_waited = because(reason, request.path, queue, waits)
        self.send(
            request.gateway_incarnation,
            Rejected(*request.key, reason, why, retry_after_s, waits=waits, because=why_it_waited),
        )
        self.end(request, trigger, why)

    def interrupt(self, request: Request, reason: Interrupt, why: str, *, tell: bool = True) -> None:
        """Interrupt a request's attempt: see `Cluster.interrupt`."""
        self.cluster.interrupt(request, reason, why, self.now, tell=tell)
        self.carry_out(self.scheduler.take_decisions())

    def release(self, incarnation: int, key: tuple[str, int], emitted_tokens: int, *, first: bool = False) -> None:
        """Release a worker's allocation for an attempt that has emitted `emitted_tokens` there. `first`: the first token of
        each choice was emitted before them."""
        worker = self.cluster.workers[incarnation]
        allocation = self.cluster.release(worker, key)
        if allocation is None:
            return
        model, path, resumed = worker.hello.model, allocation.path, allocation.resumed_tokens
        self.accounts.emitted(model, path, key[0], resumed, emitted_tokens, first=first)
        self.record_usage(self.billing.release(key[0], self.now))

    def release_everywhere(self, key: tuple[str, int]) -> None:
        for incarnation in self.cluster.where.get(key, ()):
            self.send(incarnation, Release(*key))

    def last(self, request_id: str) -> Last:
        return self.ended.get(request_id) or _NEVER

    def remember(self, request_id: str, attempt: int, drained: int = -1, suspicion: Suspicion | None = None) -> None:
        before = self.last(request_id)
        last = Last(max(attempt, before.attempt), max(drained, before.drained), suspicion or before.suspicion)
        self.ended.put(request_id, last, self.now)

    # --- decisions of the scheduler -------------------------------------------------------------------------------------

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Placement():
                    self._send_placement(decision)
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

    def _send_placement(self, placed: Placement) -> None:
        request, prefill, decode = placed.request, placed.prefill, placed.decode
        self.billing.hold(request.id, 1 if prefill is decode else 2)
        self.counters["suffixes_on_decode"] += prefill is decode
        self.counters["prefixes_fetched"] += request.attempt_progress.fetched_tokens > 0
        incarnation = request.gateway_incarnation
        gateway = self.members.peers.get(incarnation) or self.members.lost_gateways[incarnation]
        reserve, prefill_message = placement_messages(placed, gateway)
        self.send(decode.incarnation, reserve)
        self.send(prefill.incarnation, prefill_message, request.blob)
        request.blob = b""
        if request.waited.total >= FELT_MS:
            self.send(incarnation, WaitReport(*request.key, request.waited))
        names = dict.fromkeys((prefill.hello.name, decode.hello.name))
        self.out.append(StateChanged(request.id, request.attempt, RequestState.PLACED, " + ".join(names)))


def placement_messages(placed: Placement, gateway_hello: Hello) -> tuple[Reserve, Prefill]:
    """Returns the message for the decode worker and the one for the prefill worker."""
    request, prefill, decode = placed.request, placed.prefill, placed.decode
    submit, gateway = request.submit, Destination(gateway_hello.address, request.gateway_incarnation)
    what = (
        *request.key,
        submit.prompt_tokens,
        submit.sampling,
        submit.choices,
        submit.first_choice,
        submit.resumed_tokens,
    )
    size, decode_size = prefill.capacity.block_size, decode.capacity.block_size
    hashes = usable_hashes(submit, size)
    decode_hashes = hashes if decode_size == size else usable_hashes(submit, decode_size)
    reserve = Reserve(
        *what, placed.kv_blocks, gateway, prefill.incarnation, decode_hashes, request.tpot_ms, placed.returns
    )
    return reserve, Prefill(
        *what,
        gateway,
        Destination(decode.hello.address, decode.incarnation),
        decode_size,
        hashes,
        request.cached_tokens,
        request.attempt_progress.fetched_tokens > 0,
        placed.returns,
    )


def cluster_state(pools: Mapping[str, Pool]) -> ClusterState:
    """Returns the summary for gateways: the models that can be served, and the largest request that each can have."""
    servable = {model: pools[model] for model in sorted(pools) if pools[model].servable()}
    sizes = tuple(pool.hash_block_size() for pool in servable.values())
    return ClusterState(tuple(servable), sizes, rooms=tuple(map(_room, servable.values())))


def _room(pool: Pool) -> Room:
    """Returns the largest request that workers which are up can hold; each role has one."""
    prompt_tokens = min(pool.context_tokens, max(worker.kv_tokens for worker in pool.prefill.values()))
    decode = max(pool.decode.values(), key=lambda worker: worker.kv_tokens).capacity
    return Room(pool.context_tokens, prompt_tokens, decode.kv_blocks, decode.block_size)
