"""The core with tenants: who is let in, what is held and charged, and what becomes of it after a restart."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coordinator.accounting.billing import DOUBT_S, LOST, Closed, Opened, Past
from coordinator.accounting.quota import Ask
from coordinator.core import Core
from coordinator.events import Configured, Limits, PeerDown, PeerUp, Tick
from proto.errors import CancelReason, Reject
from proto.limits import HASH_BYTES
from proto.messages import (
    Accepted,
    CacheEvents,
    Cancel,
    Finished,
    HandedOver,
    Interrupted,
    RateState,
    Rejected,
    Released,
    Role,
    Step,
    StepDone,
    Submit,
)
from proto.parts import Held
from runtime.tenancy.tenants import parse
from tests.coordinator.world import Harness, RandomWorld, gateway_hello, submit, worker_hello
from tests.helpers import first

FILE = """
[tenants.a]
priority_class = "standard"
limits = { tokens_per_day = 1_000 }
[tenants.a.users.x]
limits = { requests_per_min = 2, concurrency = 2, kv_blocks = 8, tokens_per_min = 600 }
[tenants.a.users.y]
weight = 3.0
"""


def by(tenant: str, name: str, tokens: int = 10, **other: Any) -> Submit:
    priority_class = other.pop("priority_class", "")
    return msgspec.structs.replace(submit(name, tokens, **other), tenant=tenant, priority_class=priority_class)


@dataclass
class World(Harness):
    """Remembers what went to the ledger."""

    rows: list[Opened | Closed] = field(default_factory=list)

    def post(self, event: Any) -> list[Any]:
        actions = super().post(event)
        self.rows += [action for action in actions if isinstance(action, Opened | Closed)]
        return actions

    def closed(self, name: str) -> Closed:
        (row,) = [row for row in self.rows if isinstance(row, Closed) and row.request_id == name]
        return row

    def held(self, name: str) -> tuple[int, int, int]:
        account = self.core.accounts.billing.quotas.accounts[name]
        return account.concurrency, account.tokens_in_flight, account.kv_blocks

    def day_tokens(self, name: str) -> int:
        return self.core.accounts.billing.quotas.accounts[name].day_tokens

    def run_prompt(self, name: str, attempt: int = 1) -> None:
        """All its chunks are computed, and its KV is handed over."""
        while steps := self.take(Step):
            for step in steps:
                assert isinstance(step, Step)
                self.receive(10, StepDone(step.step_id, step.chunks, 10.0, 0))
        self.receive(10, HandedOver(name, attempt, 100, 1.0))


def world(text: str = FILE, past: Past | None = None, workers: bool = True, **limits: Any) -> World:
    made = World(Core(Limits(step_tokens=8, **limits)))
    made.post(Configured(parse(text), 0.0, past))
    made.post(PeerUp(1, gateway_hello(1)))
    if workers:
        made.post(PeerUp(10, worker_hello(Role.PREFILL, 10)))
        made.post(PeerUp(20, worker_hello(Role.DECODE, 20)))
    made.sent.clear()
    return made


def rejected(w: World) -> Rejected:
    (message,) = w.take(Rejected)
    assert isinstance(message, Rejected)
    return message


def test_quota_refusal_names_limit_and_wait() -> None:
    """A request over a quota is refused with the limit and the waiting time, and takes nothing."""
    w = world()
    for name in ("r1", "r2"):
        w.receive(1, by("a/x", name))
    assert [m.rates for m in w.take(Accepted)] == [  # type: ignore[attr-defined]
        RateState(2, 1, 30.0, 600, 586, 1.4),
        RateState(2, 0, 60.0, 600, 572, 2.8),
    ]
    held, rows = w.held("a"), len(w.rows)
    w.receive(1, by("a/x", "r3"))
    refusal = rejected(w)
    assert refusal.reason is Reject.QUOTA and refusal.message == "requests_per_min of a/x: the limit is reached"
    assert 30.0 <= refusal.retry_after_s <= 33.1 and refusal.rates is not None
    assert (w.held("a"), len(w.rows)) == (held, rows)
    w.receive(1, by("a/y", "r4"))
    assert w.take(Accepted)
    w.now += refusal.retry_after_s
    w.receive(1, by("a/x", "r5"))
    assert rejected(w).message.startswith("concurrency of a/x")


def test_each_answer_counts_for_concurrency() -> None:
    """A request for n answers takes n of its tenant's concurrency, and gives them back at its end or when it is refused."""
    w = world("[tenants.a]\nlimits = { concurrency = 4 }")
    w.receive(1, by("a", "r1", choices=3))
    assert w.held("a")[0] == 3
    w.receive(1, by("a", "r2", choices=2))
    refusal = rejected(w)
    assert refusal.message.startswith("concurrency of a") and refusal.retry_after_s > 0
    w.receive(1, by("a", "r3"))
    w.receive(1, by("a", "r4", choices=5))
    assert rejected(w).retry_after_s == 0.0, "it never fits"
    for name in ("r1", "r3"):
        w.receive(1, Cancel(name, 1, CancelReason.DISCONNECTED))
        for worker in (10, 20):
            w.receive(worker, Released(name, 1))
    for step in w.take(Step):
        assert isinstance(step, Step)
        w.receive(10, StepDone(step.step_id, step.chunks, 10.0, 0))
    assert w.held("a")[0] == 0


