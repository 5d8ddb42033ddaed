"""What a request is charged in the ledger, whatever the order in which its end is told, and after restarts between."""

import sqlite3
from contextlib import closing as shut
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.accounting.billing import DOUBT_S, Opened
from coordinator.accounting.quota import Ask
from coordinator.events import Configured, PeerDown, PeerUp, Tick
from proto.errors import CancelReason, Interrupt
from proto.messages import Cancel, Finished, Release, Released, Role, Step, StepDone, WorkFailed
from proto.parts import Held
from proto.progress import DecodeProgress, Hung, Joined
from runtime.tenancy.tenants import parse
from tests.coordinator.test_ledger import past_of, write
from tests.coordinator.test_tenancy import World, by, world
from tests.coordinator.world import gateway_hello, worker_hello

PROMPT = 100


def row(path: Path, name: str = "r") -> tuple[Any, ...]:
    with shut(sqlite3.connect(path)) as db:
        what = "outcome, charged_tokens, prompt_tokens, output_tokens"
        return tuple(db.execute(f"SELECT {what} FROM usage WHERE request_id = ?", (name,)).fetchone())


def restart(path: Path, before: World | None = None, *held: Held) -> World:
    """The next coordinator, with the ledger that the one before has left, and a decode worker that holds what it holds."""
    if before is not None:
        write(path, *before.rows)
    w = world(past=past_of(path), workers=False)
    w.post(PeerUp(10, worker_hello(Role.PREFILL, 10)))
    w.post(PeerUp(20, msgspec.structs.replace(worker_hello(Role.DECODE, 20), held=held)))
    w.sent.clear()
    return w


def go_on(w: World, attempt: int, resumed: int, name: str = "r") -> None:
    prompt = PROMPT + resumed if ".c" not in name else 20
    w.receive(1, by("a/x", name, prompt, attempt=attempt, max_tokens=50, resumed=resumed))
    assert w.core.cluster.requests[name].attempt == attempt


@pytest.mark.parametrize("order", ["submit first", "released first", "restart after release", "restart after submit"])
def test_resumed_stream_tokens_charged_once(tmp_path: Path, order: str) -> None:
    """It has emitted 12 tokens, 8 of which its gateway has got; the next attempt emits 20 more from there."""
    path = tmp_path / "usage.sqlite"
    write(path, Opened("r", 0, "a/x", "m", "standard", False, Ask(PROMPT, 50, 5)))
    w = restart(path, None, Held("r", 1, 5, 1))
    w.receive(1, Cancel("r", 1, CancelReason.ABANDONED))
    if order == "submit first":
        go_on(w, 2, 8)
    if order != "restart after submit":
        w.receive(20, Released("r", 1, 11))
    if order == "restart after release":
        w = restart(path, w)
    if order != "submit first":
        go_on(w, 2, 8)
    if order == "restart after submit":
        w = restart(path, w, Held("r", 2, 5, 1, 8))
    else:
        w.run_prompt("r", 2)
    w.receive(20, Finished("r", 2, 20, 0))
    write(path, *w.rows)
    assert row(path) == ("finished", PROMPT + 28, PROMPT, 28)
    assert past_of(path).open == ()


def test_resume_reopens_ledger_row(tmp_path: Path) -> None:
    """A stream given up and resumed has its ledger row opened again with the tokens it had."""
    path = tmp_path / "usage.sqlite"
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=50))
    w.run_prompt("r")
    w.receive(1, Cancel("r", 1, CancelReason.ABANDONED))
    w.receive(20, Released("r", 1, 11))
    w.receive(1, by("a/y", "r", 18, attempt=2, max_tokens=50, resumed=8))
    write(path, *w.rows)
    assert row(path) == (None, 10 + 12 + 42, 10, 54), "open again, at the estimate of its rest"
    w.run_prompt("r", 2)
    w.receive(20, Finished("r", 2, 20, 0))
    write(path, *w.rows)
    assert row(path) == ("finished", 38, 10, 28) and w.day_tokens("a") == 38 and w.held("a") == (0, 0, 0)


