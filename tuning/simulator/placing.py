"""Keeps the waiting requests and places them, by the coordinator's rules. `cluster` tells it of events and runs what it
decides."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

import msgspec

from engine.kv.split import prefill_blocks
from scheduler.placement.steps import MOVES_MAX
from scheduler.waiting.queue_keys import class_key, classes_without_room, is_class
from scheduler.workers.worker import ROUND_TRIP_S
from tuning.advise import Workers
from tuning.profile import Profile
from tuning.simulator.batch import SimulatedBatch
from tuning.simulator.caches import better_worker, cached_tokens
from tuning.simulator.gaps import Gaps
from tuning.simulator.job import Sent, SimulatedRequest
from tuning.simulator.options import RunOptions
from tuning.simulator.order import order_for
from tuning.simulator.prefill import SimulatedPrefillWorker, compose
from tuning.simulator.room import DecodeRoom


class Placing(ABC):
    def __init__(self, profile: Profile, workers: Workers, sent: Sequence[Sent], options: RunOptions) -> None:
        self.profile, self.options = profile, options
        limits = options.limits
        self.step_tokens = options.step_tokens or profile.step_tokens
        self.jobs: Sequence[SimulatedRequest] = [
            SimulatedRequest(number, one, self.step_tokens, limits.priority_classes) for number, one in enumerate(sent)
        ]
        self.order = order_for(self.jobs, limits, profile.attention_tokens)
        self.gaps = Gaps()
        self.closed: dict[int, SimulatedRequest] = {}  # classes for which no decode worker has room
        self.classes: dict[int, int] = {}  # waiting requests by class key
        self.now = 0.0
        self.news = False  # something may be possible that was not before
        self._waiting = 0
        self._hit_rate = options.hit_rate
        self._wait_s_max = limits.queue_wait_s_max
        self._weights = limits.placement
        transfer = profile.transfer
        self.token_s = transfer.bytes_per_token / transfer.bytes_per_ms / 1000
        self._tokens_per_s = self.step_tokens / profile.prefill.step_ms(self.step_tokens, 0.0) * 1000
        self._make_workers(workers)

    def _make_workers(self, workers: Workers) -> None:
        profile = self.profile
        prefill, decode, mixed = workers
        capacity = profile.decode_capacity
        limits = self.options.limits.steps._replace(tokens=self.step_tokens)
        seqs_max = self.options.seqs_max or capacity.seqs_max
        batches: list[SimulatedBatch] = []
        prefill_workers: list[SimulatedPrefillWorker] = []
        for number in range(prefill):
            prefill_workers.append(SimulatedPrefillWorker(number, profile.prefill_capacity, limits, None))
        for number in range(prefill, prefill + decode + mixed):
            blocks, is_mixed = capacity.kv_blocks, number >= prefill + decode
            if is_mixed:
                part = prefill_blocks(blocks, -(-capacity.context_tokens // capacity.block_size))
                prefill_capacity, blocks = msgspec.structs.replace(capacity, kv_blocks=part), max(blocks - part, 1)
            room = DecodeRoom(blocks, capacity.block_size)
            batch = SimulatedBatch(number, profile.decode, room, seqs_max, self.gaps)
            batch.is_mixed = is_mixed
            batches.append(batch)
            if is_mixed:
                prefill_workers.append(SimulatedPrefillWorker(number, prefill_capacity, limits, batch))
        self.prefill: Sequence[SimulatedPrefillWorker] = prefill_workers
        self.batches: Sequence[SimulatedBatch] = batches

    @abstractmethod
    def start(self, worker: SimulatedPrefillWorker) -> None:
        """Begin the first of its steps, if none runs."""

    @abstractmethod
    def compute_suffix(self, job: SimulatedRequest, batch: SimulatedBatch, took_s: float) -> None:
        """Computes on this decode worker the part of the prompt that it lacks, which takes `took_s`."""

    @abstractmethod
    def over(self, job: SimulatedRequest) -> None:
        """Ends a request that has ended or is not served."""

    def submit(self, job: SimulatedRequest) -> None:
        tokens = job.prompt + job.output_max - 1
        fits = any(tokens <= batch.room.kv_tokens for batch in self.batches)
        if not fits or self._waiting >= self.options.limits.queue_requests_max:
            self.over(job)
        elif not self._runs_on_decode(job, self._waiting):
            self.enqueue(job)

    def enqueue(self, job: SimulatedRequest) -> None:
        self._waiting += 1
        self.order.push(job, job.key)
        self.classes[job.key] = self.classes.get(job.key, 0) + 1
        self.news = True

    def _leaves_class(self, key: int) -> None:
        self._waiting -= 1
        left = self.classes[key] - 1
        if left:
            self.classes[key] = left
        else:
            del self.classes[key]

    def schedule(self) -> None:
        """Asks workers with a free step, the least busy first, as `scheduler.placement.schedule` does."""
        self.news = False
        asked: set[int] = set()
        while True:
            best, best_rank = None, (0, 0, 0)
            for worker in self.prefill:
                if worker.number in asked or not (worker.placed or self.classes):
                    continue
                if worker.pace.may_have_more(len(worker.steps), worker.tokens_in_flight):
                    rank = (worker.tokens_in_flight, worker.tokens_forwarded, worker.number)
                    if best is None or rank < best_rank:
                        best, best_rank = worker, rank
            if best is None:
                return
            step = compose(best, self.order, self, self.profile.prefill)
            if step is None:
                asked.add(best.number)
            else:
                best.steps.append(step)
                self.start(best)

    def place(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> bool:
        if self.now - job.at_s > self._wait_s_max:
            self._leaves_class(job.key)
            self.order.remove(job)
            self.over(job)
            return False
        if (job.blocks or job.sent.session) and is_class(job.key) and job.moves < MOVES_MAX:
            if self._runs_on_decode(job, 0):
                self._leaves_class(job.key)
                self.order.remove(job)
                return False
            if self._binds(job, worker):
                return False
        late = self.options.late_room
        decode = None
        if worker.fits(job):
            decode = min(self.batches, key=_load) if late else self._decode_for(job, worker)
        if decode is None:
            self._refuse(job, worker)
            return False
        self._leaves_class(job.key)
        if job.sent.session:
            self._begin_turn(job, worker, decode)
        elif job.blocks:
            job.cached = job.dispatched = cached_tokens(job, worker, self.options.block_tokens)
        elif self._hit_rate:
            tokens = min(int(self._hit_rate * job.prompt), job.prompt - 1)
            job.cached = job.dispatched = tokens - tokens % worker.block_size
        job.prefill, job.decode, job.placed_s = worker, decode, self.now
        worker.hold(job)
        if late:
            decode.promised += 1
        else:
            self._reserve(job, decode)
        return True

    # --- turns of sessions ------------------------------------------------------------------------------------------------

    def _begin_turn(self, job: SimulatedRequest, worker: SimulatedPrefillWorker, decode: SimulatedBatch) -> None:
        """Sets the cached tokens of a session's turn. The worker's cached tokens are not computed; nor are the decode
        worker's, if fetching them is faster. Tokens that the decode worker lacks are sent."""
        here, there = cached_tokens(job, worker, 0), decode.kept.of(job.sent)
        there -= there % worker.block_size
        if there > here and decode is not worker.batch:
            fetch_s = ROUND_TRIP_S + (there - here) * self.token_s
            here = there if fetch_s < (there - here) / self._tokens_per_s else here
        job.cached = job.dispatched = here
        if decode is not worker.batch:
            worker.send(max(here - there, 0), self.now, self.token_s)
        worker.kept.take(job.sent.session)
        decode.kept.take(job.sent.session)

    def _runs_on_decode(self, job: SimulatedRequest, waiting: int) -> bool:
        """Decides as `scheduler.placement.pairs`: the decode worker that has most of a prompt computes the rest, if it
        would finish before any prefill worker. `waiting`: requests ahead of this one at the prefill workers."""
        share, best, best_s = self.options.stall_share, None, inf
        if not share or not job.sent.session:
            return False
        for batch in self.batches:
            kept = batch.kept.of(job.sent)
            if 2 * kept >= job.prompt and self._has_room(batch, job):
                done_s = max(batch.suffixes_end_s - self.now, 0.0) + self._suffix_s(batch, job.prompt - kept)
                if done_s < best_s:
                    best, best_s, job.cached = batch, done_s, kept
        if best is None:
            return False
        elsewhere_s = self._weights.transfer_s * ((job.prompt - job.cached) // best.room.block_size) + min(
            (worker.tokens_in_flight + worker.undispatched + (1 + waiting / len(self.prefill)) * left)
            / self._tokens_per_s
            for worker in self.prefill
            if (left := job.prompt - max(cached_tokens(job, worker, 0), job.cached))
        )
        if best_s > elsewhere_s:
            return False
        self._begin_on_decode(job, best)
        return True

    def _suffix_s(self, batch: SimulatedBatch, tokens: int) -> float:
        share = self.options.stall_share
        return tokens / self._tokens_per_s * ((1 + share) / share if batch.sequences else 1.0)

    def _begin_on_decode(self, job: SimulatedRequest, batch: SimulatedBatch) -> None:
        job.decode, job.dispatched, job.placed_s = batch, job.prompt, self.now
        batch.kept.take(job.sent.session)
        self._reserve(job, batch)
        self.compute_suffix(job, batch, self._suffix_s(batch, job.prompt - job.cached))

    # --- room -------------------------------------------------------------------------------------------------------------

    def _reserve(self, job: SimulatedRequest, decode: SimulatedBatch) -> None:
        steps = decode.steps_begun(self.now) if decode.room.exact else 0
        decode.room.place(job.number, job.prompt, job.output_max, steps)
        decode.held_seqs += 1

    def reserve_late(self, job: SimulatedRequest) -> bool:
        """Reserves room for a request whose prompt is computed; False if there is no room yet."""
        batch: SimulatedBatch = job.decode
        if not self._has_room(batch, job):
            job.no_room = True
            return False
        batch.promised -= 1
        self._reserve(job, batch)
        return True

    def _refuse(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> None:
        if not worker.fits(job):
            worker.stuck[job.key] = job
            return
        job.no_room = True
        key = class_key(job.demand)
        others = classes_without_room(job.demand, filter(is_class, self.classes))
        self.closed.update((one, job) for one in (key, *others))
        if job.key != key:
            self._rekey(job, key)

    def _binds(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> bool:
        waiting = self._waiting / len(self.prefill)
        better = better_worker(
            job, worker, self.prefill, self.options.block_tokens, self._tokens_per_s, waiting, self._weights
        )
        if better is None:
            return False
        job.moves += 1
        self._rekey(job, better.bound_key)
        return True

    def _rekey(self, job: SimulatedRequest, key: int) -> None:
        self._leaves_class(job.key)
        self._waiting += 1
        job.key = key
        self.classes[key] = self.classes.get(key, 0) + 1
        self.order.move(job, key)

    def _decode_for(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> SimulatedBatch | None:
        """Returns the least full decode worker with room, by the rules of `scheduler.limits`: the own half of a mixed worker
        needs no transfer."""
        own = worker.batch
        best, best_rank = None, (0.0, 0, 0)
        block = self._weights.transfer_s / self._weights.load_s
        saved = block * worker.blocks(job)
        for batch in self.batches:
            if not self._has_room(batch, job):
                continue
            full = max(batch.room.taken / batch.room.kv_blocks, batch.held_seqs / batch.seqs_max)
            full -= saved if batch is own else block * (batch.kept.of(job.sent) // batch.room.block_size)
            rank = (full, batch.forwarded, batch.number)
            if best is None or rank < best_rank:
                best, best_rank = batch, rank
        return best

    def _has_room(self, batch: SimulatedBatch, job: SimulatedRequest) -> bool:
        if batch.held_seqs >= batch.seqs_max:
            return False
        room = batch.room
        if not room.exact and room.wholes + room.whole(job.prompt, job.output_max) <= room.kv_blocks:
            return True
        return room.fits(job.prompt, job.output_max, batch.steps_begun(self.now))

    def freed(self, batch: SimulatedBatch) -> None:
        """Opens the classes whose first job would fit now."""
        fits: dict[int, bool] = {}
        for key, job in list(self.closed.items()):
            if job.number not in fits:
                fits[job.number] = job.prefill is not None or self._has_room(batch, job)
            if fits[job.number]:
                del self.closed[key]
                self.news = True


def _load(batch: SimulatedBatch) -> tuple[int, int]:
    return batch.held_seqs + batch.promised, batch.number
