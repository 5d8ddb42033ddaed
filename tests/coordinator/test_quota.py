"""Quotas: all levels or none, given back exactly, and right about when to come back. A naive twin judges random histories."""

import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from coordinator.accounting.quota import BORROW_RETRY_S, DAY_S, HELD_RETRY_S, Ask, Denial, Grant, Quotas
from proto.messages import RateState
from runtime.tenancy.tenants import Level, Tenants, parse
from tests.helpers import first


def quotas(text: str, offset_s: float = 0.0) -> Quotas:
    return Quotas(parse(text), offset_s)


def granted(answer: Grant | Denial) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def denied(answer: Grant | Denial) -> tuple[str, str, float]:
    assert isinstance(answer, Denial), answer
    return answer.level, answer.limit, answer.retry_after_s


def state_of(q: Quotas) -> dict[str, tuple[object, ...]]:
    return {
        name: (
            a.requests and a.requests.content,
            a.tokens and a.tokens.content,
            a.concurrency,
            a.tokens_in_flight,
            a.kv_blocks,
            a.day_tokens,
            a.day_spare_tokens,
        )
        for name, a in q.accounts.items()
    }


ASK = Ask(60, 40, 7)


def test_denial_takes_nothing_on_any_level() -> None:
    """A request denied on one level takes nothing from any other level."""
    q = quotas(
        "[tenants.a]\nlimits = { concurrency = 1 }\n"
        "[tenants.a.users.x]\nlimits = { requests_per_min = 5, tokens_per_min = 1000 }\n[tenants.a.users.y]"
    )
    first = granted(q.reserve("a/y", ASK, 0.0))
    q.rates("a/x", 0.0)
    before = state_of(q)
    assert denied(q.reserve("a/x", ASK, 0.0)) == ("a", "concurrency", HELD_RETRY_S)
    assert state_of(q) == before
    q.settle(first, 0, 0.0)
    granted(q.reserve("a/x", ASK, 0.0))


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ("tokens_per_min = 99", "tokens_per_min"),
        ("tokens_in_flight = 99", "tokens_in_flight"),
        ("kv_blocks = 6", "kv_blocks"),
        ("tokens_per_day = 99", "tokens_per_day"),
    ],
)
def test_oversized_request_gets_no_retry_time(limits: str, limit: str) -> None:
    """A request that alone is over a limit is denied with no time to come back."""
    q = quotas(f"[tenants.a]\nlimits = {{ {limits}, requests_per_min = 1 }}")
    assert denied(q.reserve("a", ASK, 0.0)) == ("a", limit, 0.0)


def test_true_up_may_leave_a_debt() -> None:
    """An estimate is corrected to the real tokens, and a debt delays the next request."""
    q = quotas("[tenants.a]\nlimits = { tokens_per_min = 600 }")
    q.settle(granted(q.reserve("a", Ask(100, 500, 0), 0.0)), 100, 0.0)
    assert q.rates("a", 0.0).remaining_tokens == 500
    q.settle(granted(q.reserve("a", Ask(100, 100, 0), 0.0)), 700, 0.0)
    assert q.rates("a", 0.0).remaining_tokens == 0
    _, _, wait_s = denied(q.reserve("a", Ask(10, 0, 0), 0.0))
    assert wait_s == pytest.approx(21.0, abs=1e-4)  # 200 in debt, 10 more, at 10 a second


def test_day_begins_at_midnight_utc() -> None:
    """A daily limit begins anew at midnight UTC, and each request counts for the day it came on."""
    q = quotas("[tenants.a]\nlimits = { tokens_per_day = 250 }", offset_s=86_400.0 - 100.0)
    late, _ = granted(q.reserve("a", ASK, 40.0)), granted(q.reserve("a", ASK, 50.0))
    level, limit, wait_s = denied(q.reserve("a", ASK, 60.0))
    assert (level, limit) == ("a", "tokens_per_day") and wait_s == pytest.approx(40.0, abs=0.01)
    granted(q.reserve("a", ASK, 60.0 + wait_s))
    q.settle(late, 1000, 110.0)  # yesterday's
    assert q.accounts["a"].day_tokens == 100


