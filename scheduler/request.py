"""The scheduler's knowledge of one request."""

from typing import NamedTuple

import msgspec

from proto.messages import Submit, Waits
from scheduler.fairness.tenant_queue import Entry
from scheduler.kv_admission.admission import NEVER
from scheduler.kv_admission.sessions import OpenTurn, Sessions
from scheduler.lifecycle import RequestState, Trigger, advance

RETAINED = 0  # the attempt under which a worker has a retained allocation: real ones begin with 1
PROGRESS_TOKENS = 4
"""A worker reports after this many tokens of an answer. If it dies, fewer tokens than this were on their way to a gateway, and
are computed again."""
LOSSES_MAX = 3
LOST_PROCESSES_MAX = 1024  # how many losses are remembered


class Suspicion(msgspec.Struct, frozen=True, gc=False):
    """A request was in a running step of a worker that was lost, and has made no progress since."""

    losses: int  # how many workers were lost in a row while they ran it
    prompt_tokens: int = 0
    """The request is cleared once this many prompt tokens are computed, if the last worker was lost in prefill. 0: it was lost
    in decode."""

    @property
    def own_step(self) -> bool:
        """Its chunks run in prefill steps with nothing else in them."""
        return self.prompt_tokens > 0

    @property
    def in_decode(self) -> bool:
        """It is tried again in decode: see `workers.trials`."""
        return not self.prompt_tokens


class LostProcess(NamedTuple):
    """A worker's process that was lost: see `recovery.suspects`."""

    incarnations: frozenset[int]
    host: str
    at: float
    request_ids: frozenset[str]  # the requests that were in its running steps, if its process was seen to end

    def ran(self, request: "Request") -> bool:
        return request.id in self.request_ids or request.whole_id in self.request_ids


class RetainedAllocation(NamedTuple):
    """The allocation of an ended attempt on a decode worker, which its request keeps: see `workers.pool`."""

    decode_incarnation: int
    attempt: int


class KeptRoom(NamedTuple):
    """The cost of a decode worker that was kept for a request: see `workers.reserved_workers`."""

    since: float
    cost_per_s: float

    def cost(self, now: float) -> float:
        return self.cost_per_s * (now - self.since)


class WaitMark(NamedTuple):
    """The clocks of `waiting.wait_clock` when a request came to wait."""

    at: float
    key: int  # of its class of KV demand
    cold_s: float
    no_room_s: float
    own_tokens: int
    all_tokens: int


class AttemptProgress(msgspec.Struct, eq=False, gc=False):
    """The progress of a request since it last began to wait."""

    prefill_incarnation: int = 0
    decode_incarnation: int = 0
    placed_at: float = 0.0
    computed_tokens: int = 0  # prompt tokens that are computed, the cached ones before them included
    fetched_tokens: int = 0  # how many of its cached tokens the prefill worker is to fetch from its decode worker
    fetch_s: float = 0.0  # the expected time of that fetch, in seconds
    compute_s: float = 0.0  # the time in which the prefill worker would have computed them, in seconds
    sent_blocks: int = 0  # blocks of its prompt that its decode worker did not have
    bound_to: int = 0
    """The incarnation of the worker that it waits for while it is not placed, such as one that has more of its prompt
    cached."""
    moves: int = 0  # how often it was bound to a worker
    there_s: float = 0.0
    """The time that its prompt was expected to take on the decode worker with its KV, in seconds, when it was last bound to
    one."""
    elsewhere_s: float = 0.0  # the time that it was expected to take on the best prefill worker then, in seconds
    bypassed: int = 0  # how often another request got room while this one waited for it
    output_charged: float = 0.0  # the output tokens that its tenant was charged for, as estimated
    retained: RetainedAllocation | None = None
    """Its room on a decode worker, kept after its prefill worker was lost and until it is placed again."""
    kept_room: KeptRoom | None = None  # the room that was kept for it until it was placed, not paid for yet
    paid_tokens: int = 0
    """Tokens of this attempt's prompt that its tenant was already charged for in an earlier attempt that a drain cut short."""


