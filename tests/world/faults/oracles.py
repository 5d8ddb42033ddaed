"""The rules that hold in every run: judged from outside, while a run goes on and when it is over.

exactly once      each stream's tokens are the known function's, in order, none lost, repeated or changed
one outcome       each request ends once, for its client and for the coordinator
draining          no attempt or time is lost by one, nothing is placed on who drains, and it ends as soon as it can
flipping          who changes its role holds nothing, and leaves another one in its own, unless it is forced
no stale act      tokens of an older attempt change nothing
bounded retries   no more attempts than allowed, none sooner than the backoff
blocks, bills     see `audit`
work conserving   nothing waits while all that could serve it lies idle
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.core import Core
from coordinator.events import StateChanged
from engine.kv.allocator import BlockAllocator
from gateway.streams.keeper import StreamKeeper
from gateway.streams.types import Action, Deliver, Ended, FailKind, Finish, LinkDown
from proto.errors import FinishReason, Interrupt, Reject
from proto.messages import Accepted, Interrupted, Message, Prefill, Reserve, Submit, TokenItem, Tokens, WorkFailed
from proto.parts import Held
from scheduler.lifecycle import RequestState
from scheduler.waiting.retries import WINDOW_S
from tests.world.faults.ledger import CheckedLedger
from tests.world.faults.plan import LIMITED, Asked, FaultPlan
from tests.world.toy_model import ToyAnswer, expected
from tests.world.world import SimulatedProcess, SimulationViolation, World

_PASSING = frozenset({Reject.NO_CAPACITY, Reject.UNKNOWN_MODEL, Reject.QUEUE_FULL, Reject.SHED, Reject.RETRY_BUDGET})
"""Reasons for which a new request of any tenant may be rejected in a small cluster with short queues."""
LEFT_S = 0.1
"""Undisturbed, nothing more is computed this long after a client left."""
DRAINED = "it is drained"
_NO_ROOM = ("no free KV block", "KV blocks wanted")


@dataclass
class Expectation:
    asked: Asked
    gateway: str
    answers: list[ToyAnswer]
    got: list[int]
    """Tokens delivered, by choice."""
    done: list[bool]
    admitted: bool = False
    outcome: str = ""
    """How the request ended: `well`, a kind of failure, `left`, `gateway lost`."""
    attempts: int = 0
    left_at: float = 1e9
    no_tries: int = 0
    """Attempts that a drain, or another tenant's share, cut short."""
    steadied: int = 0  # interruptions after which it begins to count its tries anew, since it had gone well for long
    interrupted_at: float = 0.0
    """When one of its attempts was cut short last."""
    losses: int = 0
    """Losses of its gateway's link: requests that were on their way are sent again under another attempt number."""


