"""The quotas and usage of tenants: reserved on every level at once, settled exactly once. Pure.

A request takes from all levels of its tenant (user, organisation) or from none. Two kinds of limits:

- **Rates** (requests/min, tokens/min) are token buckets that hold one minute's worth: over any span of t minutes a level admits
  at most limit · (1 + t). Tokens are taken on the estimate and trued up at the end; the difference may leave a bucket in debt,
  which later minutes pay.
- **Held** amounts (concurrency, tokens in flight, KV blocks) are there from acceptance to the end. The **daily budget** is a
  counter that starts anew at midnight UTC; a request counts for the day on which it was accepted.

Tokens in flight and the daily budget are taken on the most that a request may come to, and what it does not use is given back
at its end. A request is admitted if its estimate fits beside the most that all others may use. So even if the estimate is
wrong, the limit is exceeded by no more than the rest of one request.

All amounts are integers, buckets in token·nanoseconds, so that what is given back is exactly what was taken.

`borrow`: while capacity is idle, a level that allows it lets its rates be exceeded. Such a grant takes nothing from the rates
it exceeds, neither now nor in the true-up, and is marked: what was borrowed goes first in an overload.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import msgspec

from proto.messages import RateState
from runtime.tenancy.tenants import Level, QuotaLimits, Tenants
from scheduler.waiting.projection import ComingBack
from scheduler.waiting.rates import FreeingRate

NS = 1_000_000_000
NO_LIMITS = QuotaLimits()
PER_MIN = 60 * NS  # units of one token, so that a limit of n per minute is n units per nanosecond
HELD_RETRY_S = 1.0  # the shortest wait that is told if a held amount is at its limit
LATER = 1.1  # a client comes back up to so many times later than it was told
BORROW_RETRY_S = 60.0  # a client may come again after so long, if only idle capacity can admit its request
_Left = tuple[int, int, float]  # one limit, what remains of it, and seconds until all of it is there again
_NONE: _Left = (0, 0, 0.0)
NO_RATES = RateState(0, 0, 0.0, 0, 0, 0.0)
DAY_S = 86_400


class TokenBucket:
    """A rate as a token bucket with integer content; refilled when looked at."""

    def __init__(self, per_min: int, now_ns: int) -> None:
        self.per_min = per_min
        self.content = per_min * PER_MIN
        self._at_ns = now_ns

    def refill(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            full = self.per_min * PER_MIN
            self.content = min(full, self.content + (now_ns - self._at_ns) * self.per_min)
            self._at_ns = now_ns

    def take(self, amount: int) -> None:
        """Take an amount; negative gives it back. The bucket is never fuller than full."""
        self.content = min(self.per_min * PER_MIN, self.content - amount * PER_MIN)

    def wait_ns(self, amount: int) -> int:
        """Returns nanoseconds until the amount can be taken. The caller has checked that the bucket can hold as much."""
        return -(-max(amount * PER_MIN - self.content, 0) // self.per_min)

    def resize(self, per_min: int) -> None:
        """Change the limit; what was used stays used."""
        self.content += (per_min - self.per_min) * PER_MIN
        self.per_min = per_min


class Account:
    """One level: its limits, and what is taken of them."""

    def __init__(self, level: Level, now_ns: int) -> None:
        self.name = level.name
        self.limits = QuotaLimits()
        self.borrow = self.limited = False
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.open = FreeingRate()  # sequences of requests, from acceptance to the end
        self.coming: ComingBack[int] = ComingBack()  # the tokens of those that were told when to come back
        self.coming_tokens = 0
        self.tokens_in_flight = self.kv_blocks = 0
        self.day = 0
        self.day_tokens = 0  # tokens of `day`: those that are settled, and the most that open requests may come to
        self.day_spare_tokens = 0  # tokens of `day_tokens` that open requests are expected to give back
        self.set(level, now_ns)

    def set(self, level: Level, now_ns: int) -> None:
        self.limits, self.borrow = level.limits, level.borrow
        self.limited = level.limits != NO_LIMITS
        self.requests = self._bucket(self.requests, level.limits.requests_per_min, now_ns)
        self.tokens = self._bucket(self.tokens, level.limits.tokens_per_min, now_ns)

    @staticmethod
    def _bucket(bucket: TokenBucket | None, per_min: int | None, now_ns: int) -> TokenBucket | None:
        if per_min is None:
            return None
        if bucket is None:
            return TokenBucket(per_min, now_ns)
        bucket.refill(now_ns)
        bucket.resize(per_min)
        return bucket

    def refresh(self, now_ns: int, day: int) -> None:
        if self.requests is not None:
            self.requests.refill(now_ns)
        if self.tokens is not None:
            self.tokens.refill(now_ns)
        if day > self.day:
            self.day, self.day_tokens, self.day_spare_tokens = day, 0, 0

    def tell(self, due: float, who: Hashable, tokens: int) -> None:
        """Count a request that was told to come back, until then."""
        if self.coming.tell(due, who, tokens):
            self.coming_tokens += tokens

    def drop_due(self, who: Hashable, now: float) -> None:
        """Count those that are due no longer, nor `who`, which asks anew."""
        self.coming_tokens -= sum(self.coming.take_due(now)) + (self.coming.give_up(who) or 0)

    @property
    def concurrency(self) -> int:
        return self.open.held

    def frees_s(self, amount: int, of: int, now: float, usual_s: float) -> float:
        """Returns seconds until `amount` comes back of `of`, which the open requests hold together."""
        return self.open.wait_s(amount * self.open.held / max(of, 1), now, usual_s)

    @property
    def idle(self) -> bool:
        return not (self.concurrency or self.tokens_in_flight or self.kv_blocks)


class Grant(msgspec.Struct, eq=False, gc=False):
    """The amounts that one request has taken. There are as many as requests, hence small."""

    accounts: tuple[Account, ...]  # empty once it is settled
    tokens: int  # the estimate of its tokens that token rates were charged with
    tokens_max: int  # The most tokens that it may use. They are held, and taken from daily budgets.
    kv_blocks: int
    day: int
    rated: int
    """Bits 2i and 2i + 1: the request rate and the token rate of account i were charged. A bit is 0 if there was no such
    limit, or if the request borrowed beyond it."""
    borrowed: bool
    at: float  # when it was taken
    sequences: int


class Ask(msgspec.Struct, frozen=True, gc=False):
    """The amounts that a request needs. Output is the estimate; the truth comes with `settle`."""

    prompt_tokens: int
    output_tokens: int
    kv_blocks: int
    output_tokens_max: int = 0  # the most that its output may come to; no less than the estimate
    sequences: int = 1  # How many answers it asks for with `n`. Each counts for `concurrency`.

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens_max(self) -> int:
        return self.prompt_tokens + max(self.output_tokens, self.output_tokens_max)


@dataclass(frozen=True)
class Denial:
    """Nothing was taken."""

    level: str  # name of the tenant or organisation whose limit it is
    limit: str  # as in the tenants file
    retry_after_s: float
    """Seconds until the same ask is admitted if no other is, a day at the most; 0: never. A held amount is expected to have
    come back then, behind what others were told to wait for."""
    in_line: bool = False  # It waits for what others hold, or for a rate. Those that come later wait behind it.

    def __str__(self) -> str:
        what = "the limit is reached" if self.retry_after_s else "this request alone is over the limit"
        return f"{self.limit} of {self.level}: {what}"


@dataclass
class Quotas:
    """`utc_offset_s` is the wall clock minus the clock of `now`: it says when a day ends."""

    tenants: Tenants
    utc_offset_s: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    _of: dict[str, tuple[Account, ...]] = field(default_factory=dict, repr=False)  # the levels of each tenant
    _level_names: set[str] = field(default_factory=set, repr=False)  # names of the levels of all tenants in the file
    _dropped_on: int = 0  # the day on which levels that are not in the file were last dropped

    def __post_init__(self) -> None:
        self._level_names = {level.name for policy in self.tenants.policies.values() for level in policy.levels}

    # --- taking and giving back ---------------------------------------------------------------------------------------

    def reserve(
        self,
        tenant: str,
        ask: Ask,
        now: float,
        *,
        idle: bool = False,
        usual_s: float = 0.0,
        fingerprint: int | None = None,
    ) -> Grant | Denial:
        """Take on all levels or on none. `idle`: capacity lies idle, so borrowers may exceed rates. `usual_s`: how long
        requests usually take. `fingerprint`: by which a request is known when it comes again."""
        assert self.tenants.policy(tenant) is not None, "the caller refuses tenants that the file does not know"
        assert ask.prompt_tokens >= 0 and ask.output_tokens >= 0 and ask.kv_blocks >= 0
        accounts = self._accounts(tenant, now)
        limited = [account for account in accounts if account.limited]
        for account in limited:
            account.drop_due(fingerprint, now)
        denials = [(d, account) for account in limited for d in self._denials(account, ask, now, idle, usual_s)]
        if denials:
            # A wait is worth telling only if it is long enough for all of them.
            denial, account = max(denials, key=lambda found: found[0].retry_after_s or float("inf"))
            if denial.in_line:
                account.tell(now + LATER * denial.retry_after_s, fingerprint, ask.tokens)
            return denial
        return self._take(accounts, ask, idle, now)

    def restore(self, tenant: str, ask: Ask, day: int, now: float, *, counted: bool = True) -> Grant:
        """Hold again what had been granted before: no limit is asked and no rate is charged. `counted`: `seed` has counted its
        estimate in the daily budget."""
        accounts = self._accounts(tenant, now)
        for account in accounts:
            account.open.take(ask.sequences, now)
            account.tokens_in_flight += ask.tokens_max
            account.kv_blocks += ask.kv_blocks
            if account.day == day:
                account.day_tokens += ask.tokens_max - (ask.tokens if counted else 0)
                account.day_spare_tokens += ask.tokens_max - ask.tokens
        return Grant(accounts, ask.tokens, ask.tokens_max, ask.kv_blocks, day, 0, False, now, ask.sequences)

    def settle(self, grant: Grant, used_tokens: int, now: float) -> None:
        """The request has ended: give back what was held, and charge what was used instead of the estimate. Once only."""
        assert used_tokens >= 0
        self._close(grant, used_tokens, now, undo=False)

    def undo(self, grant: Grant, now: float) -> None:
        """As if it had never been: for a request that was sent away without a token computed. Once only."""
        self._close(grant, 0, now, undo=True)

    def seed(self, tenant: str, day: int, tokens: int, now: float) -> None:
        """Begin with a tenant's usage of a day by the ledger, open requests at their estimates included; before any request is
        taken."""
        for account in self._accounts(tenant, now):
            if account.day == day:
                account.day_tokens += tokens

    def seed_rates(self, tenant: str, tokens: int, at: float) -> None:
        """Charge the rates for a request of the past. Called in order of time, and before anything else."""
        for account in self._accounts(tenant, at):
            if account.requests is not None:
                account.requests.take(1)
            if account.tokens is not None:
                account.tokens.take(tokens)

    # --- looking ------------------------------------------------------------------------------------------------------

    def rates(self, tenant: str, now: float) -> RateState:
        """The limits of requests and of tokens with the least left, on any level, per minute or per day."""
        accounts = self._accounts(tenant, now)
        if not any(account.limited for account in accounts):
            return NO_RATES
        requests = [_left(account.requests) for account in accounts if account.requests is not None]
        tokens = [_left(account.tokens) for account in accounts if account.tokens is not None]
        for account in accounts:
            most = account.limits.tokens_per_day
            if most is not None:
                tokens.append((most, min(max(most - account.day_tokens, 0), most), self._to_midnight_s(account, now)))
        if not requests and not tokens:
            return NO_RATES
        return RateState(*min(requests, key=_remaining, default=_NONE), *min(tokens, key=_remaining, default=_NONE))

    def day(self, now: float) -> int:
        """Days since 1970, UTC."""
        return int((now + self.utc_offset_s) // DAY_S)

    # --- changes ------------------------------------------------------------------------------------------------------

    def replace(self, tenants: Tenants, utc_offset_s: float, now: float) -> None:
        """Put a new tenants file in force. Limits change; used and held amounts stay, also those of tenants that are gone."""
        self.tenants, self.utc_offset_s = tenants, utc_offset_s
        now_ns, day = round(now * NS), self.day(now)
        levels = {level.name: level for policy in tenants.policies.values() for level in policy.levels}
        self._level_names = set(levels)
        for name, account in list(self.accounts.items()):
            account.day = min(account.day, day)  # the wall clock was ahead, and its day has yet to begin
            if name in levels:
                account.set(levels[name], now_ns)
        self._drop_gone(day)

    def _drop_gone(self, day: int) -> None:
        """Drop the levels that the file does not have and that hold nothing. A level that has used a daily budget stays until
        the day is over, since this use counts if it comes back."""
        self._of.clear()
        self._dropped_on = day
        for name, account in list(self.accounts.items()):
            is_spent = account.limits.tokens_per_day is not None and account.day_tokens and account.day >= day
            if name not in self._level_names and account.idle and not is_spent:
                del self.accounts[name]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _accounts(self, tenant: str, now: float) -> tuple[Account, ...]:
        now_ns, day = round(now * NS), self.day(now)
        found = self._of.get(tenant)
        if found is None:
            policy = self.tenants.policy(tenant)
            # Only `restore` and `seed` come with a tenant that the file no longer has: they go with the next file or day.
            levels = policy.levels if policy is not None else tuple(_levels_of_unknown(tenant))
            for level in levels:
                if level.name not in self.accounts:
                    self.accounts[level.name] = Account(level, now_ns)
            found = self._of[tenant] = tuple(self.accounts[level.name] for level in levels)
        for account in found:
            if account.requests is not None or account.tokens is not None or account.day < day:
                account.refresh(now_ns, day)
        return found

    def _denials(self, account: Account, ask: Ask, now: float, idle: bool, usual_s: float) -> Iterator[Denial]:
        limits, borrows = account.limits, account.borrow and idle

        def held_s(amount: int, over: int, of: int) -> float:
            """Returns seconds until the held amount `of` is less by `over`, and by `amount` for each request that comes back
            before."""
            return max(account.frees_s(over + len(account.coming) * amount, of, now, usual_s), HELD_RETRY_S)

        for limit, amount, coming, bucket in (
            ("requests_per_min", 1, len(account.coming), account.requests),
            ("tokens_per_min", ask.tokens, account.coming_tokens, account.tokens),
        ):
            if bucket is None or borrows or bucket.wait_ns(amount) == 0:
                continue
            if amount <= bucket.per_min:
                yield Denial(account.name, limit, _seconds(bucket.wait_ns(coming + amount)), in_line=True)
            else:
                yield Denial(account.name, limit, BORROW_RETRY_S if account.borrow else 0.0)
        for limit, amount, most, held in (
            ("concurrency", ask.sequences, limits.concurrency, account.concurrency),
            ("tokens_in_flight", ask.tokens, limits.tokens_in_flight, account.tokens_in_flight),
            ("kv_blocks", ask.kv_blocks, limits.kv_blocks, account.kv_blocks),
        ):
            if most is not None and held + amount > most:
                wait_s = min(held_s(amount, held + amount - most, held), float(DAY_S)) if amount <= most else 0.0
                yield Denial(account.name, limit, wait_s, in_line=True)
        most = limits.tokens_per_day
        if most is not None and account.day_tokens + ask.tokens > most:
            wait_s = min(self._to_midnight_s(account, now) + 1e-3, float(DAY_S))  # not a moment too early
            held = account.day_tokens - account.day_spare_tokens + ask.tokens <= most
            if held:  # requests that run are expected to give so much back
                over = account.day_tokens + ask.tokens - most
                wait_s = min(held_s(ask.tokens, over, account.day_spare_tokens), wait_s)
            yield Denial(account.name, "tokens_per_day", wait_s if ask.tokens <= most else 0.0, held)

    def _to_midnight_s(self, account: Account, now: float) -> float:
        """Seconds until the account's daily budget begins anew, at most a day."""
        midnight_s = (account.day + 1) * DAY_S - (now + self.utc_offset_s)
        return min(max(midnight_s, 0.0), float(DAY_S))

    def _take(self, accounts: tuple[Account, ...], ask: Ask, idle: bool, now: float) -> Grant:
        rated, borrowed, asked_tokens = 0, False, ask.tokens
        for index, account in enumerate(accounts):
            for shift, bucket, amount in ((0, account.requests, 1), (1, account.tokens, asked_tokens)):
                if bucket is None:
                    continue
                if bucket.wait_ns(amount) == 0:
                    bucket.take(amount)
                    rated |= 1 << (2 * index + shift)
                else:
                    assert idle and account.borrow
                    borrowed = True
            account.open.take(ask.sequences, now)
            account.tokens_in_flight += ask.tokens_max
            account.kv_blocks += ask.kv_blocks
            account.day_tokens += ask.tokens_max
            account.day_spare_tokens += ask.tokens_max - asked_tokens
        day = accounts[0].day
        return Grant(accounts, asked_tokens, ask.tokens_max, ask.kv_blocks, day, rated, borrowed, now, ask.sequences)

    def _close(self, grant: Grant, used_tokens: int, now: float, undo: bool) -> None:
        assert grant.accounts, "a grant is settled once"
        more, now_ns, day = used_tokens - grant.tokens, round(now * NS), self.day(now)
        for index, account in enumerate(grant.accounts):
            account.refresh(now_ns, day)
            if undo:
                account.open.undo(grant.sequences)
            else:
                account.open.give_back(grant.sequences, now - grant.at, now)
            account.tokens_in_flight -= grant.tokens_max
            account.kv_blocks -= grant.kv_blocks
            assert account.tokens_in_flight >= 0 and account.kv_blocks >= 0
            if undo and account.requests is not None and grant.rated & 1 << (2 * index):
                account.requests.take(-1)
            if account.tokens is not None and grant.rated & 2 << (2 * index):
                account.tokens.take(more)
            if account.day <= grant.day:
                account.day_tokens += used_tokens - grant.tokens_max
                account.day_spare_tokens -= grant.tokens_max - grant.tokens
        grant.accounts = ()
        if day > self._dropped_on:
            self._drop_gone(day)


def _levels_of_unknown(tenant: str) -> Iterator[Level]:
    organisation, slash, _ = tenant.partition("/")
    if slash:
        yield Level(tenant, QuotaLimits(), False)
    yield Level(organisation, QuotaLimits(), False)


def _seconds(wait_ns: int) -> float:
    """A day at the most; rounded up to a whole microsecond and one more, so that `now` plus it in floats is never too early."""
    return min((wait_ns // 1000 + 2) / 1e6, float(DAY_S))


def _left(bucket: TokenBucket) -> _Left:
    missing_ns = bucket.wait_ns(bucket.per_min)
    return bucket.per_min, max(bucket.content // PER_MIN, 0), min(missing_ns / NS, float(DAY_S))


def _remaining(left: _Left) -> int:
    return left[1]