def test_held_and_daily_limits_count_maximum() -> None:
    """Limits on held and daily tokens count the most that may come, and let one request in beside it."""
    q = quotas("[tenants.a]\nlimits = { tokens_in_flight = 1000, tokens_per_day = 2000 }")
    long = Ask(10, 2, 0, 900)
    running = granted(q.reserve("a", long, 0.0))
    assert q.accounts["a"].tokens_in_flight == q.accounts["a"].day_tokens == 910
    granted(q.reserve("a", long, 0.0))  # 1,820 may come: over the limit by one request
    assert denied(q.reserve("a", long, 0.0)) == ("a", "tokens_in_flight", HELD_RETRY_S)
    q.settle(running, 910, 0.0)
    third = granted(q.reserve("a", long, 0.0))
    q.settle(third, 910, 0.0)
    assert denied(q.reserve("a", Ask(60, 20, 0), 0.0)) == ("a", "tokens_per_day", HELD_RETRY_S), "one may give back"
    level, limit, wait_s = denied(q.reserve("a", Ask(100, 200, 0), 0.0))
    assert (level, limit) == ("a", "tokens_per_day") and wait_s > HELD_RETRY_S, "all that is given back is not enough"


def test_restored_requests_count_their_maximum() -> None:
    """Open requests restored after a restart count with the most tokens that may come."""
    q, ask = quotas("[tenants.a]\nlimits = { tokens_in_flight = 1000, tokens_per_day = 1000 }"), Ask(10, 2, 0, 995)
    q.seed("a", 0, ask.tokens, 0.0)
    grant = q.restore("a", ask, 0, 0.0)
    assert q.accounts["a"].day_tokens == q.accounts["a"].tokens_in_flight == 1005
    denied(q.reserve("a", Ask(1, 1, 0), 0.0))
    q.settle(grant, 30, 0.0)
    assert q.accounts["a"].day_tokens == 30 and not q.accounts["a"].day_spare_tokens


def test_borrowing_passes_rates_only_while_idle() -> None:
    """Borrowing exceeds only rates, only while the cluster is idle, and is marked and leaves no debt."""
    q = quotas(
        "[tenants.a]\nborrow = true\nlimits = { requests_per_min = 1, tokens_per_min = 100, concurrency = 3 }\n"
        "[tenants.b]\nlimits = { requests_per_min = 1 }"
    )
    assert not granted(q.reserve("a", ASK, 0.0, idle=True)).borrowed
    assert denied(q.reserve("a", ASK, 0.0))[1] in ("requests_per_min", "tokens_per_min")
    content = state_of(q)["a"][:2]
    extra = granted(q.reserve("a", ASK, 0.0, idle=True))
    assert extra.borrowed
    q.settle(extra, 10_000, 0.0)
    assert state_of(q)["a"][:2] == content  # neither the loan nor its true-up is a debt
    granted(q.reserve("a", ASK, 0.0, idle=True))
    granted(q.reserve("a", ASK, 0.0, idle=True))
    assert denied(q.reserve("a", ASK, 0.0, idle=True))[1] == "concurrency"
    granted(q.reserve("b", ASK, 0.0, idle=True))
    assert denied(q.reserve("b", ASK, 0.0, idle=True))[1] == "requests_per_min"


def test_undo_leaves_no_trace() -> None:
    q = quotas("[tenants.a]\nlimits = { requests_per_min = 3, tokens_per_min = 500, tokens_per_day = 1000 }")
    q.rates("a", 0.0)
    before = state_of(q)
    q.undo(granted(q.reserve("a", ASK, 0.0)), 0.0)
    assert state_of(q) == before


def test_grant_cannot_be_settled_twice() -> None:
    q = quotas("[tenants.a]")
    grant = granted(q.reserve("a", ASK, 0.0))
    q.settle(grant, 5, 0.0)
    with pytest.raises(AssertionError):
        q.settle(grant, 5, 0.0)


