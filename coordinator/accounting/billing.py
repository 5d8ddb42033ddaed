"""The bill of each request, from its acceptance until nothing of it is left; settled once, in the ledger. Pure.

A bill stays open while the request lives, and after its end while a worker still holds blocks for it or computes a chunk of
it: what a cancelled attempt has emitted is only known when its worker lets go (`Released`). Until then its concurrency and its
blocks count as taken, because they are.

A bill charges each computed prompt token once, even if a lost worker made it be computed again, and each emitted token once,
in any attempt. It counts how far the answer is known to have got, from its workers' reports, its gateway's (`resumed_tokens`,
and its last message), or the steps of a lost worker. So the order of reports does not matter, nor their repetition.

A request may come back after its bill was settled, like a stream that its gateway gave up and resumes. It gets a new bill that
continues from the old one, and its row in the ledger is opened again.

A bill of an earlier coordinator is an *orphan*: its row in the ledger is open, and a report of a worker or the gateway closes
it. Both report again what ended shortly before they lost the coordinator, and since. If no report comes within `orphan_s_max`,
for example because both are lost too, the bill is written off at its estimate.

If a worker's link is lost, for example because this process was stopped, the worker may soon come back and report what has
finished meanwhile. So a bill that it held is not closed as cancelled before `DOUBT_S` have passed. The same holds for the
gateway of an interrupted answer, since only the gateway knows how far the answer got.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from coordinator.accounting.quota import NO_RATES, Ask, Denial, Grant, Quotas
from proto.messages import RateState, Submit
from proto.parts import Held
from runtime.tenancy.tenants import Tenants
from scheduler.lifecycle import RequestState
from scheduler.request import StateTimes


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request is accepted: charged at its estimate until it ends."""

    request_id: str
    day: int  # the day on which it counts, in days since 1970, UTC
    tenant: str
    model: str
    priority_class: str
    borrowed: bool
    ask: Ask
    again: bool = False  # Its row may have been closed before. It is charged at least what it was charged then.
    from_token: int = 0
    """The first answer token that is charged here. Those before it are charged to another request, of which this one
    continues a choice."""


class Closed(msgspec.Struct, frozen=True, gc=False):
    """A request has ended, with what was really computed and emitted. Times are over all attempts."""

    request_id: str
    outcome: str
    charged_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    from_token: int = 0  # `output_tokens` are counted from here


Entry = Opened | Closed


@dataclass(frozen=True)
class Past:
    """The state that the ledger held when the coordinator started."""

    open: tuple[Opened, ...] = ()  # requests that an earlier coordinator accepted, without a written end
    charged: tuple[tuple[str, int, int], ...] = ()
    """(tenant, day, tokens) of the day of the start, the open ones included."""
    recent: tuple[tuple[str, float, int], ...] = ()
    """(tenant, seconds ago, tokens) of each request accepted in the last minute within its rates, oldest first."""


V = TypeVar("V")
SLICES = 16  # of the time and of the number of `Remembered`
LOST = "lost"  # the outcome of an orphan about which no report came
_UNSERVED = frozenset({RequestState.REJECTED, RequestState.EXPIRED, RequestState.FAILED})
"""Ends that the cluster caused. If nothing was computed either, the request is treated as if it had never come."""
DOUBT_S = 5.0  # longer than a worker or gateway that lives takes to come back


def whole_of(submit: Submit) -> str:
    """Returns the id of the request of which this one is a resumed choice, or an empty string."""
    end = f".c{submit.first_choice}"
    return submit.request_id.removesuffix(end) if submit.choices == 1 and submit.request_id.endswith(end) else ""


class UsageCounters(msgspec.Struct, eq=False, gc=False):
    """The usage on a bill. It is kept for a while after the bill is closed, so that a later bill can continue from it."""

    prompt_tokens_max: int
    attempt: int = 0
    computed_tokens: int = 0  # prompt tokens that were computed in this attempt
    prompt_tokens: int = 0  # prompt tokens to be charged
    prompt_done: bool = False
    """All of the prompt was computed or cached, in some attempt: what a later one computes of it again is not charged."""
    output_tokens: int = 0  # answer tokens that are known to be emitted, summed over choices
    from_token: int = 0  # the first answer token on this bill; those before it are on another one
    charged_tokens: int = 0  # tokens that an earlier bill of this request charged
    again: bool = False  # its row in the ledger may be closed
    adopted: bool = False  # it was an orphan, and its row is in the ledger
    held: int = 0  # reservations on workers, and dispatched chunks not yet reported
    doubt_until: float = 0.0  # the time until which a lost worker or gateway may still report more of it
    outcome: str = ""
    ended: str = ""  # its outcome before it was reopened

    @property
    def used_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens - self.from_token