def test_daily_refusal_points_to_midnight() -> None:
    """Requests over a daily limit are told to come back within seconds after midnight."""
    w = world("[tenants.a]\nlimits = { tokens_per_day = 20 }")
    w.now = 86_400.0 - 4200.0
    w.receive(1, by("a", "r0"))
    assert [m.rates for m in w.take(Accepted)] == [RateState(0, 0, 0.0, 20, 6, 4200.0)]  # type: ignore[attr-defined]
    waits = []
    for number in range(1, 20):
        w.receive(1, by("a", f"r{number}"))
        waits.append(rejected(w).retry_after_s)
    assert min(waits) >= 4200.0 and max(waits) <= 4206.1 and len(set(waits)) > 10, "not all at once, nor minutes late"
    w.now += min(waits)
    w.receive(1, by("a", "next"))
    assert w.take(Accepted)


def test_impossible_request_gets_no_retry_time() -> None:
    """A request that alone is over a limit is refused with no time to come back."""
    w = world()
    w.receive(1, by("a/x", "r", 40))
    refusal = rejected(w)
    assert (refusal.reason, refusal.retry_after_s) == (Reject.QUOTA, 0.0)
    assert refusal.message == "kv_blocks of a/x: this request alone is over the limit"


def test_foreign_class_and_tenant_are_refused() -> None:
    """A priority class that is not the tenant's, and a tenant missing in the file, are refused."""
    w = world()
    w.receive(1, by("a/x", "r1", priority_class="interactive"))
    assert rejected(w).reason is Reject.PRIORITY_CLASS
    w.receive(1, by("b", "r2"))
    refusal = rejected(w)
    assert refusal.reason is Reject.UNKNOWN_TENANT and refusal.retry_after_s > 0
    w.receive(1, by("a/x", "r3", priority_class="batch"))
    assert w.core.cluster.requests["r3"].path == ("batch", "a", "x")
    w.receive(1, by("a/x", "r4"))
    assert w.core.cluster.requests["r4"].path == ("standard", "a", "x")


def test_finished_request_pays_actual_tokens() -> None:
    """A finished request is charged for the tokens that were computed and emitted."""
    w = world()
    w.now = 1.0
    w.receive(1, by("a/y", "r", 10, max_tokens=400))
    (row,) = w.rows
    assert row == Opened("r", 0, "a/y", "m", "standard", False, Ask(10, 128, row.ask.kv_blocks, 400))
    assert w.day_tokens("a") == 410
    w.now = 2.0
    w.run_prompt("r")
    w.now = 5.0
    w.receive(20, Finished("r", 1, 30, 0))
    assert w.closed("r") == Closed("r", "finished", 40, 10, 0, 30, 0.0, 1000.0, 0.0, 3000.0)
    assert w.held("a") == w.held("a/y") == (0, 0, 0) and w.day_tokens("a") == 40


def test_cancel_is_charged_by_progress() -> None:
    """A cancel costs nothing in the queue, computed chunks in prefill, and emitted tokens in decode."""
    w = world(steps_in_flight=1)
    w.receive(1, by("a/y", "prefill", 30))
    w.receive(1, by("a/y", "queued", 30, max_tokens=9))
    (first,) = w.take(Step)
    assert isinstance(first, Step)
    w.receive(1, Cancel("queued", 1, CancelReason.DISCONNECTED))
    assert w.closed("queued").charged_tokens == 0
    w.receive(1, Cancel("prefill", 1, CancelReason.DISCONNECTED))
    w.receive(10, Released("prefill", 1))
    w.receive(20, Released("prefill", 1))
    assert w.held("a/y")[0] == 1, "its chunk is still being computed"
    w.receive(10, StepDone(first.step_id, first.chunks, 5.0, 0))
    assert w.closed("prefill").charged_tokens == sum(
        chunk.length for chunk in first.chunks if chunk.request_id == "prefill"
    )
    w.receive(1, by("a/y", "decode", 10, max_tokens=90))
    w.run_prompt("decode")
    w.receive(1, Cancel("decode", 1, CancelReason.STOP_STRING))
    assert w.held("a/y")[0] == 1
    w.receive(20, Released("decode", 1, 7))
    assert w.closed("decode").charged_tokens == 18, "the first token came from prefill"
    assert w.held("a") == w.held("a/y") == (0, 0, 0)


