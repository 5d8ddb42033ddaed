"""The loop of events: arrivals, steps, hand-overs, ends; and the coordinator's decisions after each.

    outcome = Simulator(profile, Layout(3, 5), sent).run()

What is decided is production code or follows it line by line: the order of chunks (`order`), the composition of steps (`prefill`),
admission to decode workers (`room`), the choice of workers (`coordinator.score`). Messages, billing and ledgers are left out, and
so is what only the full core has: room kept for bypassed requests, circuit breakers, deadlines, shedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, Final, NamedTuple

from coordinator.events import Limits
from coordinator.placement.steps import MOVES_MAX
from coordinator.waiting.queue_keys import class_key, classes_without_room, is_class
from tuning.advise import Workers
from tuning.profile import Profile
from tuning.simulator import failures
from tuning.simulator.batch import Batch
from tuning.simulator.caches import better_worker, cached_tokens, remember
from tuning.simulator.cores import DecodeCores, PrefillCores
from tuning.simulator.gaps import Gaps
from tuning.simulator.job import NOT_YET, Job, Sent
from tuning.simulator.order import order_for
from tuning.simulator.outcome import Outcome, outcome_of
from tuning.simulator.prefill import PrefillWorker, compose
from tuning.simulator.room import Room

_STEP, _ARRIVED, _END, _DOWN, _UP = range(5)
"""Kinds of events."""
CACHE_BLOCK_TOKENS: Final = 512


class Failure(NamedTuple):
    """A worker is lost, and one in its place comes `down_s` later."""

    at_s: float
    worker: int
    """Prefill workers are counted from 0, then decode workers, then mixed ones."""
    down_s: float


@dataclass(frozen=True)
class Options:
    limits: Limits = field(default_factory=Limits)
    step_tokens: int = 0
    """0: the profile's."""
    seqs_max: int = 0
    """Of a decode batch; 0: the profile's."""
    block_tokens: int = CACHE_BLOCK_TOKENS
    """Of each of `Sent.blocks`."""
    slow: tuple[tuple[int, float], ...] = ()
    """Stragglers: worker, as in `Failure`, and how many times as long its steps take."""
    failures: tuple[Failure, ...] = ()