def test_new_limits_keep_held_and_used() -> None:
    """A new tenants file changes limits and keeps what is held and used."""
    q = quotas("[tenants.a]\nlimits = { tokens_per_min = 1000, concurrency = 4 }")
    grants = [granted(q.reserve("a", ASK, 0.0)) for _ in range(2)]
    q.replace(parse("[tenants.a]\nlimits = { tokens_per_min = 500, concurrency = 2, kv_blocks = 20 }"), 0.0, 0.0)
    assert q.rates("a", 0.0).remaining_tokens == 300
    assert denied(q.reserve("a", ASK, 0.0))[1] == "concurrency"
    q.replace(parse("[tenants.b]"), 0.0, 0.0)
    for grant in grants:
        q.settle(grant, 100, 0.0)
    q.replace(parse("[tenants.b]"), 86_400.0, 0.0)
    assert "a" not in q.accounts  # gone a day later, when its budget does not matter any more


def test_rates_show_tightest_level() -> None:
    """Reported rates are those of the level with the least left."""
    q = quotas(
        "[tenants.a]\nlimits = { requests_per_min = 4, tokens_per_min = 1000 }\n"
        "[tenants.a.users.x]\nlimits = { requests_per_min = 60 }\n[tenants.free]"
    )
    granted(q.reserve("a/x", ASK, 0.0))
    assert q.rates("a/x", 0.0) == RateState(4, 3, 15.0, 1000, 900, 6.0)
    assert q.rates("free", 0.0) == RateState(0, 0, 0.0, 0, 0, 0.0)


def test_days_follow_wall_clock_steps() -> None:
    """Days begin at the right hour after the wall clock was set forward or back."""
    text = "[tenants.a]\nlimits = { tokens_per_day = 100 }\n"
    ahead = 20 * 3600.0
    q = quotas(text, 10 * DAY_S + 12 * 3600.0 + ahead)  # it is noon of day 10, and the clock says day 11
    first = granted(q.reserve("a", Ask(60, 40, 0), 0.0))
    q.settle(first, 100, 0.0)
    second_ask = Ask(10, 10, 0)
    q.replace(parse(text), 10 * DAY_S + 12 * 3600.0, 1.0)
    level, limit, wait_s = denied(q.reserve("a", second_ask, 2.0))
    assert (level, limit) == ("a", "tokens_per_day") and wait_s == pytest.approx(12 * 3600 - 2, abs=1)
    second = granted(q.reserve("a", second_ask, 12 * 3600.0 + 1))
    assert q.accounts["a"].day == 11 and q.accounts["a"].day_tokens == 20
    q.replace(parse(text), 10 * DAY_S + 11 * 3600.0, 12 * 3600.0 + 2)  # back to day 10 for the last hour of it
    q.settle(second, 5, 12 * 3600.0 + 3)
    assert q.accounts["a"].day == 10 and q.accounts["a"].day_tokens == 5


def test_daily_budget_is_reported_as_rate() -> None:
    """A daily budget is reported as the token limit where it has less left than the rate per minute."""
    q = quotas(
        "[tenants.a]\nlimits = { tokens_per_day = 1000, tokens_per_min = 500 }\n[tenants.a.users.x]\n"
        "[tenants.b]\nlimits = { tokens_per_day = 250 }",
        offset_s=86_400.0 - 100.0,
    )
    granted(q.reserve("b", ASK, 40.0))
    assert q.rates("b", 40.0) == RateState(0, 0, 0.0, 250, 150, 60.0)
    q.settle(granted(q.reserve("b", ASK, 40.0)), 900, 41.0)
    assert q.rates("b", 41.0) == RateState(0, 0, 0.0, 250, 0, 59.0), "over the budget is nothing left"
    assert q.rates("b", 100.0) == RateState(0, 0, 0.0, 250, 250, 86_400.0)
    assert q.rates("a/x", 0.0) == RateState(0, 0, 0.0, 500, 500, 0.0), "the rate of a minute has less left"
    for at in (0.0, 60.0):
        for _ in range(4):
            q.settle(granted(q.reserve("a/x", ASK, at)), 100, at)
    assert q.rates("a/x", 99.0) == RateState(0, 0, 0.0, 1000, 200, 1.0), "now the day has"


def test_restart_restores_rates() -> None:
    """Rates seeded after a restart equal those of a process that kept running."""
    text = "[tenants.a]\nlimits = { requests_per_min = 6, tokens_per_min = 600 }"
    lived, began = quotas(text), quotas(text)
    for at in (100.0, 102.0, 131.0):
        lived.settle(granted(lived.reserve("a", ASK, at)), 70, at)
        began.seed_rates("a", 70, at)
    assert began.rates("a", 140.0) == lived.rates("a", 140.0)