def test_resume_pays_prompt_once() -> None:
    """A resumed request keeps its grant and pays its prompt once."""
    w = world(FILE.replace("kv_blocks = 8", "kv_blocks = 9"))
    w.post(PeerUp(21, worker_hello(Role.DECODE, 21)))
    w.receive(1, by("a/x", "r", 10, max_tokens=21))
    w.run_prompt("r")
    decode = w.core.cluster.requests["r"].decode_incarnation
    w.post(PeerDown(decode, "killed"))
    assert w.take(Interrupted)
    w.receive(1, by("a/x", "r", 16, attempt=2, max_tokens=21, resumed=6))
    assert w.held("a/x")[0] == 1
    w.run_prompt("r", 2)
    w.receive(41 - decode, Finished("r", 2, 15, 0))
    closed = w.closed("r")
    assert (closed.prompt_tokens, closed.output_tokens, closed.charged_tokens) == (10, 21, 31)
    assert w.core.accounts.billing.quotas.rates("a/x", 0.0).remaining_requests == 1


@pytest.mark.parametrize("step_word_first", [True, False])
def test_cached_tokens_are_not_charged(step_word_first: bool) -> None:
    """Cached tokens are not charged but recorded, whichever message comes first."""
    w = world(FILE)
    names = b"".join(bytes([number]) * HASH_BYTES for number in range(5))
    w.receive(10, CacheEvents(names[: 3 * HASH_BYTES], b""))
    w.receive(1, msgspec.structs.replace(by("a/y", "r", 22, max_tokens=5), block_hashes=names, hash_block_size=4))
    first, last = (StepDone(step.step_id, step.chunks, 5.0, 0) for step in w.take(Step) if isinstance(step, Step))
    w.receive(10, first)
    ends = [last, Finished("r", 1, 2, 0)]
    for message in ends if step_word_first else reversed(ends):
        w.receive(10 if message is last else 20, message)
    w.receive(10, HandedOver("r", 1, 100, 1.0))
    closed = w.closed("r")
    assert (closed.prompt_tokens, closed.cached_tokens, closed.output_tokens, closed.charged_tokens) == (10, 12, 2, 12)


def test_queue_expiry_returns_the_quota() -> None:
    """A request that expires in the queue costs nothing and gives its quota back."""
    w = world(workers=False, queue_wait_s_max=5.0)
    w.post(PeerUp(10, worker_hello(Role.PREFILL, 10)))
    w.post(PeerUp(20, worker_hello(Role.DECODE, 20, max_seqs=1)))
    for name in ("r1", "r2"):
        w.receive(1, by("a/x", name))
    w.now = 6.0
    w.post(Tick())
    assert w.closed("r2") == Closed("r2", "expired", 0, 0, 0, 0, 6000.0, 0.0, 0.0, 0.0)
    assert w.core.accounts.billing.quotas.rates("a/x", 6.0).remaining_requests == 1


def test_full_queue_returns_the_quota() -> None:
    w = world("[tenants.a]\nlimits = { requests_per_min = 60 }", tenant_queue_max=1)
    for number in range(9):
        w.receive(1, by("a", f"r{number}", 2000, max_tokens=90))
    assert {m.reason for m in w.take(Rejected)} == {Reject.QUEUE_FULL}  # type: ignore[attr-defined]
    assert w.core.accounts.billing.quotas.rates("a", 0.0).remaining_requests == 60 - len(w.core.cluster.requests)


def test_borrowing_ends_when_others_wait() -> None:
    w = world("[tenants.a]\nborrow = true\nlimits = { requests_per_min = 1 }\n[tenants.b]", steps_in_flight=1)
    w.receive(1, by("a", "r1", 4))
    w.receive(1, by("a", "r2", 4))
    assert w.core.cluster.requests["r2"].borrowed
    assert [row.borrowed for row in w.rows] == [False, True]
    w.receive(1, by("b", "r3", 4))
    w.receive(1, by("a", "r4", 4))
    assert rejected(w).reason is Reject.QUOTA


