"""The loop of events: arrivals, steps, hand-overs, ends; and the coordinator's decisions after each.

    outcome = Simulator(profile, Workers(3, 5), sent).run()

Decisions are production code or follow it line by line: the order of chunks (`order`), the composition of steps (`prefill`),
admission to decode workers (`room`), the choice of workers. Messages, billing and ledgers are left out, and so are the parts
that only the full core has: room kept for bypassed requests, circuit breakers, deadlines, and shedding among several tenants.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from tuning.advise import Workers
from tuning.profile import HostCost, Profile
from tuning.simulator.batch import SimulatedBatch
from tuning.simulator.caches import remember
from tuning.simulator.cores import SimulatedHost
from tuning.simulator.job import NOT_YET, Sent, SimulatedRequest
from tuning.simulator.options import RunOptions
from tuning.simulator.outcome import SimulatedOutcome, outcome_of
from tuning.simulator.placing import Placing
from tuning.simulator.prefill import SimulatedPrefillWorker

_STEP, _ARRIVED, _END, _SUBMIT, _SUFFIX, _TURN = range(6)


class Simulator(Placing):
    def __init__(
        self, profile: Profile, workers: Workers, sent: Sequence[Sent], options: RunOptions | None = None
    ) -> None:
        """`sent`: in the order of time."""
        options = options or RunOptions()
        super().__init__(profile, workers, sent, options)
        self._due: list[tuple[float, int, int, Any, Any]] = []
        self._pushed = 0
        self._host = SimulatedHost(profile, self._push_step, self._push_end)
        host = profile.host
        self._gap_s, self._join_s = host.step_gap_ms / 1000, host.join_ms / 1000
        self._request_s, self._request_token_s = host.request_ms / 1000, host.request_token_ms / 1000
        self._latency_s = profile.transfer.latency_ms / 1000
        self._following = {one.follows: number for number, one in enumerate(sent) if one.follows >= 0}

    def _at(self, when_s: float, kind: int, what: Any, also: Any = None) -> None:
        self._pushed += 1
        heappush(self._due, (when_s, self._pushed, kind, what, also))

    def run(self) -> SimulatedOutcome:
        due = self._due
        handlers = (
            *(self._step_ended, self._arrived, self._sequence_ended),
            *(self._submit, self._suffix_done, self._next_turn),
        )
        jobs = (job for job in self.jobs if job.sent.follows < 0)
        job, talks = next(jobs, None), self._host.talks
        while job is not None or due:
            if job is not None and (not due or job.at_s <= due[0][0]):
                self.now = job.at_s
                self._talk(job)
                job = next(jobs, None)
            else:
                self.now, _, kind, what, also = heappop(due)
                handlers[kind](what, also)
            if self.news:
                self.schedule()
        host = HostCost() if talks else self.profile.host
        return outcome_of(self.jobs, self.prefill, self.batches, self.gaps, host.request_ms, host.request_token_ms)

    def _talk(self, job: SimulatedRequest) -> None:
        if self._host.talks:
            alone_s = self._request_s + self._request_token_s * job.prompt
            self._at(self._host.talk(alone_s, self.now), _SUBMIT, job)
        else:
            self.submit(job)

    def over(self, job: SimulatedRequest) -> None:
        following = self._following.get(job.number)
        if following is not None:
            turn = self.jobs[following]
            self._at(self.now + turn.sent.think_s, _TURN, turn)

    def _next_turn(self, job: SimulatedRequest, _: object) -> None:
        job.comes(self.now)
        self._talk(job)

    def _submit(self, job: SimulatedRequest, _: object) -> None:
        self._host.talked(self.now)
        job.submitted_s = self.now
        self.submit(job)

    # --- prefill ----------------------------------------------------------------------------------------------------------

    def start(self, worker: SimulatedPrefillWorker) -> None:
        if worker.running or not worker.steps:
            return
        worker.after_s = max(worker.free_s - self.now, 0.0)
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
        self._push_step(batch.wait_for(self.now, took_s), worker)
        self._push_end(batch)

    def _push_step(self, ends_s: float, worker: SimulatedPrefillWorker) -> None:
        worker.version += 1
        self._at(ends_s, _STEP, worker, worker.version)

    def _step_ended(self, worker: SimulatedPrefillWorker, version: int) -> None:
        if version != worker.version:
            return
        step = worker.steps.popleft()
        self._stop(worker)
        worker.tokens_in_flight -= step.tokens
        worker.tokens_forwarded += step.tokens
        worker.pace.measure(step.tokens, 1000 * (self.now - worker.began_s - worker.after_s))
        for job, start, tokens in step.chunks:
            worker.send(tokens, self.now, self.token_s)
            if start + tokens == job.prompt:
                self._prompt_done(job, worker)
        worker.free_s = self.now + self._gap_s
        self.start(worker)
        self.news = True

    def _stop(self, worker: SimulatedPrefillWorker) -> None:
        self._host.stop(worker, self.now)
        if worker.batch is not None:
            worker.batch.prefill_s = 0.0
            self._host.mixed_changed(worker.batch, self.now)

    def _prompt_done(self, job: SimulatedRequest, worker: SimulatedPrefillWorker) -> None:
        job.last_s = self.now
        if job.first_s == NOT_YET:
            job.first_s = self.now
        if job.sent.session:
            worker.kept.keep(job.sent.session, job.prompt, worker.idle_tokens)
        elif job.blocks:
            remember(job, worker, self.options.block_tokens, worker.kv_tokens)
        if job.output <= 1:
            worker.release_blocks(job)
            self._ended_in_prefill(job)
        else:
            latency_s = self._latency_s * self._host.hand_over_slower()
            self._at(max(worker.link_free_s, self.now) + latency_s + self._join_s, _ARRIVED, job)

    def _ended_in_prefill(self, job: SimulatedRequest) -> None:
        if self.options.late_room:
            job.decode.promised -= 1
            job.end_s = self.now
            self.over(job)
        else:
            self._release(job)

    def _arrived(self, job: SimulatedRequest, _: object) -> None:
        """Joins the request to a batch: its KV is on the decode worker, which knows of it."""
        batch: SimulatedBatch = job.decode
        if self.options.late_room and (batch.late or not self.reserve_late(job)):
            batch.late.append(job)
            return
        self._join(job, batch)

    def _join(self, job: SimulatedRequest, batch: SimulatedBatch) -> None:
        if job.prefill is not None:
            job.prefill.release_blocks(job)
        batch.join(job, self.now)
        job.join_s = batch.begin_s
        if batch.room.exact:
            self.freed(batch)
        self.news = True
        self._host.batch_changed(batch, self.now)

    def compute_suffix(self, job: SimulatedRequest, batch: SimulatedBatch, took_s: float) -> None:
        batch.suffixes += 1
        batch.suffixes_end_s = max(batch.suffixes_end_s, self.now) + took_s
        if batch.suffixes == 1:
            self._stretch(batch, 1 + self.options.stall_share)
        self._at(batch.suffixes_end_s, _SUFFIX, job)

    def _suffix_done(self, job: SimulatedRequest, _: object) -> None:
        batch: SimulatedBatch = job.decode
        batch.suffixes -= 1
        if not batch.suffixes:
            self._stretch(batch, 1.0)
        job.first_s = job.last_s = self.now
        if job.output <= 1:
            self._release(job)
        else:
            self._join(job, batch)

    def _stretch(self, batch: SimulatedBatch, factor: float) -> None:
        batch.stretch_steps(self.now, factor)
        self._push_end(batch)

    # --- decode -----------------------------------------------------------------------------------------------------------

    def _push_end(self, batch: SimulatedBatch) -> None:
        batch.version += 1
        when_s = batch.next_end_s()
        if when_s < inf:
            self._at(when_s, _END, batch, batch.version)

    def _sequence_ended(self, batch: SimulatedBatch, version: int) -> None:
        if version != batch.version:
            return
        for job in batch.ended():
            job.end_s = self.now
            self._release(job)
        self._host.batch_changed(batch, self.now)

    def _release(self, job: SimulatedRequest) -> None:
        """Releases what the request holds, since it has ended."""
        batch: SimulatedBatch = job.decode
        if job.end_s == NOT_YET:
            job.end_s = self.now
        batch.held_seqs -= 1
        batch.room.release(job.number)
        if job.sent.session:
            batch.kept.keep(job.sent.session, job.prompt + job.output - 1, batch.idle_tokens)
        self.over(job)
        self.order.ended(job, job.output)
        self.freed(batch)
        while batch.late and self.reserve_late(batch.late[0]):
            self._join(batch.late.popleft(), batch)