# --- a naive twin -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """One granted request, and all that matters of it."""

    tenant: str
    ask: Ask
    at: Fraction
    day: int
    rates_of: dict[str, tuple[bool, bool]]
    """Level → whether it took of the request rate, and of the token rate."""
    over: bool
    """Some rate was exceeded."""
    closed: tuple[Fraction, int, bool] | None = None
    """When, tokens used, undone."""


@dataclass
class Twin:
    """Keeps the whole history and computes everything from it, in fractions, each time it is asked."""

    tenants: Tenants
    records: list[Record] = field(default_factory=list)
    closings: list[Record] = field(default_factory=list)
    order: list[float] = field(default_factory=list)
    """Grants (whole) and closings (halves) in the order they happened, which decides at equal times."""

    def _of(self, level: str) -> list[Record]:
        policies = self.tenants.policies
        return [r for r in self.records if level in [each.name for each in policies[r.tenant].levels]]

    def content(self, level: str, index: int, per_min: int, now: Fraction) -> Fraction:
        """Of a bucket: every gain and loss in order, never over full."""
        moves: list[tuple[Fraction, int, Fraction]] = []
        for r in self._of(level):
            if not r.rates_of[level][index]:
                continue
            taken = self.order.index(float(self.records.index(r)))
            moves.append((r.at, taken, Fraction(-(r.ask.tokens if index else 1))))
            if r.closed is not None:
                at, used, undone = r.closed
                back = r.ask.tokens - used if index else int(undone)
                moves.append((at, self.order.index(self.closings.index(r) + 0.5), Fraction(back)))
        moves.sort()
        content, before = Fraction(per_min), Fraction(0)
        for at, _, amount in moves:
            content = min(Fraction(per_min), content + (at - before) * per_min / 60)
            content, before = min(Fraction(per_min), content + amount), at
        return min(Fraction(per_min), content + (now - before) * per_min / 60)

    def fits(self, level: Level, ask: Ask, now: Fraction, day: int) -> tuple[bool, bool, bool]:
        """(request rate, token rate, everything else)."""
        limits, mine = level.limits, self._of(level.name)
        held = [r for r in mine if r.closed is None]
        spent = sum(r.ask.tokens_max if r.closed is None else r.closed[1] for r in mine if r.day == day)
        rpm, tpm = limits.requests_per_min, limits.tokens_per_min
        fixed = (
            (limits.concurrency, len(held), 1),
            (limits.tokens_in_flight, sum(r.ask.tokens_max for r in held), ask.tokens),
            (limits.kv_blocks, sum(r.ask.kv_blocks for r in held), ask.kv_blocks),
            (limits.tokens_per_day, spent, ask.tokens),
        )
        return (
            rpm is None or self.content(level.name, 0, rpm, now) >= 1,
            tpm is None or self.content(level.name, 1, tpm, now) >= ask.tokens,
            all(most is None or have + more <= most for most, have, more in fixed),
        )

    def admits(self, tenant: str, ask: Ask, now: Fraction, day: int, idle: bool) -> bool:
        for level in self.tenants.policies[tenant].levels:
            *rates, rest = self.fits(level, ask, now, day)
            if not rest or not (all(rates) or (level.borrow and idle)):
                return False
        return True

    def grant(self, tenant: str, ask: Ask, now: Fraction, day: int) -> Record:
        rates_of, over = {}, False
        for level in self.tenants.policies[tenant].levels:
            requests, tokens, _ = self.fits(level, ask, now, day)
            rpm, tpm = level.limits.requests_per_min, level.limits.tokens_per_min
            rates_of[level.name] = (rpm is not None and requests, tpm is not None and tokens)
            over |= not requests or not tokens
        self.order.append(float(len(self.records)))
        record = Record(tenant, ask, now, day, rates_of, over)
        self.records.append(record)
        return record

    def close(self, record: Record, now: Fraction, used: int, undone: bool) -> None:
        self.order.append(len(self.closings) + 0.5)
        self.closings.append(record)
        record.closed = (now, used, undone)


