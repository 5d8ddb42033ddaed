"""The scheduling core: `handle(event, now) -> actions`. Pure: no clock, no sockets, no randomness.

Every handler is idempotent and drops what belongs to an older attempt. What a worker holds is counted as held until that
worker itself says that it has let go (`HandedOver`, `Finished`, `WorkFailed`, `Released`) or is gone, so that the free blocks
counted here are never more than those the worker has.
"""

from collections import Counter
from collections.abc import Callable

from coordinator import admission, report
from coordinator.events import Action, Event, Limits, Misbehaved, Moved, PeerDown, PeerUp, Received, Send, Tick
from coordinator.lifecycle import ON_WORKERS, TERMINAL, State, Trigger
from coordinator.placement import orders, place
from coordinator.pool import WORKERS, Holding, Pool, Worker
from coordinator.queue import WaitQueue
from coordinator.request import Request
from coordinator.steps import compose
from proto.errors import CancelReason, Interrupt, Reject
from proto.messages import (
    Accepted,
    Cancel,
    ClusterState,
    Finished,
    HandedOver,
    Hello,
    Interrupted,
    Message,
    Peer,
    Rejected,
    Release,
    Released,
    Role,
    StatusRequest,
    StepDone,
    Submit,
    WorkFailed,
)


class Core:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.peers: dict[int, Hello] = {}
        self.workers: dict[int, Worker] = {}
        self.pools: dict[str, Pool] = {}
        """By model id; a pool stays when its workers go, so that its model stays known."""
        self.queues: dict[str, WaitQueue] = {}
        self.requests: dict[str, Request] = {}
        """All that have not ended."""
        self.interrupted: dict[str, Request] = {}
        """Those that wait for their gateway, longest first."""
        self.ended: dict[str, int] = {}
        """The last requests that ended, with their last attempt, oldest first: what repeats them does not start them again,
        and a worker that comes back with one is told to let go."""
        self.outcomes: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self._out: list[Action] = []
        self._handlers: dict[type[Message], tuple[tuple[Role, ...], Callable[[int, Received, float], None]]] = {
            Submit: ((Role.GATEWAY,), self._submit),
            Cancel: ((Role.GATEWAY,), self._cancel),
            StepDone: ((Role.PREFILL,), self._step_done),
            HandedOver: ((Role.PREFILL,), self._handed_over),
            Finished: (WORKERS, self._finished),
            Released: (WORKERS, self._released),
            WorkFailed: (WORKERS, self._work_failed),
            StatusRequest: ((Role.OBSERVER, Role.GATEWAY), self._status),
        }

    # --- the interface ------------------------------------------------------------------------------------------------

    def refusal(self, hello: Hello) -> str | None:
        """Why a process may not join, or None. Asked before its `PeerUp`."""
        return admission.refusal(hello, self.pools)

    def handle(self, event: Event, now: float) -> list[Action]:
        self._out = []
        match event:
            case PeerUp(epoch, hello):
                self._peer_up(epoch, hello, now)
            case PeerDown(epoch, reason):
                self._peer_down(epoch, reason, now)
            case Received(epoch, message, _):
                self._received(epoch, message, event, now)
            case Tick():
                pass
        self._expire(now)
        self._schedule(now)
        return self._out

    def next_deadline(self) -> float | None:
        waiting = [
            next(iter(queue)).since + self.limits.queue_wait_s_max for queue in self.queues.values() if len(queue)
        ]
        if self.interrupted:
            waiting.append(next(iter(self.interrupted.values())).since + self.limits.resubmit_s_max)
        return min(waiting, default=None)

    # --- peers ----------------------------------------------------------------------------------------------------------

    def _peer_up(self, epoch: int, hello: Hello, now: float) -> None:
        if epoch in self.peers:
            self._peer_down(epoch, "connected again", now)
        self.peers[epoch] = hello
        if hello.role in WORKERS:
            worker = Worker.from_hello(hello)
            pool = self.pools.setdefault(hello.model, Pool(hello.model, hello.fingerprint))
            pool.fingerprint = hello.fingerprint
            pool.add(worker)
            self.queues.setdefault(hello.model, WaitQueue())
            self.workers[epoch] = worker
            self._adopt(worker, hello)
            self._tell_gateways()
        elif hello.role is Role.GATEWAY:
            self._send(epoch, self._cluster_state())

    def _adopt(self, worker: Worker, hello: Hello) -> None:
        """Count what the worker held through a loss of the link; streams we have given up meanwhile are to end."""
        for held in hello.held:
            holding, key = Holding(held.kv_blocks, held.seqs), (held.request_id, held.attempt)
            if key in worker.holdings or not worker.fits(holding):
                self._out.append(Misbehaved(worker.epoch, "holds more than its capacity"))
                return
            worker.hold(key, holding)
            if held.request_id in self.requests or held.request_id in self.ended:
                self._send(worker.epoch, Release(*key))

    def _peer_down(self, epoch: int, reason: str, now: float) -> None:
        hello = self.peers.pop(epoch, None)
        if hello is None:
            return
        worker = self.workers.pop(epoch, None)
        if worker is not None:
            self.counters[f"{hello.role}_lost"] += 1
            self.pools[hello.model].remove(worker)
            for request in [r for r in self.requests.values() if epoch in (r.prefill_epoch, r.decode_epoch)]:
                self._worker_lost(request, worker, reason, now)
            self._tell_gateways()
        elif hello.role is Role.GATEWAY:
            for request in [r for r in self.requests.values() if r.gateway_epoch == epoch]:
                self._end(request, Trigger.CANCEL, CancelReason.GATEWAY_LOST, now)

    def _worker_lost(self, request: Request, worker: Worker, reason: str, now: float) -> None:
        if request.state not in ON_WORKERS:
            return
        role = worker.hello.role
        if role is Role.PREFILL and request.state is State.DECODING:
            return
        lost = Interrupt.PREFILL_LOST if role is Role.PREFILL else Interrupt.DECODE_LOST
        self._interrupt(request, lost, f"{worker.hello.name}: {reason}"[:500], now)

    def _cluster_state(self) -> ClusterState:
        return ClusterState(tuple(sorted(model for model, pool in self.pools.items() if pool.servable())))

    def _tell_gateways(self) -> None:
        state = self._cluster_state()
        for epoch, hello in self.peers.items():
            if hello.role is Role.GATEWAY:
                self._send(epoch, state)

    # --- messages -------------------------------------------------------------------------------------------------------

    def _received(self, epoch: int, message: Message, event: Received, now: float) -> None:
        hello = self.peers.get(epoch)
        if hello is None:
            return
        roles, handler = self._handlers.get(type(message), ((), None))
        if handler is None or hello.role not in roles:
            self._out.append(Misbehaved(epoch, f"a {hello.role} may not send {type(message).__name__}"))
            return
        handler(epoch, event, now)

    def _submit(self, epoch: int, event: Received, now: float) -> None:
        submit = event.message
        assert isinstance(submit, Submit)
        if len(event.blob) != 4 * submit.prompt_tokens:
            self._out.append(Misbehaved(epoch, f"{len(event.blob)} bytes for {submit.prompt_tokens} prompt tokens"))
            return
        if submit.attempt <= self.ended.get(submit.request_id, 0):
            return
        known = self.requests.get(submit.request_id)
        if known is not None and known.gateway_epoch != epoch:
            self._reject(epoch, submit, Reject.DUPLICATE, "another gateway has a request of this id")
            return
        if known is not None and submit.attempt <= known.attempt:
            if submit.attempt == known.attempt:
                self._send(epoch, Accepted(*known.key))
            return
        reason, why = self._judge(submit)
        if reason is not None:
            if known is not None:
                self._end(known, Trigger.FAIL, reason, now)
            self._reject(epoch, submit, reason, why)
            return
        if known is None:
            request = Request(submit.request_id, epoch, submit, event.blob, now)
            self.requests[request.id] = request
        else:
            request = known
            self._withdraw(request)
            if request.state in ON_WORKERS:
                request.fire(Trigger.INTERRUPT, now)
            self.interrupted.pop(request.id, None)
            request.renew(submit, event.blob)
            request.fire(Trigger.RESUBMIT, now)
        self.queues[submit.model].push(request)
        self._send(epoch, Accepted(*request.key))
        self._out.append(Moved(request.id, request.attempt, request.state, "submitted"))

    def _judge(self, submit: Submit) -> tuple[Reject | None, str]:
        if any((submit.request_id, submit.attempt) in worker.holdings for worker in self.workers.values()):
            return Reject.DUPLICATE, "a worker is still busy with this very attempt"
        pool, queue = self.pools.get(submit.model), self.queues.get(submit.model)
        return admission.judge(submit, pool, len(queue) if queue is not None else 0, self.limits)

    def _reject(self, epoch: int, submit: Submit, reason: Reject, why: str) -> None:
        self.outcomes[State.REJECTED] += 1
        self.counters[f"rejected_{reason}"] += 1
        retry_after_s = (
            report.retry_after_s(self, submit.model) if reason in (Reject.QUEUE_FULL, Reject.NO_CAPACITY) else 0.0
        )
        self._send(epoch, Rejected(submit.request_id, submit.attempt, reason, why, retry_after_s))
        self._out.append(Moved(submit.request_id, submit.attempt, State.REJECTED, reason))

    def _cancel(self, epoch: int, event: Received, now: float) -> None:
        cancel = event.message
        assert isinstance(cancel, Cancel)
        request = self.requests.get(cancel.request_id)
        if request is not None and request.gateway_epoch == epoch and cancel.attempt >= request.attempt:
            self._end(request, Trigger.CANCEL, cancel.reason, now)
        elif request is None:
            # Accepted by an earlier coordinator: the workers know it, and so do their holdings.
            # One that has still to come back finds the cancel here.
            self._release_everywhere((cancel.request_id, cancel.attempt))
            self._remember(cancel.request_id, cancel.attempt)

    def _step_done(self, epoch: int, event: Received, now: float) -> None:
        done = event.message
        assert isinstance(done, StepDone)
        worker = self.workers[epoch]
        if worker.steps.pop(done.step_id, None) is None:
            return
        tokens = sum(chunk.length for chunk in done.computed)
        worker.tokens_forwarded = done.tokens_forwarded
        if tokens and done.step_ms > 0:
            worker.tokens_per_s += 0.2 * (tokens * 1000 / done.step_ms - worker.tokens_per_s)
        for chunk in done.computed:
            request = self._current(chunk.request_id, chunk.attempt)
            if request is None or request.prefill_epoch != epoch:
                continue
            request.computed_tokens += chunk.length
            if request.state is State.PREFILLING and request.computed_tokens >= request.submit.prompt_tokens:
                self._move(request, Trigger.PROMPT_DONE, now)

    def _handed_over(self, epoch: int, event: Received, now: float) -> None:
        done = event.message
        assert isinstance(done, HandedOver)
        self.counters["kv_bytes_moved"] += done.kv_bytes
        self.workers[epoch].let_go((done.request_id, done.attempt))
        request = self._current(done.request_id, done.attempt)
        if request and request.prefill_epoch == epoch and request.state in (State.PREFILLING, State.HANDING_OVER):
            self._move(request, Trigger.HANDED_OVER, now)

    def _finished(self, epoch: int, event: Received, now: float) -> None:
        done = event.message
        assert isinstance(done, Finished)
        worker = self.workers[epoch]
        worker.let_go((done.request_id, done.attempt))
        worker.tokens_forwarded = done.tokens_forwarded
        self.counters["output_tokens"] += done.output_tokens
        request = self._current(done.request_id, done.attempt)
        if request is None or epoch not in (request.prefill_epoch, request.decode_epoch):
            return
        if request.state in (State.PREFILLING, State.HANDING_OVER, State.DECODING):
            self._end(request, Trigger.FINISH, "done", now)

    def _released(self, epoch: int, event: Received, now: float) -> None:
        done = event.message
        assert isinstance(done, Released)
        self.workers[epoch].let_go((done.request_id, done.attempt))

    def _work_failed(self, epoch: int, event: Received, now: float) -> None:
        failed = event.message
        assert isinstance(failed, WorkFailed)
        worker = self.workers[epoch]
        worker.let_go((failed.request_id, failed.attempt))
        self.counters[f"work_failed_{failed.reason}"] += 1
        request = self._current(failed.request_id, failed.attempt)
        if (
            request is None
            or request.state not in ON_WORKERS
            or epoch not in (request.prefill_epoch, request.decode_epoch)
        ):
            return
        if epoch == request.prefill_epoch and request.state is State.DECODING:
            return
        self._interrupt(request, failed.reason, f"{worker.hello.name}: {failed.message}"[:500], now)

    def _status(self, epoch: int, event: Received, now: float) -> None:
        self._send(epoch, report.status(self))

    # --- moves ----------------------------------------------------------------------------------------------------------

    def _current(self, request_id: str, attempt: int) -> Request | None:
        request = self.requests.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def _move(self, request: Request, trigger: Trigger, now: float, why: str = "") -> None:
        request.fire(trigger, now)
        self._out.append(Moved(request.id, request.attempt, request.state, why or trigger))

    def _end(self, request: Request, trigger: Trigger, why: str, now: float) -> None:
        self._withdraw(request)
        self.interrupted.pop(request.id, None)
        self._move(request, trigger, now, why)
        assert request.state in TERMINAL
        self.outcomes[request.state] += 1
        del self.requests[request.id]
        self._remember(*request.key)

    def _remember(self, request_id: str, attempt: int) -> None:
        self.ended.pop(request_id, None)
        self.ended[request_id] = attempt
        if len(self.ended) > self.limits.remembered_max:
            del self.ended[next(iter(self.ended))]

    def _interrupt(self, request: Request, reason: Interrupt, why: str, now: float) -> None:
        self.counters[f"interrupted_{reason}"] += 1
        self._withdraw(request)
        self._move(request, Trigger.INTERRUPT, now, f"{reason}: {why}")
        self.interrupted[request.id] = request
        self._send(request.gateway_epoch, Interrupted(*request.key, reason, why))

    def _withdraw(self, request: Request) -> None:
        """Take the attempt out of the queue or off its workers, whichever it is in."""
        if request.state is State.QUEUED:
            self.queues[request.submit.model].remove(request)
            return
        prefill = self.workers.get(request.prefill_epoch)
        if prefill is not None:
            prefill.placed.pop(request.id, None)
        self._release_everywhere(request.key)

    def _release_everywhere(self, key: tuple[str, int]) -> None:
        for worker in self.workers.values():
            if key in worker.holdings:
                self._send(worker.epoch, Release(*key))

    def _expire(self, now: float) -> None:
        for queue in self.queues.values():
            while len(queue) and (head := next(iter(queue))).since + self.limits.queue_wait_s_max <= now:
                why = f"waited {self.limits.queue_wait_s_max:g} s in the queue"
                self._send(
                    head.gateway_epoch,
                    Rejected(*head.key, Reject.EXPIRED, why, report.retry_after_s(self, head.submit.model)),
                )
                self._end(head, Trigger.EXPIRE, why, now)
        while self.interrupted:
            first = next(iter(self.interrupted.values()))
            if first.since + self.limits.resubmit_s_max > now:
                break
            self._end(first, Trigger.EXPIRE, "its gateway did not resume it", now)

    # --- scheduling -----------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> None:
        for model, queue in self.queues.items():
            while len(queue) and self._place_one(self.pools[model], queue, now):
                pass
        for worker in self.workers.values():
            if worker.hello.role is Role.PREFILL:
                self._fill(worker, now)

    def _place_one(self, pool: Pool, queue: WaitQueue, now: float) -> bool:
        placed = place(pool, queue, self.limits.steps_in_flight * self.limits.step_tokens)
        if placed is None:
            return False
        request, prefill, decode = placed
        gateway = Peer(self.peers[request.gateway_epoch].address, request.gateway_epoch)
        reserve, take_in = orders(request, prefill, decode, gateway)
        self._send(decode.epoch, reserve)
        self._send(prefill.epoch, take_in, request.blob)
        request.blob = b""
        self._move(request, Trigger.PLACE, now, f"{prefill.hello.name} + {decode.hello.name}")
        return True

    def _fill(self, worker: Worker, now: float) -> None:
        while worker.placed and len(worker.steps) < self.limits.steps_in_flight:
            step = compose(worker, self.limits.step_tokens)
            if step is None:
                return
            self._send(worker.epoch, step)
            for chunk in step.chunks:
                request = self.requests[chunk.request_id]
                if request.state is State.PLACED:
                    self._move(request, Trigger.DISPATCH, now)

    def _send(self, epoch: int, message: Message, blob: bytes = b"") -> None:
        if epoch in self.peers:
            self._out.append(Send(epoch, message, blob))