def test_abandoned_prompt_is_charged_on_return(tmp_path: Path) -> None:
    """A request abandoned before its prompt was computed pays for the prompt when it comes back."""
    path = tmp_path / "usage.sqlite"
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=50))
    steps = w.take(Step)
    w.receive(1, Cancel("r", 1, CancelReason.ABANDONED))
    for incarnation in (10, 20):
        w.receive(incarnation, Released("r", 1))
    for step in steps:
        assert isinstance(step, Step)
        w.receive(10, StepDone(step.step_id, step.chunks[:1] if step is steps[0] else (), 1.0, 0))
    w.receive(1, by("a/y", "r", 10, attempt=2, max_tokens=50))
    w.run_prompt("r", 2)
    w.receive(20, Finished("r", 2, 20, 0))
    write(path, *w.rows)
    assert row(path) == ("finished", 30, 10, 20) and w.day_tokens("a") == 30


def test_resumed_choice_pays_for_its_rest(tmp_path: Path) -> None:
    """A choice resumed by itself pays for its rest, also after coordinator restarts."""
    path = tmp_path / "usage.sqlite"
    w = world()
    go_on(w, 2, 10, "r.c0")
    w.run_prompt("r.c0", 2)
    w = restart(path, w, Held("r.c0", 2, 5, 1, 10))
    w.receive(20, Released("r.c0", 2, 5))
    w.now += DOUBT_S
    w.post(Tick())
    write(path, *w.rows)
    assert row(path, "r.c0") == ("cancelled", 6, 0, 6)
    w = restart(path)
    go_on(w, 3, 14, "r.c0")
    w.run_prompt("r.c0", 3)
    w.receive(20, Finished("r.c0", 3, 10, 0))
    write(path, *w.rows)
    assert row(path, "r.c0") == ("finished", 14, 0, 14)


def test_first_token_charged_after_early_leave() -> None:
    """The first token of each choice is charged though the client leaves right after hand-over."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90, choices=2))
    w.run_prompt("r")
    w.receive(1, Cancel("r", 1, CancelReason.DISCONNECTED))
    w.receive(20, Released("r", 1, 0))
    assert (w.closed("r").output_tokens, w.closed("r").charged_tokens) == (2, 12)


def test_first_token_charged_if_transfer_fails() -> None:
    """As where the decode worker hears of the cancel first, and aborts the transfer."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90, choices=2))
    for step in w.take(Step):
        assert isinstance(step, Step)
        w.receive(10, StepDone(step.step_id, step.chunks, 1.0, 10))
    w.receive(1, Cancel("r", 1, CancelReason.STOP_STRING))
    w.receive(20, Released("r", 1, 0))
    w.receive(10, WorkFailed("r", 1, Interrupt.TRANSFER_FAILED, "released", 2))
    assert (w.closed("r").output_tokens, w.closed("r").charged_tokens) == (2, 12)