_NAMES = ("a", "a/x", "a/y", "b", "b/x")
_RANGES = {
    "requests_per_min": (1, 12),
    "tokens_per_min": (10, 120),
    "concurrency": (2, 8),
    "tokens_in_flight": (30, 120),
    "kv_blocks": (5, 30),
    "tokens_per_day": (60, 400),
}


def _random_tenants(rng: random.Random) -> Tenants:
    """Each level with some limits, tight enough to matter and wide enough to let something in."""
    lines = []
    for name in _NAMES:
        organisation, _, user = name.partition("/")
        lines.append(f"[tenants.{organisation}.users.{user}]" if user else f"[tenants.{organisation}]")
        lines.append(f"borrow = {rng.choice(('true', 'false'))}")
        limits = [f"{key} = {rng.randint(*ends)}" for key, ends in _RANGES.items() if rng.random() < 0.35]
        lines.append(f"limits = {{ {', '.join(limits)} }}")
    return parse("\n".join(lines))


@pytest.mark.parametrize("seed", first(80, range(150)))
def test_random_histories_match_naive_twin(seed: int) -> None:
    """Quotas grant and deny random requests as a naive twin does."""
    rng = random.Random(seed)
    tenants, offset_s, now = _random_tenants(rng), 86_400.0 - 16.0, 0.0
    q, twin = Quotas(tenants, offset_s), Twin(tenants)
    open_ones: list[tuple[Grant, Record]] = []
    for _ in range(80):
        kind = rng.random()
        if kind < 0.6:
            name, idle = rng.choice(_NAMES), rng.random() < 0.3
            ask = Ask(rng.randrange(30), 1, rng.randrange(6), rng.choice((0, 1, 20, 200)))
            day = int((now + offset_s) // 86_400)
            q.rates(name, now)  # fills up what time has brought
            before, expected = state_of(q), twin.admits(name, ask, Fraction(now), day, idle)
            answer = q.reserve(name, ask, now, idle=idle, fingerprint=1)
            assert isinstance(answer, Grant) == expected, answer
            if isinstance(answer, Grant):
                record = twin.grant(name, ask, Fraction(now), day)
                assert answer.borrowed == record.over
                open_ones.append((answer, record))
            else:
                assert state_of(q) == before
                _check_retry(answer, twin, name, ask, now, offset_s)
        elif kind < 0.85 and open_ones:
            grant, record = open_ones.pop(rng.randrange(len(open_ones)))
            used, undone = rng.randrange(2 * grant.tokens + 1), rng.random() < 0.2
            if undone:
                q.undo(grant, now)
            else:
                q.settle(grant, used, now)
            twin.close(record, Fraction(now), 0 if undone else used, undone)
        else:
            now += rng.randrange(1, 24) / 4
    for grant, _ in open_ones:
        q.settle(grant, 0, now)
    assert all(account.idle for account in q.accounts.values())


def _check_retry(denial: Denial, twin: Twin, name: str, ask: Ask, now: float, offset_s: float) -> None:
    """A rate's wait is enough, and the twin would still refuse well before it is over."""
    wait_s = denial.retry_after_s
    if denial.limit not in ("requests_per_min", "tokens_per_min") or not wait_s:
        return
    level = next(each for each in twin.tenants.policies[name].levels if each.name == denial.level)
    if level.borrow and wait_s == BORROW_RETRY_S:
        return
    index = 0 if denial.limit == "requests_per_min" else 1
    day = int((now + offset_s) // 86_400)
    assert twin.fits(level, ask, Fraction(now) + Fraction(wait_s), day)[index]
    assert not twin.fits(level, ask, Fraction(now) + Fraction(wait_s) - Fraction(1, 10_000), day)[index]


# --- a thousand clients -----------------------------------------------------------------------------------------------


REST_MAX = 7 * 499
"""The most by which one request of the history may come to more than its estimate."""


@dataclass
class Row:
    """What the ledger keeps of a request."""

    tenant: str
    day: int
    ask: Ask
    used: int | None = None


@pytest.mark.parametrize("seed", first(1, range(2)))
def test_crashes_and_restarts_leave_nothing_held(seed: int) -> None:
    """No level is ever over a limit by more than one request. In the end nothing is held, and each day has what was used."""
    rng = random.Random(seed)
    limits = (
        "requests_per_min = 3_000, tokens_per_min = 400_000, concurrency = {c}, tokens_in_flight = {t}, kv_blocks = {b}"
    )
    lines = []
    for o in range(8):
        lines.append(f"[tenants.o{o}]\nborrow = {'true' if o % 2 else 'false'}")
        lines.append(f"limits = {{ {limits.format(c=60, t=30_000, b=900)}, tokens_per_day = 600_000 }}")
        for u in range(10):
            lines.append(f"[tenants.o{o}.users.u{u}]")
            lines.append(f"limits = {{ {limits.format(c=12, t=8_000, b=200)}, tokens_per_day = 150_000 }}")
    tenants = parse("\n".join(lines))
    names = [name for name in tenants.policies if "/" in name]
    clients = [rng.choice(names) for _ in range(1_000)]
    q, now, rows = Quotas(tenants), 0.0, list[Row]()
    running: dict[int, tuple[Grant, Row]] = {}
    denials = 0
    for _ in range(100_000):
        now += rng.expovariate(10.0) * (1 if rng.random() < 0.999 else 2_000)
        client = rng.randrange(1_000)
        if client in running:
            grant, row = running.pop(client)
            row.used = rng.choice(
                (0, rng.randrange(row.ask.tokens_max + 1), row.ask.tokens_max)
            )  # cancelled, cut short, finished
            q.settle(grant, row.used, now)
        else:
            estimate = rng.randrange(1, 500)
            ask = Ask(rng.randrange(1, 1_500), estimate, rng.randrange(1, 60), estimate * rng.choice((0, 1, 8)))
            answer = q.reserve(clients[client], ask, now, idle=rng.random() < 0.2)
            denials += isinstance(answer, Denial)
            if isinstance(answer, Grant):
                row = Row(clients[client], answer.day, ask)
                rows.append(row)
                running[client] = (answer, row)
        if rng.random() < 0.0002:
            q = _restarted(tenants, rows, running, now)
        for level in tenants.policies[clients[client]].levels:
            _check_level(q, level)
    for grant, row in running.values():
        row.used = row.ask.tokens
        q.settle(grant, row.ask.tokens, now)
    assert denials > 1_000
    today = q.day(now)
    for name, account in q.accounts.items():
        assert (account.concurrency, account.tokens_in_flight, account.kv_blocks) == (0, 0, 0)
        mine = [row.used or 0 for row in rows if row.day == today and (row.tenant + "/").startswith(name + "/")]
        assert account.day != today or account.day_tokens == sum(mine)


def _restarted(tenants: Tenants, rows: list[Row], running: dict[int, tuple[Grant, Row]], now: float) -> Quotas:
    """A coordinator killed and started again, with its ledger and nothing else."""
    q = Quotas(tenants)
    today = q.day(now)
    for row in rows:
        if row.day == today:
            q.seed(row.tenant, today, row.ask.tokens if row.used is None else row.used, now)
    for client, (_, row) in list(running.items()):
        running[client] = (q.restore(row.tenant, row.ask, row.day, now), row)
    return q


def _check_level(q: Quotas, level: Level) -> None:
    account, limits = q.accounts.get(level.name), level.limits
    if account is None:
        return
    assert 0 <= account.concurrency <= (limits.concurrency or 0)
    assert 0 <= account.tokens_in_flight <= (limits.tokens_in_flight or 0) + REST_MAX
    assert 0 <= account.kv_blocks <= (limits.kv_blocks or 0)
    assert 0 <= account.day_spare_tokens <= account.day_tokens <= (limits.tokens_per_day or 0) + REST_MAX
    assert account.requests is not None and account.requests.content >= 0


def test_remaining_tokens_never_exceed_limit() -> None:
    """As where the ledger has an open row that its own sums do not have; a gateway takes no larger number."""
    q = Quotas(parse("[tenants.a.limits]\ntokens_per_day = 100"))
    grant = q.restore("a", Ask((1 << 40) - 1, 0, 0), q.day(0.0), 0.0)
    q.settle(grant, 0, 0.0)
    assert q.rates("a", 0.0).remaining_tokens == 100