class StateTimes(msgspec.Struct, eq=False, gc=False):
    """The seconds that a request spent in its states, over all its attempts."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0

    def spend(self, state: RequestState, seconds: float) -> None:
        match state:
            case RequestState.PREFILLING:
                self.prefill_s += seconds
            case RequestState.HANDING_OVER:
                self.transfer_s += seconds
            case RequestState.DECODING:
                self.decode_s += seconds
            case _:
                self.queue_s += seconds


class Request(msgspec.Struct, eq=False):
    """One request over all its attempts; the fields from `submit` on belong to the current one."""

    id: str
    gateway_incarnation: int
    submit: Submit
    blob: bytes  # packed prompt ids, forwarded untouched and dropped once forwarded
    since: float  # when it entered the current state
    arrived: float
    path: tuple[str, str, str]  # (priority class, organisation, user): the tenant that has the turn and pays
    fingerprint: int = 0  # recognises it when it was rejected and comes again
    whole_id: str = ""  # the id of the request of which this one is a resumed choice; empty: it is none
    state: RequestState = RequestState.QUEUED
    uncomputed_tokens: int = 0  # prompt tokens to be computed, as its model's queue counts them as work ahead of others
    work: int = 0  # the cost that was expected when it last came to wait
    placed_work: int = 0  # the value of `work` while it is placed
    cohorts: tuple[float, ...] = ()  # where `Releases` count `placed_work`
    projected_s: float = 0.0  # how long it was expected to wait for a place when it came
    expected_s: float = 0.0  # how long its first token was expected to take when it came; 0: not known
    promised: bool = True  # its first token was expected in time when it came, so it was not admitted by a `Grace` only
    expected_tokens: float = 0.0  # answer tokens over all choices, as they were expected when it came
    dispatched_tokens: int = 0  # prompt tokens sent out in chunks, the cached ones before them included
    cached_tokens: int = 0
    """The prompt's first tokens that its prefill worker has: they are neither computed nor charged."""
    ttft_ms: float = 0.0  # its priority class's target for the first token, when it came; 0: none
    tpot_ms: float = 0.0  # its priority class's target for the mean time per later token; 0: none
    counted: bool = False
    """It counts in the goodput of its priority class, because its first attempt came to this coordinator."""
    first_token_at: float = 0.0  # when its prompt was first computed; 0: not yet
    wait_mark: WaitMark | None = None  # when its present attempt came to wait
    waited: Waits = Waits()  # until that attempt was placed
    waits: bool = False  # it waits in its model's queue, and is not placed
    entry: "Entry[Request] | None" = None  # its place in the fair queue while it has chunks to dispatch
    preempted: int = 0  # how often it was interrupted to make room for others
    borrowed: bool = False
    """It was admitted beyond its tenant's rates while capacity was idle. Such requests are shed first in an overload."""
    times: StateTimes = msgspec.field(default_factory=StateTimes)
    expected_left: int = NEVER
    """Tokens after the first that each choice is counted with on a decode worker, if fewer than it may have."""
    numerics: str = ""
    """The kernel fingerprint of its first decode worker. Later attempts prefer decode workers with the same fingerprint."""
    suspicion: Suspicion | None = None
    failed_on: tuple[tuple[int, int], ...] = ()
    """The workers on which its model failed, as in `workers.circuit_breakers`."""
    turn: OpenTurn | None = None  # its turn in its session, until the turn ends; None: it is no turn
    attempt_progress: AttemptProgress = msgspec.field(default_factory=AttemptProgress)

    @property
    def prefill_incarnation(self) -> int:
        return self.attempt_progress.prefill_incarnation

    @property
    def decode_incarnation(self) -> int:
        return self.attempt_progress.decode_incarnation

    @property
    def deadline(self) -> float | None:
        """The latest time for the first token, if the client gave a deadline and has no token yet."""
        if not self.submit.deadline_ms or self.submit.resumed_tokens:
            return None
        return self.arrived + self.submit.deadline_ms / 1000

    @property
    def first_token_ms(self) -> float:
        """Milliseconds from its arrival within which the first token is wanted, as the client or its priority class says; 0:
        no limit."""
        return 0.0 if self.submit.resumed_tokens else self.submit.deadline_ms or self.ttft_ms

    @property
    def promised_ms(self) -> float:
        """As `first_token_ms`, but 0 if its first token was not expected in time when it came."""
        return self.first_token_ms if self.promised else 0.0

    @property
    def resumed(self) -> bool:
        """Whether an earlier attempt was interrupted. If several choices had begun, each comes back as a request of its
        own."""
        return self.submit.attempt > 1 or self.submit.resumed_tokens > 0

    @property
    def losses(self) -> int:
        return self.suspicion.losses if self.suspicion is not None else 0

    @property
    def own_step(self) -> bool:
        return self.suspicion is not None and self.suspicion.own_step

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.submit.attempt)

    def unpaid_tokens(self, start: int, length: int) -> int:
        """Returns how many tokens of a chunk its tenant is charged for, or refunded if the chunk was skipped. The chunk may
        belong to an earlier attempt."""
        paid = self.attempt_progress.paid_tokens
        return length if paid <= start else max(start + length - paid, 0)

    def pay_for_drained(self, drained_before: int) -> None:
        """Set how many prompt tokens are already paid for. If the last attempt failed, all are charged again. If it was
        drained after it emitted tokens, its prompt and those tokens are paid for."""
        if self.submit.drained_attempts > drained_before:
            if self.submit.resumed_tokens:
                self.attempt_progress.paid_tokens = self.submit.prompt_tokens
        elif self.attempt_progress.paid_tokens:
            self.attempt_progress.paid_tokens = 0

    def end_turn(self, sessions: Sessions, output_tokens: int, now: float) -> None:
        """End its turn in its session, which keeps its KV if its prompt was computed. `output_tokens`: of its answer so far."""
        turn, self.turn = self.turn, None
        if turn is None:
            return
        if not self.first_token_at:
            sessions.over(turn, now)
            return
        prompt_tokens = self.submit.prompt_tokens - self.submit.resumed_tokens
        sessions.answered(turn, prompt_tokens + output_tokens, now)

    def fire(self, trigger: Trigger, now: float) -> None:
        self.times.spend(self.state, now - self.since)
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
