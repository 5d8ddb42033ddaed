"""The coordinator's knowledge of one request."""

from typing import NamedTuple

import msgspec

from coordinator.accounting.bill import Bill
from coordinator.fairness.tenant_queue import Entry
from coordinator.kv_admission.demand import NEVER
from coordinator.kv_admission.sessions import OpenTurn, Sessions
from coordinator.lifecycle import RequestState, Trigger, advance
from proto.messages import Submit

RETAINED = 0
"""The attempt under which a worker has a retained allocation: real ones begin with 1."""
PROGRESS_TOKENS = 4
"""A worker reports after so many tokens of an answer. If it dies, fewer were on their way to a gateway, and are computed once
more."""
LOSSES_MAX = 3


class Suspicion(msgspec.Struct, frozen=True, gc=False):
    """A request was in a running step of a worker that was lost, and has made no progress since."""

    losses: int
    """Workers lost so, one after the other."""
    prompt_tokens: int = 0
    """The last one was lost in prefill: the request is cleared once so much of its prompt is computed. 0: in decode."""

    @property
    def own_step(self) -> bool:
        """Its chunks run in prefill steps with nothing else in them."""
        return self.prompt_tokens > 0 or self.own_worker

    @property
    def own_worker(self) -> bool:
        """It decodes on a worker with no other request. To empty one takes long, so one loss is not enough."""
        return self.losses >= LOSSES_MAX - 1


class RetainedAllocation(NamedTuple):
    """The allocation of an ended attempt on a decode worker, which its request keeps: see `workers.pool`."""

    decode_incarnation: int
    attempt: int


class AttemptProgress(msgspec.Struct, eq=False, gc=False):
    """The events of a request since it came to wait."""

    prefill_incarnation: int = 0
    decode_incarnation: int = 0
    placed_at: float = 0.0
    computed_tokens: int = 0
    """Prompt tokens that are computed, the cached ones before them included."""
    fetched_tokens: int = 0
    """Its prefill worker is to fetch so many of its cached tokens from its decode worker."""
    fetch_s: float = 0.0
    """The fetch was expected to take so long."""
    compute_s: float = 0.0
    """The prefill worker would have needed so long to compute them."""
    bound_to: int = 0
    """The prefill worker it waits for, which has more of it cached, while it is not placed."""
    moves: int = 0
    """How often it was bound to one."""
    there_s: float = 0.0
    """How long its prompt was expected to take where its KV is, in seconds, when it was last bound to a decode worker."""
    elsewhere_s: float = 0.0
    """How long it was expected to take on the best prefill worker then."""
    bypassed: int = 0
    """How often another request got room while this one waited for it."""
    output_charged: float = 0.0
    """The output tokens that its tenant was charged for, as estimated."""
    retained: RetainedAllocation | None = None
    """Its prefill worker was lost: the decode worker whose room stays its own until it is placed again, and which attempt had
    it."""
    paid_tokens: int = 0
    """Tokens of this attempt's prompt that its tenant was charged for with an earlier one, which a drain cut short."""