class Bill(msgspec.Struct, eq=False, gc=False):
    grant: Grant
    request_id: str
    counters: UsageCounters
    choices: int = 1
    times: StateTimes = msgspec.field(default_factory=StateTimes)

    @property
    def estimate(self) -> Ask:
        """The amounts that were reserved, with those that were charged before."""
        counters, grant = self.counters, self.grant
        prompt_tokens = counters.prompt_tokens if counters.prompt_done else counters.prompt_tokens_max
        before = counters.charged_tokens - prompt_tokens
        return Ask(prompt_tokens, before + grant.tokens, grant.kv_blocks, before + grant.tokens_max, grant.sequences)


class Remembered(Generic[V]):
    """Keeps each entry for `keep_s` seconds after it was last put in. A later `put` drops expired entries.

    Entries lie in slices by when they were put in, and a slice is dropped as a whole, so that nothing is kept per entry but the
    entry itself. A slice is small enough that growing its table does not take long."""

    def __init__(self, keep_s: float, most: int) -> None:
        self.keep_s = keep_s
        self.most = most
        self.dropped_early = 0  # entries that `most` pushed out before their time
        self._slices: deque[tuple[float, dict[str, V]]] = deque()
        """The time at which each slice was begun, and its entries; oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: str) -> bool:
        return any(key in entries for _, entries in self._slices)

    def get(self, key: str) -> V | None:
        """The value that was put in last under this key."""
        for _, entries in reversed(self._slices):
            found = entries.get(key)
            if found is not None:
                return found
        return None

    def put(self, key: str, value: V, now: float) -> None:
        slices, span_s = self._slices, self.keep_s / SLICES
        while slices and slices[0][0] + self.keep_s + span_s <= now:
            self._count -= len(slices.popleft()[1])
        if not slices or slices[-1][0] + span_s <= now or len(slices[-1][1]) * SLICES >= self.most:
            slices.append((now, {}))
        entries = slices[-1][1]
        self._count += key not in entries
        entries[key] = value
        while self._count > self.most:
            dropped = len(slices.popleft()[1])
            self._count -= dropped
            self.dropped_early += dropped


class Billing:
    def __init__(self, tenants: Tenants, remembered_s: float = 600.0, remembered_max: int = 1_000_000) -> None:
        self.quotas = Quotas(tenants)
        self.bills: dict[str, Bill] = {}
        self.orphans: OrderedDict[str, float] = OrderedDict()  # request → when it is written off; soonest first
        self.doubts: OrderedDict[str, float] = OrderedDict()
        """Cancelled request → when it is closed as that; soonest first, or nearly."""
        self.settled: Remembered[UsageCounters] = Remembered(remembered_s, remembered_max)
        """The usage on closed bills. Only the ledger has that of older ones."""

    # --- what is configured, what was before ----------------------------------------------------------------------------

    def configure(self, tenants: Tenants, utc_offset_s: float, past: Past, orphans_until: float, now: float) -> None:
        self.quotas.replace(tenants, utc_offset_s, now)
        for tenant, ago_s, tokens in past.recent:
            self.quotas.seed_rates(tenant, tokens, now - ago_s)
        for tenant, day, tokens in past.charged:
            self.quotas.seed(tenant, day, tokens, now)
        for row in past.open:
            grant = self.quotas.restore(row.tenant, row.ask, row.day, now)
            counters = UsageCounters(row.ask.prompt_tokens, prompt_tokens=row.ask.prompt_tokens)
            counters.output_tokens = counters.from_token = row.from_token
            self._open(row.request_id, grant, counters)
            self.orphans[row.request_id] = orphans_until

    # --- acceptance -----------------------------------------------------------------------------------------------------

    def adopt(self, request_id: str, resumed_tokens: int) -> Bill | None:
        """Returns the open bill of an unknown request whose gateway has come back, or None. It is an orphan's bill, or that of
        a request that ended here (as by a loss of the link) and that is not closed yet. Tokens that the gateway had got are
        counted."""
        bill = self.bills.get(request_id)
        if bill is None:
            return None
        counters = bill.counters
        counters.ended, counters.outcome = counters.outcome, ""
        self.doubts.pop(request_id, None)
        counters.output_tokens = max(counters.output_tokens, resumed_tokens)
        if self.orphans.pop(request_id, None) is not None:
            counters.adopted = True
            if not resumed_tokens:
                counters.prompt_tokens = 0
        return bill

    def open(
        self, submit: Submit, ask: Ask, now: float, *, idle: bool, usual_s: float = 0.0, fingerprint: int | None = None
    ) -> Bill | Denial:
        """Open the bill of a new request; a denial takes nothing. `idle` and the rest: see `Quotas.reserve`."""
        grant = self.quotas.reserve(submit.tenant, ask, now, idle=idle, usual_s=usual_s, fingerprint=fingerprint)
        if isinstance(grant, Denial):
            return grant
        return self._open(submit.request_id, grant, UsageCounters(ask.prompt_tokens), submit.choices)

    def _open(self, request_id: str, grant: Grant, counters: UsageCounters, choices: int = 1) -> Bill:
        assert request_id not in self.bills
        bill = self.bills[request_id] = Bill(grant, request_id, counters, choices)
        return bill

    def open_promised(self, submit: Submit, ask: Ask, held: int, now: float) -> Bill:
        """Open the bill of a request in its second or a later attempt that has none: its client was promised an answer, and no
        limit is asked. Nothing that was charged before is charged again. If the earlier charge is forgotten here, the ledger
        has it, and tokens that were sent count as charged. `held`: reservations that workers brought along."""
        request_id, resumed_tokens, of_choice = submit.request_id, submit.resumed_tokens, bool(whole_of(submit))
        before = self.settled.get(request_id)
        if before is not None:
            counters = UsageCounters(
                before.prompt_tokens_max,
                before.attempt,
                before.computed_tokens,
                before.prompt_tokens,
                before.prompt_done,
                max(before.output_tokens, resumed_tokens),
                before.from_token,
                before.used_tokens,
            )
        else:
            done = of_choice or resumed_tokens > 0
            counters = UsageCounters(
                0 if done else submit.prompt_tokens, prompt_done=done, output_tokens=resumed_tokens
            )
            counters.from_token, counters.charged_tokens = (resumed_tokens, 0) if of_choice else (0, resumed_tokens)
        counters.again, counters.held = True, held
        due = 0 if counters.prompt_done else counters.prompt_tokens_max - counters.prompt_tokens
        ask = msgspec.structs.replace(ask, prompt_tokens=due)
        grant = self.quotas.restore(submit.tenant, ask, self.quotas.day(now), now, counted=False)
        return self._open(request_id, grant, counters, submit.choices)

    def undo(self, bill: Bill, now: float, orphans_until: float) -> None:
        """Undo the bill of a request that was not accepted after all. An orphan becomes one again, since its gateway may come
        once more."""
        if bill.counters.ended:
            counters = bill.counters
            counters.outcome, counters.ended = counters.ended, ""
            if not counters.held:
                self.doubts[bill.request_id] = counters.doubt_until
            return
        if bill.counters.adopted:
            self.orphans[bill.request_id] = orphans_until
            return
        del self.bills[bill.request_id]
        self.quotas.undo(bill.grant, now)

    def rates(self, tenant: str, now: float) -> RateState | None:
        """Returns None if nothing is limited, or the tenant is not known."""
        if self.quotas.tenants.policy(tenant) is None:
            return None
        rates = self.quotas.rates(tenant, now)
        return None if rates is NO_RATES else rates

    # --- life -----------------------------------------------------------------------------------------------------------

    def found(self, held: Held, of_answer: bool) -> None:
        """A worker has registered with this; `of_answer`: a decode worker."""
        bill = self.bills.get(held.request_id)
        if bill is not None:
            counters = bill.counters
            counters.held += 1
            bill.choices = max(bill.choices, held.seqs if of_answer else 1)
            counters.output_tokens = max(counters.output_tokens, held.resumed_tokens)

    def hold(self, request_id: str, count: int = 1) -> None:
        """Count `count` more reservations or chunks on workers."""
        bill = self.bills.get(request_id)
        if bill is not None:
            bill.counters.held += count

    def computed(self, request_id: str, attempt: int, tokens: int) -> None:
        bill = self.bills.get(request_id)
        if bill is None or (counters := bill.counters).prompt_done or attempt < counters.attempt:
            return
        if attempt > counters.attempt:
            counters.attempt, counters.computed_tokens = attempt, 0
        computed = counters.computed_tokens = counters.computed_tokens + tokens
        if computed > counters.prompt_tokens:
            counters.prompt_tokens = min(computed, counters.prompt_tokens_max)

    def prompt_done(self, request_id: str) -> None:
        bill = self.bills.get(request_id)
        if bill is not None:
            bill.counters.prompt_done = True

    def emitted(self, request_id: str, resumed_tokens: int, tokens: int, *, first: bool = False) -> int:
        """Count `tokens` that an attempt has emitted after `resumed_tokens`. `first`: and the first token of each choice
        besides. Returns how many of them are new."""
        bill = self.bills.get(request_id)
        if bill is None:
            return 0
        new = resumed_tokens + tokens + (bill.choices if first else 0) - bill.counters.output_tokens
        if new <= 0:
            return 0
        bill.counters.output_tokens += new
        return new

    def lost(self, request_id: str, now: float) -> Closed | None:
        """Count one reservation or chunk less, because a worker's link was lost."""
        bill = self.bills.get(request_id)
        if bill is not None:
            bill.counters.doubt_until = now + DOUBT_S
        return self.release(request_id, now)

    def doubt(self, request_id: str, now: float) -> None:
        """Its gateway's link was lost, or it was failed with its worker. Where the answer has begun and no worker holds the
        request, only the gateway can say how far the answer got, so the bill stays open for it."""
        bill = self.bills.get(request_id)
        if bill is not None and bill.counters.output_tokens and not bill.counters.held:
            bill.counters.doubt_until = now + DOUBT_S

    def release(self, request_id: str, now: float) -> Closed | None:
        """Count one reservation or chunk less on workers."""
        bill = self.bills.get(request_id)
        if bill is None or not (counters := bill.counters).held:
            return None  # a worker may bring along what was not counted when this bill was opened
        counters.held -= 1
        return self._close_if_over(bill, now)

    # --- ends -----------------------------------------------------------------------------------------------------------

    def end(self, request_id: str, outcome: str, now: float) -> Closed | None:
        bill = self.bills.get(request_id)
        if bill is None:
            return None
        bill.counters.outcome = outcome
        return self._close_if_over(bill, now)

    def is_open_to(self, request_id: str) -> bool:
        """Whether a worker may still report the end of a request that is not known here any more."""
        return request_id in self.orphans or request_id in self.doubts

    def end_orphan(self, request_id: str, outcome: str, now: float) -> Closed | None:
        """End an earlier coordinator's request, or one whose worker's link was lost: a worker reports its end, or its gateway
        has the whole answer."""
        if not self.is_open_to(request_id):
            return None
        counters = self.bills[request_id].counters
        if outcome != RequestState.CANCELLED:
            counters.doubt_until = now
        elif counters.outcome:
            outcome = counters.outcome  # one that lets go of an attempt does not know of all of the answer
        else:
            counters.doubt_until = now + DOUBT_S  # its gateway may know of more, and be on its way back
        return self.end(request_id, outcome, now)

    def give_up(self, request_id: str, now: float) -> Closed | None:
        """The gateway of an orphan wants no more of it. A worker that holds it may be on its way back, and know of more."""
        if request_id not in self.orphans:
            return None
        self.bills[request_id].counters.doubt_until = now + DOUBT_S
        return self.end(request_id, RequestState.CANCELLED, now)

    def write_off(self, now: float, orphans_until: float) -> list[Closed]:
        """Close doubts and orphans whose time has come. Orphans that a worker still holds get more time."""
        closed = []
        while self.doubts and (first := next(iter(self.doubts.items())))[1] <= now:
            del self.doubts[first[0]]
            if (entry := self._close_if_over(self.bills[first[0]], now)) is not None:
                closed.append(entry)
        while self.orphans and (first := next(iter(self.orphans.items())))[1] <= now:
            request_id, _ = first
            del self.orphans[request_id]
            bill = self.bills[request_id]
            counters = bill.counters
            if counters.held:
                self.orphans[request_id] = orphans_until
                continue
            if not counters.outcome:
                counters.outcome = LOST
                counters.output_tokens = max(counters.output_tokens, counters.from_token + bill.estimate.output_tokens)
            closed.append(self._close(bill, now))
        return closed

    def next_write_off(self) -> float | None:
        soonest = [next(iter(waiting.values())) for waiting in (self.orphans, self.doubts) if waiting]
        return min(soonest, default=None)

    def _close_if_over(self, bill: Bill, now: float) -> Closed | None:
        counters = bill.counters
        if not counters.outcome or counters.held:
            return None
        if counters.outcome == RequestState.CANCELLED and now < counters.doubt_until:
            self.doubts[bill.request_id] = counters.doubt_until
            return None
        return self._close(bill, now)

    def _close(self, bill: Bill, now: float) -> Closed:
        del self.bills[bill.request_id]
        self.orphans.pop(bill.request_id, None)
        self.doubts.pop(bill.request_id, None)
        counters = bill.counters
        whole = counters.prompt_done or counters.outcome == RequestState.FINISHED
        cached_tokens = max(counters.prompt_tokens_max - counters.prompt_tokens, 0) if whole else 0
        used_tokens = counters.used_tokens
        if used_tokens or counters.outcome not in _UNSERVED:
            self.quotas.settle(bill.grant, used_tokens - counters.charged_tokens, now)
        else:
            self.quotas.undo(bill.grant, now)
        self.settled.put(bill.request_id, counters, now)
        return Closed(
            bill.request_id,
            counters.outcome,
            used_tokens,
            counters.prompt_tokens,
            cached_tokens,
            counters.output_tokens - counters.from_token,
            1000 * bill.times.queue_s,
            1000 * bill.times.prefill_s,
            1000 * bill.times.transfer_s,
            1000 * bill.times.decode_s,
            counters.from_token,
        )