def test_new_tenants_file_applies_at_once() -> None:
    """A new tenants file applies to new requests at once, and old classes stay until unused."""
    w = world()
    w.receive(1, by("a/x", "r1", 2000, max_tokens=90))
    assert rejected(w)
    w.post(Configured(parse("[priority_classes.gold]\nweight = 2\n[tenants.a.users.x]\n"), 0.0))
    w.receive(1, by("a/x", "r2", 2000, max_tokens=90))
    assert w.take(Accepted) and w.core.cluster.requests["r2"].path == ("gold", "a", "x")
    w.post(Configured(parse(FILE), 0.0))
    w.receive(1, Cancel("r2", 1, CancelReason.DISCONNECTED))
    assert "gold" in w.core.limits.priority_classes  # for those that came in it
    w.post(Configured(parse(FILE), 0.0))
    assert "gold" not in w.core.limits.priority_classes


# --- restart ----------------------------------------------------------------------------------------------------------

PAST = Past((Opened("r", 0, "a/x", "m", "standard", False, Ask(100, 50, 5, 50)),), (("a/x", 0, 450), ("a/y", 0, 100)))


def test_restart_restores_open_requests() -> None:
    """A restart holds and counts the requests that were open before."""
    w = world(past=PAST)
    assert w.held("a/x") == w.held("a") == (1, 150, 5)
    assert (w.day_tokens("a/x"), w.day_tokens("a")) == (450, 550)
    assert w.rows == []


def test_worker_reports_end_of_orphan() -> None:
    """A worker that still streams an orphan reports its end, and it is not written off before."""
    w = world(past=PAST, workers=False)
    hello = worker_hello(Role.DECODE, 20)
    w.post(PeerUp(20, msgspec.structs.replace(hello, held=(Held("r", 1, 5, 1),))))
    w.now = 500.0
    w.post(Tick())
    assert w.rows == [], "a worker still holds it: it is not written off"
    w.receive(20, Finished("r", 1, 30, 0))
    closed = w.closed("r")
    assert (closed.outcome, closed.charged_tokens) == ("finished", 130)
    assert w.held("a") == (0, 0, 0) and w.day_tokens("a") == 530


def test_end_before_restart_is_charged_once() -> None:
    """A worker's late report of an answer that finished before the restart is charged once."""
    w = world(past=PAST)
    w.receive(20, Finished("r", 2, 30, 0, resumed_tokens=7))
    closed = w.closed("r")
    assert (closed.outcome, closed.output_tokens, closed.charged_tokens) == ("finished", 37, 137)
    w.receive(20, Finished("r", 2, 30, 0, resumed_tokens=7))
    assert len(w.rows) == 1 and w.held("a") == (0, 0, 0) and w.day_tokens("a") == 537


def test_gateway_cancel_ends_orphan() -> None:
    """A gateway's cancel ends an orphan as cancelled, with the tokens that its worker emitted."""
    w = world(past=PAST, workers=False)
    w.post(PeerUp(20, msgspec.structs.replace(worker_hello(Role.DECODE, 20), held=(Held("r", 1, 5, 1),))))
    w.receive(1, Cancel("r", 1, CancelReason.DISCONNECTED))
    w.receive(20, Released("r", 1, 12))
    w.now += DOUBT_S
    w.post(Tick())
    assert (w.closed("r").outcome, w.closed("r").charged_tokens) == ("cancelled", 113)


@pytest.mark.parametrize("resumed", [0, 8])
def test_resubmitted_orphan_keeps_its_row(resumed: int) -> None:
    """A gateway that comes back with an orphan continues its row and its grant."""
    w = world(past=PAST)
    w.receive(1, by("a/x", "r", 100 + resumed, attempt=2, max_tokens=50, resumed=resumed))
    assert w.take(Accepted) and w.held("a/x") == (1, 150, 5)
    assert w.rows == list(PAST.open), "the same row once more, which changes nothing"
    w.run_prompt("r", 2)
    w.receive(20, Finished("r", 2, 20, 0))
    assert w.closed("r").charged_tokens == 120 + resumed
    w.now = 1000.0
    w.post(Tick())
    assert len(w.rows) == 2 and w.held("a") == (0, 0, 0)


