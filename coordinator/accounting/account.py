"""One level of a tenant's quotas: its limits, what is taken of them, and what one request has taken. Pure."""

from collections.abc import Hashable

import msgspec

from runtime.tenancy.tenants import Level, QuotaLimits
from scheduler.waiting.freeing import ComingBack, FreeingRate

NS = 1_000_000_000


NO_LIMITS = QuotaLimits()


PER_MIN = 60 * NS  # units of one token, so that a limit of n per minute is n units per nanosecond


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