class Simulator:
    def __init__(
        self, profile: Profile, workers: Workers, sent: Sequence[Sent], options: Options | None = None
    ) -> None:
        """`sent`: in the order of time."""
        self.profile, self.workers, self.options = profile, workers, options or Options()
        limits = self.options.limits
        self.step_tokens = self.options.step_tokens or profile.step_tokens
        self.jobs = [Job(number, one, self.step_tokens, limits.priority_classes) for number, one in enumerate(sent)]
        self.order = order_for(self.jobs, limits)
        self.gaps = Gaps()
        self.closed: dict[int, Job] = {}
        """Classes for which no decode worker has room."""
        self.classes: dict[int, int] = {}
        """How many wait under each class's key."""
        self.now = 0.0
        self.blocked_s = 0.0
        """Time in which something waited for room on decode workers."""
        self._steps_max = limits.steps_in_flight
        self._weights = limits.placement
        self._due: list[tuple[float, int, int, Any, Any]] = []
        self._pushed = 0
        self._waiting = 0
        """Requests that are not placed."""
        self._wait_s_max = limits.queue_wait_s_max
        self._news = False
        """Something may be possible that was not."""
        self._tokens_per_s = self.step_tokens / profile.prefill.step_ms(self.step_tokens, 0.0) * 1000
        self._saved_s = profile.mixed_saved_ms / 1000
        self._make_workers()
        host = profile.host
        self._gap_s, self._join_s = host.step_gap_ms / 1000, host.join_ms / 1000
        transfer = profile.transfer
        self._latency_s = transfer.latency_ms / 1000
        self._token_s = transfer.bytes_per_token / transfer.bytes_per_ms / 1000
        for failure in self.options.failures:
            self._at(failure.at_s, _DOWN, failure)

    def _make_workers(self) -> None:
        profile, slow = self.profile, dict(self.options.slow)
        prefill, decode, mixed = self.workers
        capacity = profile.decode_capacity
        seqs_max = self.options.seqs_max or capacity.seqs_max
        self.batches: list[Batch] = []
        self.prefill: list[PrefillWorker] = []
        for number in range(prefill):
            self.prefill.append(PrefillWorker(number, profile.prefill_capacity, None, slow.get(number, 1.0)))
        for number in range(prefill, prefill + decode + mixed):
            room = Room(capacity.kv_blocks, capacity.block_size)
            batch = Batch(number, profile.decode, room, seqs_max, self.gaps, slow.get(number, 1.0))
            self.batches.append(batch)
            if number >= prefill + decode:
                self.prefill.append(PrefillWorker(number, capacity, batch, slow.get(number, 1.0)))
        prefill_cores = profile.prefill_cores if prefill > profile.prefill_cores else 0
        self._prefill_cores = PrefillCores(
            prefill_cores, lambda at_s, worker, version: self._at(at_s, _STEP, worker, version)
        )
        self._decode_cores = DecodeCores(profile.decode_cores if decode > profile.decode_cores else 0)

    def _at(self, when_s: float, kind: int, what: Any, also: Any = None) -> None:
        self._pushed += 1
        heappush(self._due, (when_s, self._pushed, kind, what, also))

    def run(self) -> Outcome:
        due = self._due
        handlers = self._step_ended, self._arrived, self._sequence_ended, self._lost, self._came
        jobs = iter(self.jobs)
        job = next(jobs, None)
        while job is not None or due:
            if job is not None and (not due or job.at_s <= due[0][0]):
                self._pass(job.at_s)
                self._submit(job)
                job = next(jobs, None)
            else:
                when_s, _, kind, what, also = heappop(due)
                self._pass(when_s)
                handlers[kind](what, also)
            if self._news:
                self._schedule()
        host = self.profile.host
        return outcome_of(self.jobs, self.prefill, self.batches, self.gaps, host.request_ms, host.request_token_ms)

    def _pass(self, now: float) -> None:
        if self.closed:
            self.blocked_s += now - self.now
        self.now = now

    # --- the queue and placement ------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        tokens = job.prompt + job.output_max - 1
        fits = any(tokens <= batch.room.kv_tokens for batch in self.batches)
        if fits and self._waiting < self.options.limits.queue_requests_max:
            self.enqueue(job)

    def enqueue(self, job: Job) -> None:
        self._waiting += 1
        self.order.push(job, job.key)
        self.classes[job.key] = self.classes.get(job.key, 0) + 1
        self._news = True

    def _leaves_class(self, key: int) -> None:
        self._waiting -= 1
        left = self.classes[key] - 1
        if left:
            self.classes[key] = left
        else:
            del self.classes[key]

    def _schedule(self) -> None:
        """As `coordinator.placement.schedule`: prefill workers with a free step are asked, the one with the least to do first."""
        self._news = False
        asked: set[int] = set()
        while True:
            best, best_rank = None, (0, 0, 0)
            for worker in self.prefill:
                if len(worker.steps) < self._steps_max and worker.number not in asked and worker.up:
                    if not worker.placed and not self.classes:
                        continue
                    rank = (worker.tokens_in_flight, worker.tokens_forwarded, worker.number)
                    if best is None or rank < best_rank:
                        best, best_rank = worker, rank
            if best is None:
                return
            step = compose(best, self.order, self, self.step_tokens, self.profile.prefill)
            if step is None:
                asked.add(best.number)
            else:
                best.steps.append(step)
                self._start(best)

    def place(self, job: Job, worker: PrefillWorker) -> bool:
        if self.now - job.at_s > self._wait_s_max and not job.attempt:
            self._leaves_class(job.key)
            self.order.remove(job)
            return False
        if job.blocks and is_class(job.key) and job.moves < MOVES_MAX and self._binds(job, worker):
            return False
        decode = self._decode_for(job, worker) if worker.fits(job) else None
        if decode is None:
            self._refuse(job, worker)
            return False
        self._leaves_class(job.key)
        if job.blocks:
            job.cached = job.dispatched = cached_tokens(job, worker, self.options.block_tokens)
        job.prefill, job.decode, job.placed_s = worker, decode, self.now
        worker.hold(job)
        decode.room.place(
            job.number, job.prompt, job.output_max, decode.steps_begun(self.now) if decode.room.exact else 0
        )
        decode.held_seqs += 1
        return True

    def _refuse(self, job: Job, worker: PrefillWorker) -> None:
        if not worker.fits(job):
            worker.stuck[job.key] = job
            return
        job.no_room = True
        key = class_key(job.demand)
        self.closed.update((one, job) for one in (key, *classes_without_room(job.demand, self.classes)))
        if job.key != key:
            self._rekey(job, key)

    def _binds(self, job: Job, worker: PrefillWorker) -> bool:
        waiting = self._waiting / len(self.prefill)
        better = better_worker(
            job, worker, self.prefill, self.options.block_tokens, self._tokens_per_s, waiting, self._weights
        )
        if better is None:
            return False
        job.moves += 1
        self._rekey(job, better.bound_key)
        return True

    def _rekey(self, job: Job, key: int) -> None:
        self._leaves_class(job.key)
        self._waiting += 1
        job.key = key
        self.classes[key] = self.classes.get(key, 0) + 1
        self.order.move(job, key)

    def _decode_for(self, job: Job, worker: PrefillWorker) -> Batch | None:
        """The least full one with room, as by `coordinator.score`; a mixed worker keeps what it computes, if it has room."""
        own = worker.batch
        if own is not None and self._has_room(own, job):
            return own
        best, best_rank = None, (0.0, 0, 0)
        for batch in self.batches:
            if batch is own or not self._has_room(batch, job):
                continue
            full = max(batch.room.taken / batch.room.kv_blocks, batch.held_seqs / batch.seqs_max)
            rank = (full, batch.forwarded, batch.number)
            if best is None or rank < best_rank:
                best, best_rank = batch, rank
        return best

    def _has_room(self, batch: Batch, job: Job) -> bool:
        if not batch.up or batch.held_seqs >= batch.seqs_max:
            return False
        room = batch.room
        if not room.exact and room.wholes + room.whole(job.prompt, job.output_max) <= room.kv_blocks:
            return True
        return room.fits(job.prompt, job.output_max, batch.steps_begun(self.now))

    # --- prefill ----------------------------------------------------------------------------------------------------------

    def _start(self, worker: PrefillWorker) -> None:
        if worker.running or not worker.steps:
            return
        took_s = worker.steps[0].took_s + self._gap_s
        batch = worker.batch
        if batch is None:
            worker.busy_s += took_s
            self._prefill_cores.start(worker, took_s, self.now)
            return
        batch.sync(self.now)
        if batch.sequences:
            took_s += batch.step_s() - self._saved_s
        worker.running = True
        worker.version += 1
        worker.busy_s += took_s
        self._at(batch.stretched_step(self.now, took_s), _STEP, worker, worker.version)
        self._push_end(batch)

    def _step_ended(self, worker: PrefillWorker, version: int) -> None:
        if version != worker.version:
            return
        step = worker.steps.popleft()
        self._prefill_cores.stop(worker, self.now)
        worker.tokens_in_flight -= step.tokens
        worker.tokens_forwarded += step.tokens
        for job, start, tokens in step.chunks:
            if job.prefill is not worker:
                continue  # its attempt was interrupted
            if job.decode is not worker.batch:
                worker.send(tokens, self.now, self._token_s)
            if start + tokens == job.prompt:
                self._prompt_done(job, worker)
        self._start(worker)
        self._news = True

    def _prompt_done(self, job: Job, worker: PrefillWorker) -> None:
        job.first_token, job.last_s = True, self.now
        if job.first_s == NOT_YET:
            job.first_s = self.now
        if job.blocks:
            remember(job, worker, self.options.block_tokens, self.profile.prefill_capacity.kv_tokens)
        if job.output <= 1:
            worker.let_go(job)
            self._release(job)
        elif worker.batch is job.decode:
            self._arrived(job, job.attempt)
        else:
            self._at(max(worker.link_free_s, self.now) + self._latency_s, _ARRIVED, job, job.attempt)

    def _arrived(self, job: Job, attempt: int) -> None:
        """Its KV is on the decode worker."""
        if attempt != job.attempt:
            return
        job.prefill.let_go(job)
        job.left_s = self.now
        batch: Batch = job.decode
        batch.join(job, self.now + (self._join_s if batch is not job.prefill.batch else 0.0))
        job.join_s = batch.begin_s
        if batch.room.exact:
            self._freed(batch)
        self._news = True
        for other in (*self._decode_cores.changed(batch, self.now), batch):
            self._push_end(other)

    # --- decode -----------------------------------------------------------------------------------------------------------

    def _push_end(self, batch: Batch) -> None:
        batch.version += 1
        when_s = batch.next_end_s()
        if when_s < inf:
            self._at(when_s, _END, batch, batch.version)

    def _sequence_ended(self, batch: Batch, version: int) -> None:
        if version != batch.version:
            return
        for job in batch.ended():
            job.end_s = self.now
            self._release(job)
        for other in (*self._decode_cores.changed(batch, self.now), batch):
            self._push_end(other)

    def _release(self, job: Job) -> None:
        """It has ended, or its attempt has."""
        batch: Batch = job.decode
        if job.end_s == NOT_YET:
            job.end_s = self.now
        batch.held_seqs -= 1
        batch.room.release(job.number)
        self.order.ended(job, job.output)
        self._freed(batch)

    def _freed(self, batch: Batch) -> None:
        """Classes are open again whose first job would fit."""
        fits: dict[int, bool] = {}
        for key, job in list(self.closed.items()):
            if job.number not in fits:
                fits[job.number] = job.prefill is not None or self._has_room(batch, job)
            if fits[job.number]:
                del self.closed[key]
                self._news = True

    # --- failures ---------------------------------------------------------------------------------------------------------

    def _lost(self, failure: Failure, _: object) -> None:
        failures.lose(self, failure.worker)
        self._at(self.now + failure.down_s, _UP, failure)

    def _came(self, failure: Failure, _: object) -> None:
        failures.come_back(self, failure.worker)
        self._news = True

    def stop_worker(self, worker: PrefillWorker) -> None:
        worker.up = False
        self._prefill_cores.stop(worker, self.now)
        worker.steps.clear()
        worker.tokens_in_flight = 0
        worker.begun = None
        worker.cache.clear()
