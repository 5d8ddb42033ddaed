"""The loop of events: arrivals, steps, hand-overs, ends; and the scheduler's decisions after each.

    outcome = Player(profile, Workers(3, 5), sent).run()

Admission, the order of chunks, the composition of steps, room in decode, and the choice of workers are production code. The
workers are virtual: a decode worker's batch advances in closed form between joins and ends. Messages, bills and ledgers are
left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any

import msgspec

from coordinator.admission import admit, cannot_serve
from coordinator.state import State
from decode_worker.progress import REPORT_S
from engine.kv.split import prefill_blocks
from lab.advise import Workers
from lab.play.batch import VirtualBatch
from lab.play.caches import Namer, Parts, PlayedCache, names
from lab.play.cores import PlayedHost
from lab.play.options import RunOptions
from lab.play.outcome import PlayedOutcome, outcome_of
from lab.play.request import NOT_YET, PlayedRequest, Sent
from lab.play.workers import PlayedBatch, PlayedPrefill, computed
from lab.profile import HostCost, Profile, ProfileCapacity
from proto.limits import HASH_BYTES, PROTOCOL_VERSION
from proto.messages import Hello, Role, Step, StepDone, Submit
from proto.parts import Capacity
from proto.sampling import Sampling
from scheduler.decisions import Dispatched, Interruption, Placement, Withdrawn
from scheduler.lifecycle import RequestState, Trigger
from scheduler.placement import paused_turns
from scheduler.request import Request
from scheduler.workers.worker import ROUND_TRIP_S, DecodeWorker, PrefillWorker, Worker

MODEL = "m"
SELDOM_S = 0.5  # between two reports of a decode worker that has room for all, while no report decides anything
Handler = Callable[[Any, Any], None]


class Player:
    def __init__(
        self, profile: Profile, workers: Workers, sent: Sequence[Sent], options: RunOptions | None = None
    ) -> None:
        """`sent`: in the order of time."""
        self._options = options = options or RunOptions()
        self._profile, self.now = profile, 0.0
        self._step_tokens = options.step_tokens or profile.step_tokens
        limits = replace(options.limits, step_tokens=self._step_tokens)
        self.jobs = [PlayedRequest(number, one) for number, one in enumerate(sent)]
        self._one_tenant = len({job.path for job in self.jobs}) < 2
        self._state = State(limits)
        self._scheduler, self._cluster = self._state.scheduler, self._state.cluster
        self._prefill: dict[int, PlayedPrefill] = {}
        self._decode: dict[int, PlayedBatch] = {}
        self._caches: dict[int, PlayedCache] = {}
        self._namer = Namer(profile.prefill_capacity.block_size, options.block_tokens)
        self._parts: dict[int, Parts] = {}  # what live requests may leave in caches, by their numbers
        most_blocks = self._shared_blocks(max((one.prompt_tokens for one in sent), default=0))
        self._shared = names(0, 0, most_blocks)  # blocks that all prefill workers have, by `RunOptions.hit_rate`
        self._start_workers(workers)
        self._pool, self._queue = self._cluster.pools[MODEL], self._cluster.queues[MODEL]
        self.interrupted = 0  # streams that were cut short
        self._due: list[tuple[float, int, Handler, Any, Any]] = []
        self._pushed, self._wakes_at = 0, inf
        self._host = PlayedHost(profile, self._push_step, self._push_end)
        host, transfer = profile.host, profile.transfer
        self._gap_s, self._join_s = host.step_gap_ms / 1000, host.join_ms / 1000
        self._request_s, self._request_token_s = host.request_ms / 1000, host.request_token_ms / 1000
        self._latency_s = transfer.latency_ms / 1000
        self._token_s = transfer.bytes_per_token / transfer.bytes_per_ms / 1000
        self._following = {one.follows: number for number, one in enumerate(sent) if one.follows >= 0}

    # --- workers --------------------------------------------------------------------------------------------------------

    def _start_workers(self, workers: Workers) -> None:
        profile = self._profile
        for _ in range(workers.prefill):
            self._start_prefill(profile.prefill_capacity, "", None)
        for number in range(workers.decode):
            self._start_decode(profile.decode_capacity, "", workers.prefill + number)
        for number in range(workers.mixed):
            whole, name = profile.decode_capacity, f"mixed-{number}" if self._options.slices else ""
            part = prefill_blocks(whole.kv_blocks, -(-whole.context_tokens // whole.block_size))
            rest = msgspec.structs.replace(whole, kv_blocks=max(whole.kv_blocks - part, 1))
            batch = self._start_decode(rest, name, workers.prefill + workers.decode + number)
            batch.is_mixed = True
            self._start_prefill(msgspec.structs.replace(whole, kv_blocks=part), name, batch)
        self._cluster.refresh_eligibility(MODEL, 0.0)

    def _shared_blocks(self, prompt_tokens: int) -> int:
        return int(self._options.hit_rate * prompt_tokens) // self._profile.prefill_capacity.block_size

    def _start_prefill(self, capacity: ProfileCapacity, process: str, batch: PlayedBatch | None) -> None:
        number = batch.number if batch is not None else len(self._prefill)
        core = PrefillWorker(self._hello(Role.PREFILL, 1 + number, capacity, process))
        self._scheduler.worker_up(core, 0.0)
        if self._shared:
            self._cluster.pools[MODEL].locality.learn(core.incarnation, self._shared, b"")
        self._prefill[core.incarnation] = PlayedPrefill(number, core, self._profile.prefill, batch)
        self._caches[core.incarnation] = PlayedCache()

    def _start_decode(self, capacity: ProfileCapacity, process: str, number: int) -> PlayedBatch:
        seqs_max = self._options.seqs_max or capacity.seqs_max
        capacity = msgspec.structs.replace(capacity, seqs_max=seqs_max)
        core = DecodeWorker(self._hello(Role.DECODE, 1_000_001 + number, capacity, process))
        self._scheduler.worker_up(core, 0.0)
        self._decode[core.incarnation] = batch = PlayedBatch(number, core, self._profile.decode)
        self._caches[core.incarnation] = PlayedCache()
        return batch

    def _hello(self, role: Role, incarnation: int, of: ProfileCapacity, process: str) -> Hello:
        computes = role is Role.DECODE and self._options.stall_share > 0
        capacity = Capacity(of.kv_blocks, of.block_size, of.seqs_max, 1 << 20, self._step_tokens, computes, True)
        attention = self._profile.attention_tokens
        name, pid = f"{role}-{incarnation}", incarnation % 1_000_000
        return Hello(
            PROTOCOL_VERSION, role, incarnation, name, MODEL, "f", "tcp://w:1", capacity, process, pid,
            attention_tokens=attention, process=process,
        )  # fmt: skip

    # --- the loop -------------------------------------------------------------------------------------------------------

    def _at(self, when_s: float, handler: Handler, what: object = None, also: object = None) -> None:
        self._pushed += 1
        heappush(self._due, (when_s, self._pushed, handler, what, also))

    def run(self) -> PlayedOutcome:
        due, jobs = self._due, (job for job in self.jobs if job.sent.follows < 0)
        job = next(jobs, None)
        while job is not None or due:
            if job is not None and (not due or job.at_s <= due[0][0]):
                self.now = job.at_s
                self._talk(job)
                job = next(jobs, None)
            else:
                self.now, _, handler, what, also = heappop(due)
                handler(what, also)
            self._decide()
        host = HostCost() if self._host.talks else self._profile.host
        return outcome_of(
            self.jobs, self._prefill.values(), self._decode.values(), host.request_ms, host.request_token_ms
        )

    def _decide(self) -> None:
        """Lets the scheduler decide, if something may have changed what it decides."""
        pool, line, now = self._pool, self._queue.line, self.now
        if now >= line.nothing_due_before:
            self._expire()
        wakeups, decisions = pool.wakeups, self._cluster.decisions
        if wakeups.due or wakeups.closed or pool.paused or self._cluster.spread.jobs or decisions:
            while True:
                self._carry_out(self._scheduler.decide(now))
                if not (wakeups.go_on_at_once or self._cluster.spread.jobs or self._cluster.decisions):
                    break
            self._state.out.clear()
        if line.since is None and not pool.paused:
            return
        wakes_at = min(line.nothing_due_before, paused_turns.next_resume(pool) if pool.paused else inf)
        if wakes_at < self._wakes_at:
            self._wakes_at = wakes_at
            self._at(max(wakes_at, now), self._wake)

    def _wake(self, _: object, __: object) -> None:
        self._wakes_at = inf

    def _expire(self) -> None:
        pool, queue = self._pool, self._queue
        for request in queue.line.overdue(self.now, pool.fastest_tokens_per_s(), pool.uncached_tokens):
            self._end(request, Trigger.EXPIRE, request.submit.resumed_tokens)

    def _carry_out(self, decisions: Sequence[object]) -> None:
        for decision in decisions:
            match decision:
                case Dispatched(worker, step, requests):
                    played = self._prefill.get(worker.incarnation)
                    if played is None:
                        self._compute_suffix(self._decode[worker.incarnation], step, requests)
                    else:
                        played.order(step, requests)
                        self._start(played)
                case Placement(request, prefill, decode):
                    self._placed(request, self._prefill.get(prefill.incarnation))
                    batch = self._decode[decode.incarnation]
                    if self.now + REPORT_S < batch.reports_at < inf and not batch.has_plenty:
                        self._report_at(batch, max(batch.said_at + REPORT_S, self.now))
                case Withdrawn(key):
                    self._release_everywhere(key)
                case Interruption(request):
                    self.interrupted += 1
                    self._at(self.now, self._resubmit, request)

    def _placed(self, request: Request, worker: PlayedPrefill | None) -> None:
        """Notes that a request has room. Blocks that its prefill worker has and its decode worker lacks are sent; others are
        fetched, before its first step."""
        job, progress = self._job(request), request.attempt_progress
        job.placed_s = self.now if job.placed_s == NOT_YET else job.placed_s
        job.cached = request.cached_tokens
        if worker is None or not request.submit.block_hashes:
            return
        if tokens := progress.fetched_tokens:
            took_s = ROUND_TRIP_S + tokens * self._token_s
            worker.fetched_s[request.id] = self.now + took_s
            worker.core.measure_fetch(tokens, 1000 * took_s)
        has_blocks = (request.cached_tokens - progress.fetched_tokens) // worker.block_size
        new_blocks = request.submit.prompt_tokens // worker.block_size - request.cached_tokens // worker.block_size
        worker.send(
            min(max(progress.sent_blocks - new_blocks, 0), has_blocks) * worker.block_size, self.now, self._token_s
        )

    def _keep(self, worker: Worker, job: PlayedRequest, tokens: int) -> None:
        """Keeps the first blocks of a request's prompt and answer in a worker's cache, and tells the scheduler."""
        parts, left = self._parts.get(job.number), tokens // worker.capacity.block_size * HASH_BYTES
        if not parts:
            return
        found = []
        for part, blocks in parts:
            found.append((part, blocks[:left]))
            left -= len(found[-1][1])
        room = worker.capacity.kv_blocks
        if isinstance(worker, PrefillWorker):
            room -= worker.kv_blocks_taken
        else:
            batch = self._decode[worker.incarnation]
            room -= batch.held_blocks(batch.steps)
        inserted, evicted = self._caches[worker.incarnation].keep(found, room)
        if inserted or evicted:
            self._pool.locality.learn(worker.incarnation, inserted, evicted)

    def _job(self, request: Request) -> PlayedRequest:
        return self.jobs[int(request.id)]

    # --- requests -------------------------------------------------------------------------------------------------------

    def _talk(self, job: PlayedRequest) -> None:
        if self._host.talks:
            alone_s = self._request_s + self._request_token_s * job.prompt
            self._at(self._host.talk(alone_s, self.now), self._talked, job)
        else:
            self._submit(job)

    def _talked(self, job: PlayedRequest, _: object) -> None:
        self._host.talked(self.now)
        self._submit(job)

    def _submit(self, job: PlayedRequest) -> None:
        state, now, sent = self._state, self.now, job.sent
        job.submitted_s, state.now = now, now
        hashes = b""
        if sent.session or sent.blocks:
            self._parts[job.number] = parts = self._namer.parts(sent, job.number)
            whole = b"".join(blocks for _, blocks in parts)
            hashes = whole[: sent.prompt_tokens // self._profile.prefill_capacity.block_size * HASH_BYTES]
        elif self._shared:
            hashes = self._shared[: self._shared_blocks(sent.prompt_tokens) * HASH_BYTES]
        submit = Submit(
            str(job.number), 1, MODEL, job.prompt, Sampling(sent.output_tokens), 1,
            tenant=sent.tenant, priority_class=sent.priority, block_hashes=hashes,
            hash_block_size=self._profile.prefill_capacity.block_size if hashes else 0,
        )  # fmt: skip
        self._pool.traffic.arrived(submit, now)
        refusal = cannot_serve(submit, self._pool, state.limits, now)
        if refusal is None:
            request = Request(submit.request_id, 0, submit, b"", now, now, job.path)
            request.fingerprint, request.counted = job.number, True
            self._cluster.set_targets(request)
            refusal = admit(state, request)
        if refusal is not None:
            self._over(job)
            return
        state.alive[MODEL] += 1
        self._scheduler.admit(request, now)
        self._scheduler.submit(request, now)

    def _resubmit(self, request: Request, _: object) -> None:
        """Sends a request again whose stream was cut short, with the tokens that it has emitted."""
        if request.state is not RequestState.INTERRUPTED:
            return
        job, submit = self._job(request), request.submit
        emitted = job.sent.output_tokens - job.output
        job.attempt = submit.attempt + 1
        again = msgspec.structs.replace(submit, attempt=job.attempt, prompt_tokens=job.prompt, resumed_tokens=emitted)
        self._cluster.withdraw(request, self.now)
        request.renew(again, b"")
        request.fire(Trigger.RESUBMIT, self.now)
        self._scheduler.submit(request, self.now)

    def _release_everywhere(self, key: tuple[str, int]) -> None:
        """Frees what an attempt that is over has on workers."""
        job = self.jobs[int(key[0])]
        for incarnation in list(self._cluster.where.get(key, ())):
            batch = self._decode.get(incarnation)
            emitted = batch.leave(job, self.now) if batch is not None else 0
            if emitted:
                assert batch is not None
                self._queue.emitted(job.path, emitted)
                job.prompt, job.output = job.prompt + emitted, job.output - emitted
                self._host.batch_changed(batch, self.now)
            self._cluster.release(self._cluster.workers[incarnation], key)

    def _end(self, request: Request, trigger: Trigger, output_tokens: int) -> None:
        self._cluster.end(request, trigger, output_tokens, self.now)
        self._state.alive[MODEL] -= 1
        self._over(self._job(request))

    def _over(self, job: PlayedRequest) -> None:
        self._parts.pop(job.number, None)
        following = self._following.get(job.number)
        if following is not None:
            turn = self.jobs[following]
            self._at(self.now + turn.sent.think_s, self._next_turn, turn)

    def _next_turn(self, job: PlayedRequest, _: object) -> None:
        job.comes(self.now)
        self._talk(job)

    # --- prefill --------------------------------------------------------------------------------------------------------

    def _start(self, worker: PlayedPrefill) -> None:
        """Begins the first of its steps, if none runs."""
        if worker.running or not worker.steps:
            return
        worker.after_s = max(worker.free_s - self.now, worker.fetched_in_s(self.now))
        took_s = worker.steps[0].took_s + worker.after_s
        worker.began_s = self.now
        batch = worker.batch
        if batch is None:
            worker.busy_s += took_s
            self._host.start(worker, took_s, self.now)
            return
        # One thread computes, so the prefill step begins when the present decode step has ended, and the next decode step
        # comes after it.
        batch.sync(self.now)
        worker.running, batch.prefill_s = True, took_s
        self._host.mixed_changed(batch, self.now)
        took_s *= self._host.mixed_slower(batch)
        worker.busy_s += took_s + (batch.step_s() if batch.sequences else 0.0)
        ended_s = batch.wait_for(self.now, took_s)
        worker.after_s, worker.began_s = 0.0, ended_s - took_s  # the scheduler hears of the step's own time
        self._push_step(ended_s, worker)
        self._push_end(batch)

    def _push_step(self, ends_s: float, worker: PlayedPrefill) -> None:
        worker.version += 1
        self._at(ends_s, self._step_ended, worker, worker.version)

    def _step_ended(self, worker: PlayedPrefill, version: int) -> None:
        if version != worker.version:
            return
        step, requests, tokens, _ = worker.steps.popleft()
        self._host.stop(worker, self.now)
        if worker.batch is not None:
            worker.batch.prefill_s = 0.0
            self._host.mixed_changed(worker.batch, self.now)
        worker.tokens_forwarded += tokens
        step_ms = 1000 * (self.now - worker.began_s - worker.after_s)
        done = StepDone(step.step_id, computed(step, requests), step_ms, worker.tokens_forwarded)
        ended = self._scheduler.step_done(worker.core, done, self.now)
        assert ended is not None
        worker.core.tokens_forwarded = worker.tokens_forwarded
        worker.send(tokens, self.now, self._token_s)
        for request in ended.prompts_done:
            self._prompt_done(request, worker)
        worker.free_s = self.now + self._gap_s
        self._start(worker)

    def _prompt_done(self, request: Request, worker: PlayedPrefill) -> None:
        job = self._job(request)
        job.last_s = self.now
        if job.first_s == NOT_YET:
            job.first_s = self.now
        self._keep(worker.core, job, job.sent.prompt_tokens)
        if job.output <= 1:
            self._finished(request, job, worker.core)
        else:
            latency_s = self._latency_s * self._host.hand_over_slower()
            arrives_s = max(worker.link_free_s, self.now) + latency_s + self._join_s
            self._at(arrives_s, self._arrived, request, request.attempt)

    def _arrived(self, request: Request, attempt: int) -> None:
        """Joins the request to a batch: its KV is on the decode worker."""
        if request.attempt != attempt or request.state is not RequestState.HANDING_OVER:
            return
        job = self._job(request)
        prefill, batch = self._cluster.workers[request.prefill_incarnation], self._decode[request.decode_incarnation]
        self._cluster.release(prefill, request.key)
        self._scheduler.handed_over(request, 1000 * (self.now - job.last_s), self.now)
        self._join(job, batch)

    def _join(self, job: PlayedRequest, batch: PlayedBatch) -> None:
        self._keep(batch.core, job, job.sent.prompt_tokens)
        batch.join(job, self.now)
        if job.join_s == NOT_YET:
            job.join_s = batch.begin_s
        self._host.batch_changed(batch, self.now)
        if batch.reports_at == inf:
            self._report_at(batch, max(batch.said_at + REPORT_S, batch.begin_s + batch.step_s()))

    # --- decode ---------------------------------------------------------------------------------------------------------

    def _compute_suffix(self, batch: PlayedBatch, step: Step, requests: Sequence[Request]) -> None:
        """A decode worker computes the rest of a prompt beside its streams, one after another."""
        [chunk], [request] = step.chunks, requests
        share = self._options.stall_share
        alone_s = chunk.length * self._profile.prefill.step_ms(self._step_tokens, 0.0) / self._step_tokens / 1000
        began_s = max(batch.suffixes_end_s, self.now)
        batch.suffixes_end_s = began_s + alone_s * ((1 + share) / share if batch.sequences else 1.0)
        batch.suffixes += 1
        if batch.suffixes == 1:
            self._stretch(batch, 1 + share)
        self._at(batch.suffixes_end_s, self._suffix_done, batch, (step, request, began_s))

    def _suffix_done(self, batch: PlayedBatch, of: tuple[Step, Request, float]) -> None:
        step, request, began_s = of
        batch.suffixes -= 1
        if not batch.suffixes:
            self._stretch(batch, 1.0)
        step_ms = 1000 * (self.now - began_s)
        done = StepDone(step.step_id, computed(step, (request,)), step_ms, batch.core.tokens_forwarded)
        ended = self._scheduler.step_done(batch.core, done, self.now)
        assert ended is not None
        for request in ended.prompts_done:
            job = self._job(request)
            job.last_s = self.now
            job.first_s = self.now if job.first_s == NOT_YET else job.first_s
            if job.output <= 1:
                self._finished(request, job, batch.core)
            else:
                self._join(job, batch)

    def _stretch(self, batch: PlayedBatch, factor: float) -> None:
        batch.stretch_steps(self.now, factor)
        self._push_end(batch)

    def _report_at(self, batch: PlayedBatch, when_s: float) -> None:
        batch.reports_at = when_s
        self._at(when_s, self._report, batch, when_s)

    def _report(self, batch: PlayedBatch, when_s: float) -> None:
        if when_s != batch.reports_at:
            return
        progress = batch.report(self.now)
        if progress is None:
            self._report_at(batch, batch.begin_s)
            return
        batch.reports_at = inf
        if batch.sequences:
            seldom = self._one_tenant and batch.has_plenty and not self._pool.targets.used
            self._report_at(batch, self.now + (SELDOM_S if seldom else REPORT_S))
        self._scheduler.progress(batch.core, progress, self.now)
        self._carry_out(self._scheduler.take_decisions())

    def _push_end(self, batch: VirtualBatch) -> None:
        batch.version += 1
        when_s = batch.next_end_s()
        if when_s < inf:
            self._at(when_s, self._sequence_ended, batch, batch.version)

    def _sequence_ended(self, batch: PlayedBatch, version: int) -> None:
        if version != batch.version:
            return
        for job in batch.ended():
            self._finished(self._cluster.requests[str(job.number)], job, batch.core)
        self._host.batch_changed(batch, self.now)

    def _finished(self, request: Request, job: PlayedRequest, worker: Worker) -> None:
        """Ends a request with its last token."""
        job.end_s, total = self.now, job.sent.output_tokens
        self._cluster.release(worker, request.key)
        if worker.is_decode:
            self._keep(worker, job, job.sent.prompt_tokens + total - 1)
        self._queue.emitted(job.path, job.output)
        if worker.is_decode:
            worker.tokens_forwarded = self._decode[worker.incarnation].forwarded
        self._scheduler.finished(request, worker, total, self.now)
        self._end(request, Trigger.FINISH, total)