@pytest.mark.parametrize("end", ["lost", "failed"])
@pytest.mark.parametrize("resumes", [True, False])
def test_tokens_before_loss_are_charged(end: str, resumes: bool) -> None:
    """Tokens emitted before a loss are charged as far as steps or the worker tell."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90))
    w.run_prompt("r")
    w.receive(20, DecodeProgress(30, 100, 0, (Joined("r", 1, 5),)))
    if end == "lost":
        w.post(PeerDown(20, "killed"))
        w.post(PeerUp(20, worker_hello(Role.DECODE, 20)))
    else:
        w.receive(20, WorkFailed("r", 1, Interrupt.ENGINE_ERROR, "planted", 24))
    if not resumes:
        w.receive(1, Cancel("r", 1, CancelReason.DISCONNECTED))
        w.now += DOUBT_S
        w.post(Tick())
        assert w.closed("r").charged_tokens == 10 + 1 + 24, "of 25 steps begun the last may not be over"
        return
    w.sent.clear()
    w.receive(1, by("a/y", "r", 10 + 28, attempt=2, max_tokens=90, resumed=28))
    w.run_prompt("r", 2)
    w.receive(20, Finished("r", 2, 62, 0))
    assert w.closed("r").charged_tokens == 10 + 90


def test_removed_tenants_are_forgotten() -> None:
    """Tenants removed from the configuration are forgotten at the next file or day at which they hold nothing."""
    text = "[tenants.a]\nlimits = { tokens_per_day = 1_000 }\n[tenants.a.users.x]\n[tenants.b.users.y]\n[tenants.c]\n"
    w = world(text)
    for tenant in ("a/x", "b/y", "c"):
        w.receive(1, by(tenant, tenant.replace("/", "."), 10, max_tokens=9))
    for request_id in ("a.x", "b.y"):
        w.run_prompt(request_id)
    w.receive(20, Finished("b.y", 1, 9, 0))
    w.post(Configured(parse("[tenants.c]\n"), 0.0))
    assert known(w) == {"a", "a/x", "c"}
    w.receive(20, Finished("a.x", 1, 9, 0))
    w.post(Configured(parse("[tenants.c]\n"), 0.0))
    assert known(w) == {"a", "c"}, "what it used of its day counts if it comes back"
    w.post(Configured(parse("[tenants.c]\n[tenants.a]\nlimits = { tokens_per_day = 20 }\n"), 0.0))
    w.receive(1, by("a", "more", 10))
    assert not w.core.cluster.requests.keys() & {"more"}
    w.post(Configured(parse("[tenants.c]\n"), 0.0))
    w.now = 86_400.0
    w.run_prompt("c")
    w.receive(20, Finished("c", 1, 9, 0))
    assert known(w) == {"c"}


def known(w: World) -> set[str]:
    """Tenants of which anything is in memory."""
    found = set(w.core.accounts.billing.quotas.accounts)
    for queue in w.core.cluster.queues.values():
        lengths = filter(None, queue.lengths._lengths)  # not those of all
        paths = [*queue.fair._leaves, *lengths, *queue.line.tenants, *queue.served]
        found |= {"/".join(filter(None, path[1:])) for path in paths}
        rings = [
            ring
            for priority_class in queue.fair._root.children.values()
            for ring in (priority_class, *priority_class.children.values())
        ]
        found |= {"/".join(filter(None, node.path[1:])) for ring in rings for node in ring.children.values()}
    return found


@pytest.mark.parametrize("first", ["gateway", "worker"])
@pytest.mark.parametrize("back", [True, False])
def test_finish_during_outage_is_charged(first: str, back: bool) -> None:
    """It loses all links when it goes on. The worker comes back, and says again what it had said to nobody."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90))
    w.run_prompt("r", 1)
    hello = w.core.members.peers[20]
    for incarnation in (1, 20) if first == "gateway" else (20, 1):
        w.post(PeerDown(incarnation, "no heartbeat"))
    assert w.held("a/y")[0] == 1, "its row is open"
    if back:
        w.post(PeerUp(20, hello))
        w.receive(20, Finished("r", 1, 20, 0))
        assert (w.closed("r").outcome, w.closed("r").output_tokens) == ("finished", 20)
    else:
        at = w.core.next_deadline()
        assert at == w.now + DOUBT_S
        w.now = at
        w.post(Tick())
        assert w.closed("r").outcome == "cancelled"
    assert w.held("a") == (0, 0, 0) and not w.core.accounts.billing.bills


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("held", ["nowhere", "by a worker that is back", "by a worker that comes back"])
def test_gateway_reports_lost_answer_length(tmp_path: Path, answered: bool, held: str) -> None:
    """Its row is closed soon, with what was got: nobody else will ever tell."""
    path = tmp_path / "usage.sqlite"
    write(path, Opened("r", 0, "a/x", "m", "standard", False, Ask(PROMPT, 50, 5)))
    w = restart(path, None, *([Held("r", 1, 5, 1)] if held == "by a worker that is back" else []))
    w.receive(1, Cancel("r", 1, CancelReason.ANSWERED if answered else CancelReason.DISCONNECTED, 12))
    if held != "nowhere":
        if held == "by a worker that comes back":
            there = msgspec.structs.replace(worker_hello(Role.DECODE, 21), held=(Held("r", 1, 5, 1),))
            w.post(PeerUp(21, there))
        w.now += DOUBT_S
        w.post(Tick())
        if not answered:
            assert not w.rows, "it may have emitted more"
        w.receive(20 if held == "by a worker that is back" else 21, Released("r", 1, 15))
    w.now += DOUBT_S
    w.post(Tick())
    late = held == "by a worker that comes back" and answered
    got = 12 if held == "nowhere" or late else 16
    row_now = w.closed("r")
    assert (row_now.outcome, row_now.output_tokens) == ("finished" if answered else "cancelled", got)
    assert row_now.prompt_tokens == PROMPT and w.held("a") == (0, 0, 0) and not w.core.accounts.billing.bills


