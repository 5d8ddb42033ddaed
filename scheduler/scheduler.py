"""The scheduler, as its owner calls it: requests and workers come and go, workers report, and `decide` says what to do. Pure.

The owner is the coordinator, or a simulation with virtual workers. It calls one method for each thing that happens, and then
`decide`, which returns decisions for it to carry out. It calls `decide` again at `next_deadline`.
"""

from typing import NamedTuple

from proto.errors import Interrupt
from proto.messages import CacheMiss, Chunk, Role, StepDone
from proto.progress import DecodeProgress
from scheduler.cluster import Cluster
from scheduler.decisions import Decision
from scheduler.kv_admission.shared_blocks import chains
from scheduler.lifecycle import RequestState, Trigger
from scheduler.limits import SchedulerLimits
from scheduler.placement import paused_turns
from scheduler.placement.place import came
from scheduler.placement.preemption import charge_decode, give_back, outlived, relieve
from scheduler.placement.schedule import schedule
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.pool import Pool
from scheduler.workers.prefix_index import usable_hashes
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

FAILURES_KEPT = 7  # earlier failures of its model that a request keeps


class EndedStep(NamedTuple):
    asked: tuple[Chunk, ...]
    prompts_done: list[Request]
    """Requests whose prompts are computed now. Their state is DECODING where the same worker decodes them."""


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.cluster = Cluster(limits)

    # --- decisions ------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Place what can be placed, compose steps, and return all decisions since the last call."""
        self.cluster.spread.go_on()
        schedule(self.cluster, now)
        return self.take_decisions()

    def take_decisions(self) -> list[Decision]:
        """Return the decisions that the last calls brought with them, such as attempts that were withdrawn."""
        decisions, self.cluster.decisions = self.cluster.decisions, []
        return decisions

    def next_deadline(self, now: float) -> float | None:
        """When to call `decide` though nothing happens; None: never."""
        pools, queues = self.cluster.pools.values(), self.cluster.queues.values()
        if self.cluster.spread.jobs or any(pool.wakeups.go_on_at_once for pool in pools):
            return now
        due = [timer for queue in queues if (timer := queue.line.next_due()) is not None]
        due += [paused_turns.next_resume(pool) for pool in pools if pool.paused]
        due += [at for pool in pools if (at := pool.breakers.next_wake()) is not None]
        return min(due, default=None)

    # --- requests -------------------------------------------------------------------------------------------------------

    def admit(self, request: Request, now: float) -> None:
        """Take on a new request. `submit` lets it wait."""
        self.cluster.requests[request.id] = request
        if request.suspicion is not None:
            self.cluster.pools[request.submit.model].suspects[request.id] = request
        request.pay_for_drained(0)
        self._begin_turn(request, now)

    def _begin_turn(self, request: Request, now: float) -> None:
        """Begin a request's turn in its session, and charge for the KV that was kept for it, if others wait. A later attempt,
        or a request without block hashes, is no turn. `Request.end_turn` ends it."""
        submit = request.submit
        pool, queue = self.cluster.pools[submit.model], self.cluster.queues[submit.model]
        if submit.attempt > 1 or not submit.block_hashes:
            return
        turn = request.turn = pool.sessions.came(submit, request.blob, queue.weight(request.path), now)
        if not turn.kept_tokens:
            return
        found = any(
            pool.cached_tokens(submit, worker) >= turn.kept_tokens - turn.kept_tokens % worker.capacity.block_size
            for worker in pool.candidates.holders(submit)
        )
        self.cluster.counters["lease_found" if found else "lease_broken"] += 1
        if found:
            queue.charge_kept(request.path, turn.cost)

    def submit(self, request: Request, now: float) -> None:
        """Let a request wait for a turn: its first attempt, or a later one."""
        cluster, model = self.cluster, request.submit.model
        pool, queue = cluster.pools[model], cluster.queues[model]
        pool.lengths.expect(request, pool.shares)
        request.wait_mark = queue.clock.mark(request.path, queue.class_key(request), now)
        queue.push(request, not cluster.draining or cluster.can_run(request), pool.fastest_tokens_per_s())
        if not paused_turns.begin(request, pool, queue, now):
            came(request, pool, queue, now)

    def finished(self, request: Request, worker: Worker, output_tokens: int, now: float) -> None:
        """Learn from a finished request. `Cluster.end` is to follow. `output_tokens`: over all choices."""
        pool, queue = self.cluster.pools[request.submit.model], self.cluster.queues[request.submit.model]
        queue.learn(request, output_tokens)
        pool.traffic.finished(request.id, output_tokens, now)
        pool.finished += 1
        pool.breakers.worked(worker.alone, request.failed_on)

    def failed(self, request: Request, worker: Worker, reason: Interrupt, now: float) -> str:
        """Count a failed attempt against its worker or pair of workers. Returns which of them gets no work for a while:
        "workers", "pairs", or an empty string."""
        pool, placed_at = self.cluster.pools[request.submit.model], request.attempt_progress.placed_at
        if reason is Interrupt.ENGINE_ERROR:
            key, kind = worker.alone, "workers"
            request.failed_on = (*request.failed_on[-FAILURES_KEPT:], key)
        elif reason is Interrupt.TRANSFER_FAILED:
            key, kind = (request.prefill_incarnation, request.decode_incarnation), "pairs"
        else:
            return ""
        if not pool.breakers.failed(key, placed_at, now):
            return ""
        self.cluster.unbind_without_pair(pool, now)
        return kind

    # --- workers --------------------------------------------------------------------------------------------------------

    def worker_up(self, worker: Worker, now: float) -> None:
        """Add a worker, also one of a model that was not known. `Cluster.refresh_eligibility` is to follow, once what it brings
        along is counted."""
        cluster, hello = self.cluster, worker.hello
        worker.where = cluster.where
        pool = cluster.pools.get(hello.model)
        if pool is None:
            pool = cluster.pools[hello.model] = Pool(hello.model, cluster.limits.placement, cluster.limits.steps)
        pool.add(worker)
        pool.trials.changed_at = now
        queue = cluster.queues.setdefault(hello.model, WaitQueue(cluster.limits))
        pool.shares.reweigh(queue.fair.weights)
        pool.lengths = queue.lengths
        queue.attention_tokens = queue.attention_tokens or hello.attention_tokens
        if hello.role is Role.PREFILL:
            queue.step_tokens = worker.capacity.step_tokens
        cluster.workers[worker.incarnation] = worker

    def worker_down(self, worker: Worker, now: float) -> None:
        """Remove a worker. `Cluster.interrupt` is to follow for each request that cannot go on without it, and then
        `Cluster.refresh_eligibility`."""
        cluster, model = self.cluster, worker.hello.model
        del cluster.workers[worker.incarnation]
        cluster.draining.pop(worker.incarnation, None)
        cluster.unbind_all(worker)
        cluster.pools[model].remove(worker, now)
        cluster.pools[model].trials.changed_at = now
        worker.leave()
        for step, requests in worker.steps.values():
            for chunk, request in zip(step.chunks, requests, strict=True):
                cluster.queues[model].skipped(request, chunk)

    def step_done(self, worker: Worker, done: StepDone, now: float) -> EndedStep | None:
        """A worker has computed a step, or the part of it that still was of use. None: the step is not known."""
        asked, requests = worker.end_step(done.step_id)
        if not asked:
            return None
        cluster, model = self.cluster, worker.hello.model
        pool, queue = cluster.pools[model], cluster.queues[model]
        if done.computed != asked:
            computed = {(chunk.request_id, chunk.attempt) for chunk in done.computed}
            for chunk, request in zip(asked, requests, strict=True):
                if (chunk.request_id, chunk.attempt) not in computed:
                    queue.skipped(request, chunk)
        pool.changed(worker)
        pool.wakeups.has_own_work(worker)
        prompts_done = []
        tokens = 0
        for chunk in done.computed:
            tokens += chunk.length
            if (done_request := self._computed(worker, chunk, now)) is not None:
                prompts_done.append(done_request)
        if tokens and done.step_ms > 0:
            pool.measure(worker, tokens, done.step_ms)
        return EndedStep(asked, prompts_done)

    def _computed(self, worker: Worker, chunk: Chunk, now: float) -> Request | None:
        """Count a computed chunk. Returns its request if that was the last one of its prompt."""
        request = self.cluster.current(chunk.request_id, chunk.attempt)
        if request is None or (progress := request.attempt_progress).prefill_incarnation != worker.incarnation:
            return None
        pool, queue = self.cluster.pools[request.submit.model], self.cluster.queues[request.submit.model]
        progress.computed_tokens += chunk.length
        queue.clock.computed(request.path, chunk.length)
        left = request.submit.prompt_tokens - progress.computed_tokens
        queue.line.count_uncomputed(request, max(left, 0))
        if request.state is not RequestState.PREFILLING or left > 0:
            return None
        pool.traffic.computed(request.id, request.cached_tokens, now)
        if not request.first_token_at:
            request.first_token_at = now
            queue.projection.margins.came(request, now)
        request.fire(Trigger.PROMPT_DONE, now)
        if request.decode_incarnation == worker.incarnation:
            pool.breakers.worked((worker.incarnation, worker.incarnation))
            pool.stream_begins(worker, request.key)
            request.fire(Trigger.HANDED_OVER, now)
        return request

    def cache_miss(self, worker: Worker, request: Request, miss: CacheMiss, now: float) -> None:
        """Put back the part of a prompt that was believed cached, but that the worker does not have. It is computed and charged
        after all."""
        submit, size = request.submit, worker.capacity.block_size
        pool, queue = self.cluster.pools[submit.model], self.cluster.queues[submit.model]
        if miss.fetch_failed and isinstance(worker, PrefillWorker):
            worker.pause_fetches(request.decode_incarnation, now)
        hashes = usable_hashes(submit, size)
        pool.locality.forget(worker.incarnation, hashes, miss.cached_tokens // size)
        request.cached_tokens = request.attempt_progress.computed_tokens = miss.cached_tokens
        queue.put_back(request, miss.cached_tokens)
        queue.line.count_uncomputed(request, submit.prompt_tokens - miss.cached_tokens)
        worker.placed[request.id] = request
        worker.expect(request)
        pool.wakeups.has_own_work(worker)

    def handed_over(self, request: Request, transfer_ms: float, now: float) -> None:
        """A request's KV is on its decode worker."""
        cluster, pool = self.cluster, self.cluster.pools[request.submit.model]
        prefill, decode = cluster.workers[request.prefill_incarnation], cluster.workers[request.decode_incarnation]
        if not decode.is_same_process(prefill):
            blocks = request.attempt_progress.sent_blocks
            pool.hand_overs.measured(prefill.hello.host, decode.hello.host, blocks, transfer_ms)
        breakers = pool.breakers
        breakers.worked((request.prefill_incarnation, request.decode_incarnation))
        breakers.worked((request.prefill_incarnation, NOBODY), request.failed_on)
        pool.stream_begins(decode, request.key)
        request.fire(Trigger.HANDED_OVER, now)

    def progress(self, worker: DecodeWorker, done: DecodeProgress, now: float) -> None:
        """A decode worker has run steps."""
        cluster, admission = self.cluster, worker.admission
        for joined in done.joined:
            admission.joined((joined.request_id, joined.attempt), joined.step)
        outlived(cluster, worker, admission.reached(done.steps))
        worker.steps_done = done.steps
        self._time_steps(worker, done, now)
        for shared in done.prefixes:
            admission.shares((shared.request_id, shared.attempt), chains(shared.parts))
        charge_decode(cluster, worker, now)
        was_short, admission.short = admission.short, done.short_blocks > 0 and cluster.limits.kv_overcommit > 1
        if admission.short:
            relieve(cluster, worker, done.short_blocks, now)
            return
        give_back(cluster, worker, now)
        if done.joined or done.prefixes or was_short:
            # A running attempt has a known end, so it counts for less than a pending one, which may join at any time.
            cluster.pools[worker.hello.model].freed(worker)

    def _time_steps(self, worker: DecodeWorker, done: DecodeProgress, now: float) -> None:
        """Record how long a decode worker's steps took."""
        steps, sequences = done.timed_steps, done.timed_sequences
        if not steps <= sequences <= steps * worker.capacity.max_seqs or not steps * done.timed_ms:
            return
        pool = self.cluster.pools[worker.hello.model]
        means = sequences / steps, done.timed_ms / steps
        worker.measure_decode(*means)
        worker.measured_at = pool.finished
        if worker.hello.process:
            pool.measure_mixed(worker, steps, *means)
            return
        if pool.targets.used:
            worker.step_fit.add(*means)
            pool.freed(worker)  # its batch may be larger now
            pool.reassign(now)