def test_orphan_refused_by_full_queue_stays() -> None:
    """An orphan whose resubmit finds the queue full stays an orphan."""
    w = world(past=PAST, queue_requests_max=1)
    for number in range(12):
        w.receive(1, by("a/y", f"r{number}", 40, max_tokens=2))
    w.sent.clear()
    w.receive(1, by("a/x", "r", 900, attempt=2, max_tokens=50, resumed=800))
    assert rejected(w).reason is Reject.QUEUE_FULL
    assert list(w.core.accounts.billing.orphans) == ["r"] and w.held("a/x") == (1, 150, 5)
    w.now = 1000.0
    w.post(Tick())
    assert (w.closed("r").outcome, w.held("a/x")) == (LOST, (0, 0, 0))


def test_unknown_orphan_is_written_off() -> None:
    """An orphan that no process reports is written off at its estimate."""
    w = world(past=PAST)
    at = w.core.next_deadline()
    assert at is not None
    w.now = at
    w.post(Tick())
    closed = w.closed("r")
    assert (closed.outcome, closed.charged_tokens) == (LOST, 150)
    assert w.held("a") == (0, 0, 0) and w.day_tokens("a") == 550
    w.receive(1, by("a/x", "r", 100, attempt=2))
    assert len([row for row in w.rows if isinstance(row, Opened)]) == 1


def test_resumed_answer_without_bill_is_accepted() -> None:
    """A resumed answer without a bill is accepted over its quota, and its prompt is not charged again."""
    w = world("[tenants.a]\nlimits = { requests_per_min = 1, concurrency = 1 }")
    w.receive(1, by("a", "r1", 4))
    w.receive(1, by("a", "r2.c0", 20, attempt=2, max_tokens=30, resumed=10))
    assert len(w.take(Accepted)) == 2
    w.run_prompt("r1")
    w.receive(10, HandedOver("r2.c0", 2, 1, 1.0))
    w.receive(20, Finished("r2.c0", 2, 15, 0))
    assert w.closed("r2.c0").charged_tokens == 15


# --- chaos ------------------------------------------------------------------------------------------------------------


class ChaoticTenants(RandomWorld):
    def __init__(self, seed: int) -> None:
        self.rows: list[Opened | Closed] = []
        super().__init__(seed, chaos=0.08)
        self.post(Configured(parse(self.limits()), 0.0))

    def limits(self) -> str:
        r = self.random.randint
        lines = []
        for name in ("o", "o.users.u", "o.users.v", "p"):
            lines.append(f"[tenants.{name}]\nborrow = {'true' if r(0, 1) else 'false'}")
            lines.append(f"limits = {{ requests_per_min = {r(20, 200)}, tokens_per_min = {r(500, 5000)},")
            lines[-1] += f" concurrency = {r(2, 9)}, kv_blocks = {r(20, 200)}, tokens_per_day = {r(2000, 90_000)} }}"
        return "\n".join(lines)

    def post(self, event: Any) -> list[Any]:
        actions = super().post(event)
        self.rows += [action for action in actions if isinstance(action, Opened | Closed)]
        for name, account in self.core.accounts.billing.quotas.accounts.items():
            assert min(account.concurrency, account.tokens_in_flight, account.kv_blocks, account.day_tokens) >= 0, name
        return actions

    def receive(self, incarnation: int, message: Any) -> list[Any]:
        if isinstance(message, Submit):
            message = msgspec.structs.replace(
                message, tenant=("o/u", "o/v", "o", "p")[sum(message.request_id.encode()) % 4]
            )
        return super().receive(incarnation, message)


@pytest.mark.parametrize("seed", first(10, range(25)))
def test_every_request_is_closed_once(seed: int) -> None:
    """Every request is closed exactly once and nothing stays held, whatever fails."""
    w = ChaoticTenants(seed)
    for step in range(600):
        w.step()
        if step == 300:
            w.post(Configured(parse(w.limits()), 0.0))
    w.chaos = 0.0
    w.heal()
    kinds = Counter((type(row), row.request_id) for row in w.rows)
    assert set(kinds.values()) == {1}, seed
    opened = [row for row in w.rows if isinstance(row, Opened)]
    closed = {row.request_id: row for row in w.rows if isinstance(row, Closed)}
    assert {row.request_id for row in opened} == set(closed), seed
    billing = w.core.accounts.billing
    assert not billing.bills and not billing.orphans
    for name, account in billing.quotas.accounts.items():
        assert (account.concurrency, account.tokens_in_flight, account.kv_blocks) == (0, 0, 0), (seed, name)
        mine = [closed[row.request_id].charged_tokens for row in opened if (row.tenant + "/").startswith(name + "/")]
        assert account.day_tokens == sum(mine), (seed, name)
