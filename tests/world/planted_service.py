"""Bugs of the gateway and of the coordinator."""

from math import inf
from typing import Any

import msgspec
import pytest

from coordinator import core, outbox, requests, state
from coordinator.accounting import billing
from coordinator.accounting.billing import Closed, Past
from coordinator.recovery import draining, processes
from gateway.streams.keeper import StreamKeeper
from gateway.streams.liveness import Liveness
from gateway.streams.state import StreamPhase, Submission
from gateway.streams.types import SendSubmit, StreamLimits
from proto.errors import Interrupt
from proto.messages import Release, Submit, TokenItem
from scheduler.cluster import Cluster
from scheduler.fairness.held_shares import HeldShares
from scheduler.lifecycle import RequestState
from scheduler.placement import pairs, steps
from scheduler.request import Request
from scheduler.waiting.line import WaitingLine
from scheduler.waiting.projection import Projection
from scheduler.waiting.retries import RetryBudget
from scheduler.workers.circuit_breakers import Breakers
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker, WorkerBase
from tests.world.faults.ledger import CheckedLedger
from tests.world.planted import Planted
from worker.service import Service

BUGS = Planted()
bug = BUGS.add


# --- gateway ------------------------------------------------------------------------------------------------------------


@bug
def tokens_are_not_told_apart_by_index(m: pytest.MonkeyPatch) -> None:
    """A frame that comes twice is shown twice."""
    take = StreamKeeper._take

    def item(self: StreamKeeper, item: TokenItem, decoder: int, pool: str, now: float) -> None:
        submission = self.submissions.get(item.request_id)
        if submission is None or submission.attempt != item.attempt or not submission.sent:
            return
        choice = submission.choices[item.choice - submission.choices[0].index]
        if not choice.done:
            submission.liveness.heard(decoder, now)
            self._mark_running(submission)
            submission.stay_in(pool)
            take(self, submission, choice, item, 0)

    m.setattr(StreamKeeper, "_item", item)


@bug
def tokens_of_any_attempt_are_taken(m: pytest.MonkeyPatch) -> None:
    """What a fenced worker still says gets into the stream."""
    original = StreamKeeper._item

    def item(self: StreamKeeper, item: TokenItem, decoder: int, pool: str, now: float) -> None:
        submission = self.submissions.get(item.request_id)
        if submission is not None:
            item = msgspec.structs.replace(item, attempt=submission.attempt)
        original(self, item, decoder, pool, now)

    m.setattr(StreamKeeper, "_item", item)


@bug
def retries_have_no_bound(m: pytest.MonkeyPatch) -> None:
    """A request that cannot work is tried for ever."""
    original = StreamKeeper._resume

    def resume(self: StreamKeeper, submission: Submission, reason: Interrupt | None, why: str, now: float) -> None:
        limits, self.limits = self.limits, StreamLimits(attempts_max=1000)
        original(self, submission, reason, why, now)
        self.limits = limits

    m.setattr(StreamKeeper, "_resume", resume)


@bug
def what_has_left_still_counts_for_its_tenant(m: pytest.MonkeyPatch) -> None:
    """A tenant seems to hold ever more of decode, and makes room for all others."""
    m.setattr(HeldShares, "remove", lambda self, path, worker, key: None)


@bug
def what_a_drain_cuts_short_counts_as_a_try(m: pytest.MonkeyPatch) -> None:
    """A rolling restart uses up the attempts of long streams."""
    original = StreamKeeper._resume

    def resume(self: StreamKeeper, submission: Submission, reason: Interrupt | None, why: str, now: float) -> None:
        reason = Interrupt.DECODE_LOST if reason is Interrupt.DRAINED else reason
        original(self, submission, reason, why, now)

    m.setattr(StreamKeeper, "_resume", resume)


@bug
def retries_have_no_backoff(m: pytest.MonkeyPatch) -> None:
    """A lost worker's streams all come back at once."""
    m.setattr(Submission, "backoff_s", lambda self, limits: 0.0)