def test_choices_on_lost_worker_are_charged() -> None:
    """Each choice on a lost worker is charged as far as its gateway got it."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90, choices=2))
    w.run_prompt("r")
    w.receive(20, DecodeProgress(30, 100, 0, (Joined("r", 1, 5),)))
    w.post(PeerDown(20, "killed"))
    w.post(PeerUp(20, worker_hello(Role.DECODE, 20)))
    w.receive(1, Cancel("r", 1, CancelReason.ABANDONED, 24 + 22))
    for choice, resumed in enumerate((24, 22)):
        rest = by("a/y", f"r.c{choice}", 10 + resumed, attempt=2, max_tokens=90, resumed=resumed)
        w.receive(1, msgspec.structs.replace(rest, first_choice=choice))
        w.run_prompt(f"r.c{choice}", 2)
        w.receive(20, Finished(f"r.c{choice}", 2, 90 - resumed, 0))
    w.now += DOUBT_S
    w.post(Tick())
    assert sum(w.closed(name).output_tokens for name in ("r", "r.c0", "r.c1")) == 2 * 90
    assert sum(w.closed(name).prompt_tokens for name in ("r", "r.c0", "r.c1")) == 10
    assert w.day_tokens("a") == 10 + 2 * 90


@pytest.mark.parametrize("hung_first", [True, False])
def test_returning_gateway_reports_progress(hung_first: bool) -> None:
    """A gateway that comes back tells how far an answer on a hung worker got, and that is charged."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=90))
    w.run_prompt("r")
    ends = [lambda: w.receive(20, Hung(1000.0)), lambda: w.post(PeerDown(1, "send failed"))]
    for end in ends if hung_first else reversed(ends):
        end()
    assert w.held("a/y")[0] == 1, "its row is open"
    w.post(PeerUp(1, gateway_hello(1)))
    w.receive(1, Cancel("r", 1, CancelReason.ABANDONED, 30))
    assert w.held("a/y")[0] == 1, "its row is open"
    w.now += DOUBT_S
    w.post(Tick())
    assert (w.closed("r").outcome, w.closed("r").output_tokens) == ("cancelled", 30)
    assert not w.core.accounts.billing.bills and w.held("a") == (0, 0, 0)


def test_whole_answer_is_charged_as_finished() -> None:
    """A whole answer is charged as finished though its worker is lost before its last message."""
    w = world()
    w.receive(1, by("a/y", "r", 10, max_tokens=20))
    w.run_prompt("r")
    w.post(PeerDown(20, "killed"))
    w.receive(1, Cancel("r", 1, CancelReason.ANSWERED, 20))
    assert (w.closed("r").outcome, w.closed("r").charged_tokens) == ("finished", 30)
    assert not w.core.cluster.requests and w.held("a") == (0, 0, 0)


@pytest.mark.parametrize("last", ["lets go", "is lost"])
def test_finished_answer_stays_finished(tmp_path: Path, last: str) -> None:
    """A whole answer held in two attempts stays finished when its workers let go or are lost."""
    path = tmp_path / "usage.sqlite"
    write(path, Opened("r", 0, "a/x", "m", "standard", False, Ask(PROMPT, 50, 5)))
    w = restart(path, None, Held("r", 1, 5, 1))
    w.post(PeerUp(21, msgspec.structs.replace(worker_hello(Role.DECODE, 21), held=(Held("r", 2, 5, 1, 3),))))
    w.receive(1, Cancel("r", 2, CancelReason.ANSWERED, 12))
    told = {(send.incarnation, send.message) for send in w.sent if isinstance(send.message, Release)}
    assert told == {(20, Release("r", 1)), (21, Release("r", 2))}
    w.receive(20, Released("r", 1, 4))
    w.post(PeerDown(21, "killed")) if last == "is lost" else w.receive(21, Released("r", 2, 8))
    assert (w.closed("r").outcome, w.closed("r").output_tokens) == ("finished", 12)
    assert not w.core.accounts.billing.bills and w.held("a") == (0, 0, 0)
