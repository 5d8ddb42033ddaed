"""The usage ledger: what is on disk when, and that kill -9 neither forgives nor doubles anything."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from coordinator.accounting.ledger import Ledger, LedgerError, day_text
from coordinator.accounting.quota import Ask
from coordinator.accounting.usage import Closed, Opened, Past
from coordinator.events import Send
from coordinator.outbox import Outbox
from proto.messages import Accepted, Release, StatusRequest
from tests.coordinator.ledger_words import closed, opened

ROOT = Path(__file__).parents[2]


def with_ledger(
    path: Path, work: Callable[[Ledger, Past, list[str]], Awaitable[None]], today: int = 0, keep_days: int = 0
) -> None:
    async def body() -> None:
        committed: list[str] = []
        failures: list[LedgerError] = []
        ledger = Ledger(path, on_committed=committed.extend, on_failed=failures.append, keep_days=keep_days)
        past = await ledger.start(today)
        try:
            await work(ledger, past, committed)
        finally:
            await ledger.close()
        assert not failures

    asyncio.run(body())


def write(path: Path, *entries: object) -> None:
    async def work(ledger: Ledger, _past: Past, _committed: list[str]) -> None:
        for entry in entries:
            ledger.write(entry)

    with_ledger(path, work)


def past_of(path: Path, today: int = 0) -> Past:
    found: list[Past] = []

    async def work(_ledger: Ledger, past: Past, _committed: list[str]) -> None:
        found.append(past)

    with_ledger(path, work, today)
    return found[0]


def rows(path: Path) -> dict[str, tuple[str | None, int]]:
    """Request → (outcome, charged tokens)."""
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT request_id, outcome, charged_tokens FROM usage").fetchall()
    assert len(found) == len({row[0] for row in found})
    return {request_id: (outcome, charged) for request_id, outcome, charged in found}


def test_what_is_open_and_what_the_day_cost_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "usage.sqlite"
    write(path, opened("r1"), opened("r2"), closed("r1"), opened("old", day=-1), opened("b", tenant="b"))
    past = past_of(path)
    assert {row.request_id: row for row in past.open} == {
        "r2": opened("r2"),
        "old": opened("old", day=-1),
        "b": opened("b", tenant="b"),
    }
    a = closed("r1").charged_tokens + opened("r2").ask.tokens
    assert sorted(past.charged) == [("a/x", 0, a), ("b", 0, opened("b").ask.tokens)]
    assert past_of(path, today=1).charged == ()
    assert [(tenant, tokens) for tenant, _, tokens in past.recent] == [
        ("a/x", closed("r1").charged_tokens),
        *((row.tenant, row.ask.tokens) for row in (opened("r2"), opened("old"), opened("b", tenant="b"))),
    ]
    assert all(0 <= ago_s < 60 for _, ago_s, _ in past.recent)


def test_repeating_an_entry_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"), opened("r"), closed("r"), closed("r", "cancelled"), opened("r"), closed("never opened"))
    assert rows(path) == {"r": ("finished", closed("r").charged_tokens)}


def test_the_loop_hears_of_openings_once_they_are_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        ids = [f"r{n}" for n in range(3000)]
        for request_id in ids:
            ledger.write(opened(request_id))
        assert not committed  # nothing while the loop has not turned
        while len(committed) < len(ids):
            await asyncio.wait_for(asyncio.sleep(0), 10)
            assert set(committed) <= set(rows(path))
        assert committed == ids

    with_ledger(path, work)


@pytest.mark.parametrize("content", [b"this is not a database" * 100, None])
def test_a_file_of_another_kind_is_refused_with_its_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "usage.sqlite"
    if content is None:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 99")
    else:
        path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"usage\.sqlite: "):
        past_of(path)


def test_a_failure_of_the_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"

    async def body() -> None:
        failed = asyncio.Event()
        ledger = Ledger(path, on_committed=lambda ids: None, on_failed=lambda error: failed.set())
        await ledger.start(0)
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE usage")
            db.commit()
        ledger.write(opened("r"))
        await asyncio.wait_for(failed.wait(), 60)
        await ledger.close()

    asyncio.run(body())


def test_kill_in_the_middle_forgives_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    acknowledged: set[str] = set()
    closing_asked: set[str] = set()
    for run, closings_before_kill in enumerate((0, 15, 100, 400)):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.coordinator.ledger_child", str(path), f"run{run}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        said = [child.stdout.readline()]
        while sum(line.startswith("close") for line in said) < closings_before_kill:
            said.append(child.stdout.readline())
            assert said[-1], "it has ended by itself"
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
        assert child.wait(60) == -signal.SIGKILL
        for line in said:
            word, _, request_id = line.rstrip("\n").partition(" ")
            if line.endswith("\n"):
                (acknowledged if word == "ack" else closing_asked).add(request_id)
        past = past_of(path)
        kept = rows(path)
        assert acknowledged <= set(kept), "an acknowledged request was forgiven"
        for request_id, (outcome, charged) in kept.items():
            entry = opened(request_id) if outcome is None else closed(request_id)
            assert charged == (entry.ask.tokens if outcome is None else entry.charged_tokens)
            assert outcome is None or request_id in closing_asked
        assert past.charged == (("a/x", 0, sum(charged for _, charged in kept.values())),)
        assert {row.request_id for row in past.open} == {name for name, row in kept.items() if row[0] is None}
    assert len(acknowledged) > 1000 and len(closing_asked) > 500
    # The word of those who know how the open ones ended comes at last, all of it again, and twice.
    known = sorted(rows(path))
    write(path, *[closed(request_id) for request_id in known * 2])
    assert rows(path) == {request_id: ("finished", closed(request_id).charged_tokens) for request_id in known}


def test_nothing_about_a_request_leaves_before_its_row_and_links_keep_their_order() -> None:
    outbox = Outbox()
    one, two = Send(1, Accepted("r", 1)), Send(2, Release("r", 1))
    status, other = Send(1, StatusRequest()), Send(3, Accepted("other", 1))
    assert outbox.pass_or_hold(one)
    outbox.opened("r")
    outbox.opened("later")
    last = Send(1, Accepted("later", 1))
    assert [outbox.pass_or_hold(send) for send in (one, status, two, other, last)] == [False, False, False, True, False]
    assert outbox.committed(["nothing to do with it"]) == []
    assert outbox.committed(["r"]) == [one, status, two]
    assert not outbox.pass_or_hold(status)
    assert outbox.committed(["later"]) == [last, status]
    assert not outbox.held and outbox.pass_or_hold(one)


@pytest.mark.parametrize("keep_days", [0, 30])
def test_closed_rows_are_deleted_after_their_days_and_open_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_days: int
) -> None:
    monkeypatch.setattr("coordinator.accounting.ledger.PRUNE_MAX", 7)
    path = tmp_path / "usage.sqlite"
    names = [f"r{n}" for n in range(30)]
    write(path, *map(opened, names), *map(closed, names), opened("open"), opened("new"), closed("new"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE usage SET accepted_s = accepted_s - 31 * 86400 WHERE request_id <> 'new'")
        db.commit()
    left = {"open", "new", "last"} | (set() if keep_days else set(names))

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        ledger.write(opened("last"))
        async with asyncio.timeout(60):
            while not committed or set(rows(path)) != left:
                await asyncio.wait_for(asyncio.sleep(0.01), 60)

    with_ledger(path, work, keep_days=keep_days)
    assert set(rows(path)) == left


def test_days_are_written_for_people() -> None:
    assert [day_text(day) for day in (0, 20_778)] == ["1970-01-01", "2026-11-21"]


def test_what_was_held_back_for_a_lost_link_is_not_sent_on_its_next_one():
    outbox = Outbox()
    outbox.opened("r")
    assert not outbox.pass_or_hold(Send(7, Release("r", 1)))
    outbox.forget(7)
    assert outbox.committed(["r"]) == [] and not outbox.held


@pytest.mark.parametrize(
    ("computed", "cached", "expected"),
    [
        (4, 0, (4, 32)),  # by a coordinator that found the row open, and what was charged in it
        (4, 32, (4, 32)),  # by the one that had closed it
        (9, 27, (9, 27)),
        (0, 0, (4, 32)),
    ],
)
def test_what_was_cached_is_still_known_when_a_row_was_opened_again(
    tmp_path: Path, computed: int, cached: int, expected: tuple[int, int]
) -> None:
    path = tmp_path / "usage.sqlite"

    def end(outcome: str, prompt: int, cached: int, output: int) -> Closed:
        return Closed("r", outcome, prompt + output, prompt, cached, output, 1.0, 2.0, 3.0, 4.0)

    first = Opened("r", 0, "a/x", "m", "standard", False, Ask(36, 50, 3))
    again = msgspec.structs.replace(first, ask=Ask(0, 40, 3), again=True)
    write(path, first, end("cancelled", 4, 32, 10), again, end("finished", computed, cached, 50))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT prompt_tokens, cached_tokens FROM usage").fetchall() == [expected]