@dataclass
class Oracles:
    plan: FaultPlan
    world: World
    ledger: CheckedLedger
    streams: dict[str, Expectation] = field(default_factory=dict)
    drawn_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens drawn for each stream, over all attempts and workers."""
    accepted: set[str] = field(default_factory=set)
    """Request ids whose acceptance left the coordinator."""
    delivered_tokens: int = 0
    _sent: set[tuple[str, int, int, int]] = field(default_factory=set)
    _ends: set[tuple[int, str, int]] = field(default_factory=set)
    _backoff: dict[str, tuple[int, float, bool]] = field(default_factory=dict)
    """The attempt that ended, when it ended, and whether a drain ended it."""
    _known: dict[tuple[int, str], int] = field(default_factory=dict)
    """Requests that a coordinator has taken, by its incarnation, with the number of attempts that drains had ended."""
    _retries: dict[int, list[float]] = field(default_factory=dict)
    """Times at which a coordinator took such a request again."""

    # --- clients --------------------------------------------------------------------------------------------------------

    def opened(self, asked: Asked, gateway: str) -> None:
        answers = [expected(asked.prompt, asked.sampling, c, asked.stop_word) for c in range(asked.choices)]
        self.streams[asked.stream_id] = Expectation(
            asked, gateway, answers, [0] * asked.choices, [False] * asked.choices
        )

    def admitted(self, stream_id: str) -> None:
        self.streams[stream_id].admitted = True

    def delivered(self, part: Deliver) -> None:
        stream = self.streams[part.stream_id]
        if stream.outcome:
            raise SimulationViolation("one outcome", f"tokens after the end ({stream.outcome})", part.stream_id)
        answer, have = stream.answers[part.choice], stream.got[part.choice]
        wanted = answer.tokens[have : have + len(part.tokens)]
        if stream.done[part.choice] or part.tokens != wanted:
            why = f"choice {part.choice}: {part.tokens} from token {have} on, which should be {wanted}"
            raise SimulationViolation("exactly once", why, part.stream_id)
        stream.got[part.choice] += len(part.tokens)
        self.delivered_tokens += len(part.tokens)
        is_last = stream.got[part.choice] == len(answer.tokens)
        finish = (Finish.STOP if answer.finish is FinishReason.STOP else Finish.LENGTH) if is_last else None
        if part.finish is not finish:
            why = f"choice {part.choice} ends with {part.finish} where {finish} is right"
            raise SimulationViolation("exactly once", why, part.stream_id)
        stream.done[part.choice] = is_last

    def ended(self, end: Ended) -> None:
        stream = self.streams[end.stream_id]
        if stream.outcome:
            raise SimulationViolation("one outcome", f"it ended before ({stream.outcome})", end.stream_id)
        if end.failure is None:
            stream.outcome = "well"
            if not all(stream.done):
                raise SimulationViolation("exactly once", f"a clean end after {stream.got} tokens", end.stream_id)
            return
        stream.outcome = end.failure.kind
        if not self._may_fail(stream, end):
            raise SimulationViolation("every request finishes", f"it failed: {end.failure.message}", end.stream_id)

    def _may_fail(self, stream: Expectation, end: Ended) -> bool:
        failure, limits = end.failure, self.plan.stream_limits
        assert failure is not None
        if failure.kind is FailKind.INTERRUPTED:
            return stream.attempts >= limits.attempts_max
        if failure.kind is FailKind.UNREACHABLE:
            return not stream.admitted
        if failure.kind is not FailKind.REJECTED or failure.reject is None:
            return False
        reason = failure.reject.reason
        if reason is Reject.LOSES_WORKERS:
            return stream.attempts + stream.losses + stream.no_tries > 1
        if stream.admitted:
            return reason is Reject.SHED and not any(stream.got)
        if reason is Reject.TOO_LARGE:  # the only worker that decodes may have the small pool of a second tier
            return self.plan.tier_slots > 0 and stream.asked.choices > 1
        return reason in _PASSING or (reason is Reject.QUOTA and stream.asked.tenant in LIMITED)

    def left(self, stream_id: str) -> None:
        self.streams[stream_id].outcome = "left"
        self.streams[stream_id].left_at = self.world.now

    def gateway_died(self, name: str) -> None:
        for stream in self.streams.values():
            if stream.gateway == name and not stream.outcome:
                stream.outcome = "gateway lost"

    # --- gateways -------------------------------------------------------------------------------------------------------

    def tokens_came(self, item: TokenItem, stale: bool, actions: list[Action]) -> None:
        if stale and any(isinstance(action, Deliver) for action in actions):
            raise SimulationViolation(
                "no stale act", f"tokens of attempt {item.attempt} were delivered", stream_of(item.request_id)
            )

    def interrupted(self, event: Interrupted | LinkDown, gateway: SimulatedProcess, keeper: StreamKeeper) -> None:
        if isinstance(event, LinkDown):
            self._backoff.clear()  # retries after this are not due to backoff
            for stream in self.streams.values():
                if stream.gateway == gateway.name:
                    stream.losses, stream.interrupted_at = stream.losses + 1, gateway.now()
            return
        submission = keeper.submissions.get(event.request_id)
        if (
            submission is not None
            and submission.attempt == event.attempt
            and submission.sent
            and not submission.resuming
        ):
            drained, stream = event.reason is Interrupt.DRAINED, self.streams[stream_of(event.request_id)]
            stream.no_tries += drained or event.reason is Interrupt.PREEMPTED
            stream.steadied += 0.0 < submission.interrupted_at <= gateway.now() - self.plan.stream_limits.steady_s
            stream.interrupted_at = gateway.now()
            self._backoff[event.request_id] = event.attempt, gateway.now(), drained

    def broke(self, request_id: str, now: float) -> None:
        """The gateway gave an attempt up by itself, since it had heard nothing of it."""
        stream = self.streams[stream_of(request_id)]
        stream.steadied += 0.0 < stream.interrupted_at <= now - self.plan.stream_limits.steady_s
        stream.interrupted_at = now

    def submitted(self, submit: Submit, gateway: SimulatedProcess) -> None:
        stream = self.streams[stream_of(submit.request_id)]
        limits = self.plan.stream_limits
        tries = submit.attempt - submit.drained_attempts
        stream.attempts = max(stream.attempts, tries)
        forgiven = stream.steadied + sum(stream.got) // limits.progress_tokens
        if tries > limits.attempts_max * (1 + forgiven) or submit.drained_attempts > stream.no_tries + stream.losses:
            raise SimulationViolation("bounded retries", f"attempt {submit.attempt}", stream.asked.stream_id)
        attempt, since, drained = self._backoff.pop(submit.request_id, (0, 0.0, False))
        if attempt and submit.attempt == attempt + 1:
            doublings = -1 if forgiven else tries - 2
            least_s = 0.0 if drained else 0.499 * min(limits.resume_delay_s * 2**doublings, limits.resume_delay_s_max)
            waited_s = gateway.now() - since
            if waited_s < least_s or (drained and waited_s > 0.0):
                why = f"attempt {submit.attempt} {waited_s:.3f} s after the last one's end"
                raise SimulationViolation("draining" if drained else "bounded retries", why, stream.asked.stream_id)
        if self.plan.only_drains and tries > 1:
            raise SimulationViolation(
                "draining", f"attempt {submit.attempt} is no resume of a drain's", stream.asked.stream_id
            )

    # --- workers --------------------------------------------------------------------------------------------------------

    def drawn(self, request_id: str, tokens: int) -> None:
        stream_id = stream_of(request_id)
        self.drawn_tokens[stream_id] += tokens
        if self.world.now - self.streams[stream_id].left_at > LEFT_S and not self.plan.disturbed:
            raise SimulationViolation("no work for nobody", f"tokens {LEFT_S:g} s after its client left", stream_id)

    def failed(self, message: WorkFailed) -> None:
        """Checks that a placed request has room: the coordinator never counts a block as free that its worker does not have,
        unless answers get longer than expected."""
        judged = self.plan.hostility is None and not self.plan.overcommitted
        if any(words in message.message for words in _NO_ROOM) and judged:
            raise SimulationViolation("reservation before work", message.message, stream_of(message.request_id))

    def goes(self, worker: SimulatedProcess, held: Sequence[Held], why: str) -> None:
        if why == DRAINED and held:
            raise SimulationViolation("draining", f"{worker.name} goes with {held}", stream_of(held[0].request_id))
        if why != DRAINED and self.plan.only_drains:
            raise SimulationViolation("draining", f"{worker.name} goes before it is drained: {why}")

    def flips(
        self, worker: SimulatedProcess, held: Sequence[Held], allocator: BlockAllocator, no_transfer: bool
    ) -> None:
        """Checks a worker that is about to leave its role."""
        blocks = allocator.held_count + allocator.quarantined_count
        if held or blocks or not no_transfer:
            why = f"{worker.name} changes its role with {len(held)} attempts, {blocks} blocks, transfers: {not no_transfer}"
            raise SimulationViolation("flipping", why, stream_of(held[0].request_id) if held else "")

    def emitted(self, worker: str, message: Tokens) -> None:
        for item in message.items:
            for index in range(item.index, item.index + len(item.tokens)):
                key = (item.request_id, item.attempt, item.choice, index)
                if key in self._sent:
                    why = f"{worker} sends token {index} of attempt {item.attempt} again"
                    raise SimulationViolation("exactly once", why, stream_of(item.request_id))
                self._sent.add(key)

    # --- the coordinator ------------------------------------------------------------------------------------------------

    def said(self, message: Message) -> None:
        """Checks a message to a gateway or a worker: none about a request may leave before the request's row is in the
        ledger."""
        if isinstance(message, Accepted | Prefill | Reserve):
            if message.request_id not in self.ledger.rows:
                why = f"{type(message).__name__} leaves before its row is in the ledger"
                raise SimulationViolation("ledger first", why, stream_of(message.request_id))
            if isinstance(message, Accepted):
                self.accepted.add(message.request_id)

    def moved(self, incarnation: int, moved: StateChanged) -> None:
        if moved.state is RequestState.REJECTED:
            return
        key = (incarnation, moved.request_id, moved.attempt)
        if key in self._ends:
            raise SimulationViolation("one outcome", f"attempt {moved.attempt} ends again", stream_of(moved.request_id))
        self._ends.add(key)

    def taken(self, incarnation: int, submit: Submit, alive: int, now: float) -> None:
        """Counts a request that came into the queue again, and checks the limit of retries; the first time with this
        coordinator is no retry."""
        known, drained = (incarnation, submit.request_id), submit.drained_attempts
        whole = self._known.get((incarnation, stream_of(submit.request_id)))
        before, self._known[known] = self._known.get(known, whole), drained
        if before != drained:
            return
        limits, retries = self.plan.limits, self._retries.setdefault(incarnation, [])
        retries.append(now)
        in_window = sum(at > now - WINDOW_S for at in retries)
        if in_window - 1 >= limits.retry_floor + limits.retry_share * alive and self.plan.hostility is None:
            why = f"{in_window} came back within {WINDOW_S:g} s, with {alive} alive"
            raise SimulationViolation("bounded retries", why, stream_of(submit.request_id))

    def protocol_violation(self, incarnation: int, reason: str) -> None:
        if self.plan.hostility is None:
            raise SimulationViolation("peers behave", f"the coordinator says of {incarnation}: {reason}")

    def lets_flip(self, core: Core, incarnation: int) -> None:
        """Checks, when a worker is told that it holds nothing any more, that another worker keeps its role. A forced change
        and a worker that is leaving are exempt."""
        if core.cluster.workers[incarnation].leaving:
            return
        one = core.cluster.workers[incarnation].hello
        others = [w for w in core.cluster.workers.values() if w.hello.role is one.role and w.incarnation != incarnation]
        if not core.members.flipping[incarnation].force and all(other.draining for other in others):
            raise SimulationViolation("flipping", f"{one.name} leaves no {one.role} worker behind")

    def after_decision(self, core: Core) -> None:
        for account in core.accounts.billing.quotas.accounts.values():
            limits = account.limits
            if limits.concurrency is not None and account.concurrency > limits.concurrency and not _promised(core):
                raise SimulationViolation(
                    "quotas", f"{account.name} has {account.concurrency} requests of {limits.concurrency}"
                )
        for model, queue in core.cluster.queues.items():
            if queue.fair.size and not any(w.steps or w.allocations for w in core.cluster.workers.values()):
                pool = core.cluster.pools[model]
                pairs = [
                    (p, d)
                    for p in pool.prefill.values()
                    for d in pool.decode.values()
                    if not (p.draining or d.draining) and pool.may_pair(p, d, core.state.now)
                ]
                for waiting in core.cluster.requests.values():
                    fits = [p.could_ever_take(waiting.submit) and d.could_ever_take(waiting.submit) for p, d in pairs]
                    if waiting.entry is not None and any(fits):
                        why = f"{queue.fair.size} wait while every worker lies idle"
                        raise SimulationViolation("work conserving", why, stream_of(waiting.id))


def _promised(core: Core) -> bool:
    """Whether some bill was opened without asking a limit, because an earlier coordinator had accepted the request."""
    return any(
        bill.counters.attempt > 1 or bill.counters.adopted or not bill.grant.rated
        for bill in core.accounts.billing.bills.values()
    )


def stream_of(request_id: str) -> str:
    """Returns the stream of a request. Choices that are resumed one by one have requests of their own."""
    return request_id.partition(".")[0]