class Request(msgspec.Struct, eq=False):
    """One request over all its attempts; the fields from `submit` on belong to the current one."""

    id: str
    gateway_incarnation: int
    submit: Submit
    blob: bytes
    """Packed prompt ids, forwarded untouched and dropped once forwarded."""
    since: float
    """When it entered the current state."""
    arrived: float
    path: tuple[str, str, str]
    """(priority class, organisation, user): whose turn and whose bill."""
    state: RequestState = RequestState.QUEUED
    uncomputed_tokens: int = 0
    """Prompt tokens to be computed, as its model's queue counts them as work ahead of others."""
    work: int = 0
    """The cost that was expected when it last came to wait."""
    placed_work: int = 0
    """The value of `work` while it is placed."""
    projected_s: float = 0.0
    """How long it was expected to wait for a place when it came."""
    expected_tokens: float = 0.0
    """Answer tokens over all choices, as they were expected when it came."""
    dispatched_tokens: int = 0
    """Prompt tokens sent out in chunks, the cached ones before them included."""
    cached_tokens: int = 0
    """The prompt's first tokens that its prefill worker has: they are neither computed nor charged."""
    ttft_ms: float = 0.0
    """Its priority class's target for the first token, when it came; 0: none."""
    tpot_ms: float = 0.0
    """Its priority class's target for the mean time per later token; 0: none."""
    counted: bool = False
    """It counts in the goodput of its priority class: it came here first."""
    first_token_at: float = 0.0
    """When its prompt was first computed; 0: not yet."""
    waits: bool = False
    """It waits in its model's queue, and is not placed."""
    entry: "Entry[Request] | None" = None
    """Its place in the fair queue while it has chunks to dispatch."""
    preempted: int = 0
    """How often it was interrupted to make room for others."""
    borrowed: bool = False
    """It was let in beyond its tenant's rates, while nobody else wanted the capacity: such requests are the first to go in an
    overload."""
    bill: Bill | None = None
    expected_left: int = NEVER
    """Tokens its answer is counted with on a decode worker, if less than it may have."""
    numerics: str = ""
    """The kernel fingerprint of its first decode worker: its stream goes on with the same one, if there is a choice."""
    suspicion: Suspicion | None = None
    turn: OpenTurn | None = None
    """It is a turn of its session, until it has ended."""
    attempt_progress: AttemptProgress = msgspec.field(default_factory=AttemptProgress)

    @property
    def prefill_incarnation(self) -> int:
        return self.attempt_progress.prefill_incarnation

    @property
    def decode_incarnation(self) -> int:
        return self.attempt_progress.decode_incarnation

    @property
    def deadline(self) -> float | None:
        """When the first token is wanted at the latest, if the client said so and has not had it."""
        if not self.submit.deadline_ms or self.submit.resumed_tokens:
            return None
        return self.arrived + self.submit.deadline_ms / 1000

    @property
    def first_token_ms(self) -> float:
        """After its arrival: by when its first token is wanted, as the client or its priority class says; 0: no matter."""
        return 0.0 if self.submit.resumed_tokens else self.submit.deadline_ms or self.ttft_ms

    @property
    def resumed(self) -> bool:
        """An earlier attempt at it was interrupted. Several choices that had begun come back as requests of their own."""
        return self.submit.attempt > 1 or self.submit.resumed_tokens > 0

    @property
    def own_step(self) -> bool:
        return self.suspicion is not None and self.suspicion.own_step

    @property
    def own_worker(self) -> bool:
        return self.suspicion is not None and self.suspicion.own_worker

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.submit.attempt)

    def unpaid_tokens(self, start: int, length: int) -> int:
        """Tokens of a chunk that its tenant is charged for, or gets back if the chunk was skipped, also of an earlier
        attempt."""
        paid = self.attempt_progress.paid_tokens
        return length if paid <= start else max(start + length - paid, 0)

    def pay_for_drained(self, drained_before: int) -> None:
        """Where the last attempt failed, all is charged again. Where it was drained behind some tokens, its prompt had been
        computed and those tokens emitted."""
        if self.submit.drained_attempts > drained_before:
            if self.submit.resumed_tokens:
                self.attempt_progress.paid_tokens = self.submit.prompt_tokens
        elif self.attempt_progress.paid_tokens:
            self.attempt_progress.paid_tokens = 0

    def end_turn(self, sessions: Sessions, weight: float, now: float) -> None:
        """It leaves its KV, if its prompt was computed. `weight`: of its organisation."""
        turn, self.turn = self.turn, None
        if turn is None:
            return
        if not self.first_token_at:
            sessions.over(turn.session, now)
            return
        submit, bill = self.submit, self.bill
        output_tokens = bill.counters.output_tokens if bill is not None else submit.resumed_tokens
        sessions.answered(turn, submit.prompt_tokens - submit.resumed_tokens + output_tokens, weight, now)

    def fire(self, trigger: Trigger, now: float) -> None:
        if self.bill is not None:
            self.bill.spend(self.state, now - self.since)
        self.state = advance(self.state, trigger)
        self.since = now

    def renew(self, submit: Submit, blob: bytes) -> None:
        """Take the next attempt's parameters over."""
        drained_before, resumed_before = self.submit.drained_attempts, self.submit.resumed_tokens
        self.submit, self.blob = submit, blob
        if self.suspicion is not None and submit.resumed_tokens >= resumed_before + PROGRESS_TOKENS:
            self.suspicion = Suspicion(1, self.suspicion.prompt_tokens)  # its last worker was lost behind these
        self.pay_for_drained(drained_before)
        self.dispatched_tokens = self.cached_tokens = 0
        attempt_progress = self.attempt_progress
        attempt_progress.prefill_incarnation = attempt_progress.decode_incarnation = (
            attempt_progress.computed_tokens
        ) = attempt_progress.bypassed = 0
        attempt_progress.moves = 0