@bug
def a_resume_forgets_what_was_sent(m: pytest.MonkeyPatch) -> None:
    """The answer goes on as if its first words had not been."""
    original = Submission.message

    def message(self: Submission, now: float) -> SendSubmit:
        prompt = self.stream.work.prompt
        submit = msgspec.structs.replace(original(self, now).submit, prompt_tokens=len(prompt) // 4)
        return SendSubmit(submit, prompt)

    m.setattr(Submission, "message", message)


@bug
def a_client_that_leaves_is_not_cancelled(m: pytest.MonkeyPatch) -> None:
    """Workers go on for nobody."""

    def forget(self: StreamKeeper, stream: Any, reason: Any) -> None:
        for submission in list(stream.submissions):
            self._drop(submission)
        del self.streams[stream.id]

    m.setattr(StreamKeeper, "_forget", forget)


@bug
def a_new_coordinator_is_told_nothing(m: pytest.MonkeyPatch) -> None:
    """What had waited in the old one's queue waits for ever."""

    def up(self: StreamKeeper, incarnation: int, now: float) -> None:
        self.link_up = True
        for submission in list(self.submissions.values()):
            if submission.phase is StreamPhase.PENDING:
                self._send_if_due(submission, now)
            self._schedule(submission.stream)

    m.setattr(StreamKeeper, "_link_is_up", up)


@bug
def silence_after_a_lost_connection_is_waited_out(m: pytest.MonkeyPatch) -> None:
    """Tokens that died with a connection are missed when the client gives up."""
    m.setattr(Liveness, "silent_at", lambda self, limits, coordinator: inf)


# --- coordinator ----------------------------------------------------------------------------------------------------------


@bug
def a_cancel_forgets_the_decode_side(m: pytest.MonkeyPatch) -> None:
    """A decode worker streams to nobody until max_tokens."""

    def release(self: state.State, key: tuple[str, int]) -> None:
        for worker in self.cluster.workers.values():
            if key in worker.allocations and not worker.is_decode:
                self.send(worker.incarnation, Release(*key))

    m.setattr(state.State, "release_everywhere", release)


@bug
def a_lost_worker_keeps_its_reservations(m: pytest.MonkeyPatch) -> None:
    """Its tenants' concurrency and blocks never come back."""
    original = processes.on_down

    def down(self: state.State, incarnation: int, reason: str, *, lives: bool = False) -> None:
        worker = self.cluster.workers.get(incarnation)
        if worker is not None:
            worker.allocations.clear()
        original(self, incarnation, reason, lives=lives)

    m.setattr(processes, "on_down", down)


@bug
def blocks_count_as_free_when_a_release_is_sent(m: pytest.MonkeyPatch) -> None:
    """The worker has not let go yet, and has no room for what comes next."""
    original = state.State.release_everywhere

    def release(self: state.State, key: tuple[str, int]) -> None:
        original(self, key)
        for incarnation, worker in list(self.cluster.workers.items()):
            if key in worker.allocations:
                self.release(incarnation, key, 0)

    m.setattr(state.State, "release_everywhere", release)


@bug
def an_interrupted_gateway_is_not_told(m: pytest.MonkeyPatch) -> None:
    """The stream stops and nobody resumes it."""
    original = state.State.send

    def send(self: state.State, incarnation: int, message: Any, blob: bytes = b"") -> None:
        if type(message).__name__ != "Interrupted":
            original(self, incarnation, message, blob)

    m.setattr(state.State, "send", send)


@bug
def a_lost_gateway_is_not_cancelled(m: pytest.MonkeyPatch) -> None:
    """Its requests run on."""
    original = processes.on_down

    def down(self: state.State, incarnation: int, reason: str, *, lives: bool = False) -> None:
        hello = self.members.peers.get(incarnation)
        if hello is not None and hello.role.value == "gateway":
            del self.members.peers[incarnation]
        else:
            original(self, incarnation, reason, lives=lives)

    m.setattr(processes, "on_down", down)


@bug
def steps_in_flight_are_not_counted_down(m: pytest.MonkeyPatch) -> None:
    """After two steps a prefill worker gets nothing more."""
    original = WorkerBase.end_step

    def end_step(self: WorkerBase, step_id: int) -> Any:
        kept = self.steps.get(step_id)
        asked = original(self, step_id)
        if kept is not None:
            self.steps[step_id] = kept
        return asked

    m.setattr(WorkerBase, "end_step", end_step)


@bug
def a_restart_forgets_open_rows(m: pytest.MonkeyPatch) -> None:
    """What ran when the coordinator was killed is never charged."""
    original = CheckedLedger.past

    def past(self: CheckedLedger, now: float) -> Past:
        found = original(self, now)
        return Past((), found.charged, found.recent)

    m.setattr(CheckedLedger, "past", past)


@bug
def orders_leave_before_the_ledger_has_them(m: pytest.MonkeyPatch) -> None:
    """A kill at the wrong moment forgives what ran."""
    m.setattr(outbox.Outbox, "pass_or_hold", lambda self, send: True)


@bug
def a_resume_is_billed_from_the_start(m: pytest.MonkeyPatch) -> None:
    """Tokens of the first attempt are charged twice."""

    def emitted(self: billing.Billing, request_id: str, resumed: int, tokens: int, *, first: bool = False) -> int:
        bill = self.bills.get(request_id)
        if bill is None:
            return 0
        new = resumed + tokens + (bill.choices if first else 0)
        bill.counters.output_tokens += new
        return new

    m.setattr(billing.Billing, "emitted", emitted)


@bug
def prompts_computed_again_are_billed_again(m: pytest.MonkeyPatch) -> None:
    """A lost worker's work is charged to the tenant."""

    def computed(self: billing.Billing, request_id: str, attempt: int, tokens: int) -> None:
        bill = self.bills.get(request_id)
        if bill is not None:
            bill.counters.prompt_tokens += tokens

    m.setattr(billing.Billing, "computed", computed)


@bug
def a_grant_is_settled_without_its_blocks(m: pytest.MonkeyPatch) -> None:
    """A tenant's KV quota fills up with requests long gone."""
    original = billing.Billing._close

    def close(self: billing.Billing, bill: billing.Bill, now: float) -> Closed:  # type: ignore[name-defined]
        bill.grant.kv_blocks = 0
        return original(self, bill, now)

    m.setattr(billing.Billing, "_close", close)


@bug
def an_expired_wait_for_a_resume_is_never_noticed(m: pytest.MonkeyPatch) -> None:
    """Requests whose gateway does not come back stay for ever."""
    m.setattr(requests, "expire", lambda state: None)
    m.setattr(core.Core, "next_deadline", lambda self: None)


@bug
def a_worker_that_is_drained_gets_more(m: pytest.MonkeyPatch) -> None:
    """It never becomes empty, and is killed with streams on it."""

    def pair(request: Request, prefill: PrefillWorker, pool: Pool, now: float) -> pairs.WorkerPair | None:
        fits = [worker for worker in pool.decode.values() if worker.fits(request.submit)]
        return pairs.WorkerPair(prefill, fits[0], pairs.Beginning(0)) if fits and prefill.fits(request.submit) else None

    m.setattr(steps, "pair", pair)


@bug
def nobody_says_that_a_worker_is_drained(m: pytest.MonkeyPatch) -> None:
    """Each restart takes until its bound."""
    m.setattr(draining, "dismiss", lambda state: None)


@bug
def a_worker_that_is_to_end_goes_at_once(m: pytest.MonkeyPatch) -> None:
    """Its streams are cut off instead of ending."""
    m.setattr(Service, "may_go", lambda self, up, empty: self.leaving)


# --- recovery -------------------------------------------------------------------------------------------------------------


@bug
def all_that_was_interrupted_comes_back_at_once(m: pytest.MonkeyPatch) -> None:
    """A cluster whose workers keep dying does little but work that is lost again."""
    m.setattr(RetryBudget, "allows", lambda self, alive, now: True)


@bug
def a_budget_once_spent_is_never_there_again(m: pytest.MonkeyPatch) -> None:
    """Streams are given up long after the faults."""

    def allows(self: RetryBudget, alive: int, now: float) -> bool:
        return len(self._let_in) < self._floor + self._share * alive

    m.setattr(RetryBudget, "allows", allows)


@bug
def a_pair_that_was_left_out_is_never_tried_again(m: pytest.MonkeyPatch) -> None:
    """What its transfers cost once, it costs for ever."""
    m.setattr(Breakers, "allows", lambda self, pair, now, held: not (pair in self.pairs and self.pairs[pair].tripped))


@bug
def a_probe_without_a_verdict_is_never_over(m: pytest.MonkeyPatch) -> None:
    """A client that leaves at the wrong moment takes a pair of workers with it."""
    original = Breakers.allows
    m.setattr(Breakers, "allows", lambda self, pair, now, held: original(self, pair, now, lambda key: True))


@bug
def nobody_looks_when_a_pair_may_be_tried_again(m: pytest.MonkeyPatch) -> None:
    """Requests wait until something else happens."""
    m.setattr(Breakers, "wake", lambda self, now: False)
    m.setattr(Breakers, "next_wake", lambda self: None)


@bug
def room_kept_for_a_request_outlives_it(m: pytest.MonkeyPatch) -> None:
    """A decode worker fills up with room for nobody."""
    original = Cluster.drop_retained

    def drop(self: Cluster, request: Any) -> None:
        if request.state is not RequestState.INTERRUPTED:
            original(self, request)

    m.setattr(Cluster, "drop_retained", drop)


@bug
def a_worker_takes_no_more_suspects_once_one_was_tried_there(m: pytest.MonkeyPatch) -> None:
    """What was suspected of having ended workers is cleared or gone, and others wait for their trial for ever."""
    m.setattr(Pool, "end_trial", lambda self, request: None)


# --- room and time -----------------------------------------------------------------------------------------------------


@bug
def what_has_a_place_still_counts_as_waiting(m: pytest.MonkeyPatch) -> None:
    """Waits are told too long, and requests refused that could be served."""
    count = WaitingLine._count
    m.setattr(WaitingLine, "_count", lambda self, request, *rest: rest[1] > 0 and count(self, request, *rest))


@bug
def what_has_left_still_counts_as_placed(m: pytest.MonkeyPatch) -> None:
    """Decode seems to get slower and slower."""
    m.setattr(Projection, "leave", lambda self, request, now, *, done: None)


@bug
def room_in_decode_is_asked_for_sequences_alone(m: pytest.MonkeyPatch) -> None:
    """More is let in than the blocks last for."""

    def fits(self: DecodeWorker, submit: Submit, *_: Any, **__: Any) -> bool:
        return submit.choices <= self.free_seqs

    m.setattr(DecodeWorker, "fits", fits)
