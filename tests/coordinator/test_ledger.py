"""The usage ledger: what is on disk when, and that kill -9 neither forgives nor doubles anything."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from coordinator.accounting import ledger as ledger_module
from coordinator.accounting import sqlite_store
from coordinator.accounting.billing import Closed, Entry, Opened, Past
from coordinator.accounting.ledger import LATE_S, Ledger
from coordinator.accounting.past import day_text
from coordinator.accounting.quota import Ask
from coordinator.accounting.sqlite_store import SqliteStore
from coordinator.events import Send
from coordinator.outbox import Outbox
from proto.errors import Interrupt, Reject
from proto.messages import Accepted, Interrupted, Rejected, Release, StatusRequest
from runtime.process import clock
from runtime.storage.errors import StorageError
from tests.coordinator.ledger_words import closed, opened
from tests.helpers import until

ROOT = Path(__file__).parents[2]


def with_ledger(
    path: Path, work: Callable[[Ledger, Past, list[str]], Awaitable[None]], today: int = 0, keep_days: int = 0
) -> None:
    async def body() -> None:
        committed: list[str] = []
        failures: list[StorageError] = []
        ledger = Ledger(
            SqliteStore(path), on_committed=committed.extend, on_failed=failures.append, keep_days=keep_days
        )
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
            ledger.write(entry)  # type: ignore[arg-type]

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


def test_open_rows_and_charges_are_restored(tmp_path: Path) -> None:
    """Open rows, the day's charges and recent requests are read back when a ledger starts."""
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


def test_repeated_entries_change_nothing(tmp_path: Path) -> None:
    """Repeated openings and closings of a request leave its row as it was first closed."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"), opened("r"), closed("r"), closed("r", "cancelled"), opened("r"), closed("never opened"))
    assert rows(path) == {"r": ("finished", closed("r").charged_tokens)}


def test_openings_reported_once_on_disk(tmp_path: Path) -> None:
    """Openings are reported as committed, in order, only once their rows are on disk."""
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
def test_foreign_ledger_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """A file that is no database, or has another version, is refused with its name."""
    path = tmp_path / "usage.sqlite"
    if content is None:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 99")
    else:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=r"usage\.sqlite: "):
        past_of(path)


def test_disk_failure_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"

    async def body() -> None:
        failed = asyncio.Event()
        ledger = Ledger(SqliteStore(path), on_committed=lambda ids: None, on_failed=lambda error: failed.set())
        await ledger.start(0)
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE usage")
            db.commit()
        ledger.write(opened("r"))
        await asyncio.wait_for(failed.wait(), 60)
        await ledger.close()

    asyncio.run(body())


def test_locked_ledger_is_waited_for(tmp_path: Path) -> None:
    """While another process holds the file's lock, the ledger says so and goes on trying; then it commits what waited."""
    path = tmp_path / "usage.sqlite"

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            ledger.write(opened("r"))
            await until(lambda: "locked" in ledger.trouble(clock.now() + LATE_S))
            assert not committed and not ledger.trouble(clock.now() - 60.0), "a moment is no trouble"
            ledger.write(closed("r"))
            other.execute("ROLLBACK")
        await until(lambda: committed == ["r"] and not ledger.trouble(clock.now() + LATE_S))

    with_ledger(path, work)
    assert rows(path) == {"r": ("finished", closed("r").charged_tokens)}


def test_hanging_ledger_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk does not answer at all, the ledger says so; what waited is written once it does."""
    path, answers, real = tmp_path / "usage.sqlite", threading.Event(), SqliteStore.commit

    def hangs(self: SqliteStore, entries: Sequence[Entry]) -> None:
        assert answers.wait(60)
        real(self, entries)

    monkeypatch.setattr(SqliteStore, "commit", hangs)

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        ledger.write(opened("r"))
        await until(lambda: "no answer yet" in ledger.trouble(clock.now() + LATE_S))
        assert not committed
        answers.set()
        await until(lambda: committed == ["r"] and not ledger.trouble(clock.now() + LATE_S))

    with_ledger(path, work)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR | 3 << 8, sqlite3.SQLITE_CANTOPEN])
def test_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A disk that is full or fails is tried again until it works, and nothing is lost or written twice."""
    path, tries, real = tmp_path / "usage.sqlite", iter(range(4)), sqlite_store._write

    def fails_thrice(db: sqlite3.Connection, entry: Entry) -> None:
        real(db, entry)
        if isinstance(entry, Closed) and entry.request_id and next(tries) < 3:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = code
            raise error

    monkeypatch.setattr(sqlite_store, "_write", fails_thrice)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    write(path, opened("r"), closed("r"))
    assert next(tries, None) is None
    assert rows(path) == {"r": ("finished", closed("r").charged_tokens)}


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR | 3 << 8])
def test_start_waits_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A ledger whose file is locked, full or failing when it is opened is tried again until it can be read."""
    path, tries, real = tmp_path / "usage.sqlite", iter(range(3)), sqlite_store._prepare
    write(path, opened("r"))

    def fails_thrice(db: sqlite3.Connection) -> None:
        if next(tries, None) is None:
            return real(db)
        error = sqlite3.OperationalError("not now")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(sqlite_store, "_prepare", fails_thrice)
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.01)
    assert [row.request_id for row in past_of(path).open] == ["r"]
    assert next(tries, None) is None


def test_kill_loses_and_doubles_no_charge(tmp_path: Path) -> None:
    """Acknowledged requests stay charged exactly once though the process is killed while it writes."""
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
    assert len(acknowledged) >= len(closing_asked) > 500
    # The word of those who know how the open ones ended comes at last, all of it again, and twice.
    known = sorted(rows(path))
    write(path, *[closed(request_id) for request_id in known * 2])
    assert rows(path) == {request_id: ("finished", closed(request_id).charged_tokens) for request_id in known}


def test_messages_wait_for_ledger_row() -> None:
    """Messages about a request are held until its row is committed, and each link keeps their order."""
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


def test_refusals_pass_what_waits() -> None:
    """A gateway hears of other requests while some wait for their rows, but never of one request out of order."""
    outbox = Outbox()
    outbox.opened("a")
    outbox.opened("b")
    a, b = Send(1, Accepted("a", 1)), Send(1, Accepted("b", 1))
    refused = Send(1, Rejected("c", 1, Reject.QUOTA, "too much"))
    again = Send(1, Interrupted("b", 1, Interrupt.DECODE_LOST, "killed"))
    assert [outbox.pass_or_hold(send) for send in (a, b, refused)] == [False, False, True]
    outbox.uncommitted.discard("b")
    assert not outbox.pass_or_hold(again) and outbox.pass_or_hold(refused)
    assert outbox.committed(["a", "b"]) == [a, b, again]
    outbox.opened("a")
    step, order = Send(2, Release("a", 1)), Send(2, Release("z", 1))
    assert [outbox.pass_or_hold(send) for send in (step, order)] == [False, False], (
        "a worker's messages keep their order"
    )


@pytest.mark.parametrize("keep_days", [0, 30])
def test_closed_rows_expire_open_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_days: int) -> None:
    """Closed rows are deleted after their days are over, open rows never."""
    monkeypatch.setattr("coordinator.accounting.ledger.PRUNE_MAX", 7)
    monkeypatch.setattr(clock, "SETTLE_S", 0.0)
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


def test_days_are_written_as_dates() -> None:
    assert [day_text(day) for day in (0, 20_778)] == ["1970-01-01", "2026-11-21"]


def test_held_messages_are_dropped_with_link():
    """Messages held back for a lost link are not sent on its next one."""
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
def test_cached_tokens_survive_reopened_row(
    tmp_path: Path, computed: int, cached: int, expected: tuple[int, int]
) -> None:
    """A row that is opened again still counts prompt and cached tokens of its first attempt."""
    path = tmp_path / "usage.sqlite"

    def end(outcome: str, prompt: int, cached: int, output: int) -> Closed:
        return Closed("r", outcome, prompt + output, prompt, cached, output, 1.0, 2.0, 3.0, 4.0)

    first = Opened("r", 0, "a/x", "m", "standard", False, Ask(36, 50, 3))
    again = msgspec.structs.replace(first, ask=Ask(0, 40, 3), again=True)
    write(path, first, end("cancelled", 4, 32, 10), again, end("finished", computed, cached, 50))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT prompt_tokens, cached_tokens FROM usage").fetchall() == [expected]


def spoil(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[
            ("day", value)
            for value in ("20x", "", "2026-02-30", "20261121", "2026-W47-6", "0000-00-00", b"1970-01-01", 7)
        ],
        *[("request_id", value) for value in (b"r", "", "x" * 10_000, "r\udcff".encode(errors="surrogateescape"))],
        *[("tenant", value) for value in ("", b"a/x", "x" * 100_000, 1.5)],
        *[("model", value) for value in (b"\xff", "x" * 100_000)],
        *[("borrowed", value) for value in (2, -1, "no", b"")],
        *[
            (column, value)
            for column in ("prompt_tokens", "output_tokens", "kv_blocks", "from_token")
            for value in (-1, 1 << 62, 1e300, float("inf"), "many", b"\0", 1.5)
        ],
    ],
)
def test_odd_row_is_skipped_with_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: object
) -> None:
    """A row with an impossible value is left out, and one warning tells how many there were."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"), opened("good"), opened("worse"))
    spoil(path, f"UPDATE usage SET {column} = ? WHERE request_id = 'r'", value)
    spoil(path, "UPDATE usage SET day = 'no day' WHERE request_id = 'worse'")
    logger = MagicMock()
    monkeypatch.setattr("coordinator.accounting.ledger.log.get", lambda name: logger)
    past = past_of(path)
    odd_is_text = column == "tenant" and value == 1.5  # SQLite has made text of it
    assert [row.request_id for row in past.open if row.tenant != "1.5"] == ["good"]
    (said,) = logger.warning.call_args_list
    assert said.kwargs["rows"] >= (1 if odd_is_text else 2)


@pytest.mark.parametrize("value", [-1, 1 << 62, 1e300, "many", b"\0", float("inf")])
@pytest.mark.parametrize(
    "statement", ["UPDATE usage SET charged_tokens = ?", "UPDATE usage_totals SET charged_tokens = ?"]
)
def test_odd_amount_is_not_charged(tmp_path: Path, statement: str, value: object) -> None:
    """An impossible amount of charged tokens counts for no tenant, and later rows are still written."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"), closed("r"))
    spoil(path, statement, value)
    past = past_of(path)
    for _, _, tokens in (*past.charged, *past.recent):
        assert type(tokens) is int and 0 <= tokens < 1 << 40
    write(path, opened("r"), opened("next"), closed("next"))
    assert rows(path)["next"] == ("finished", closed("next").charged_tokens)


def test_foreign_table_rows_cannot_stop_start(tmp_path: Path) -> None:
    """Rows with missing or huge values do not keep a ledger from starting."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"))
    with closing(sqlite3.connect(path)) as db:
        table = db.execute("SELECT sql FROM sqlite_master WHERE name = 'usage'").fetchone()[0]
        db.execute("DROP TABLE usage")
        db.execute(table.replace("NOT NULL", ""))
        db.execute("INSERT INTO usage (request_id) VALUES ('empty')")
        db.execute(
            "INSERT INTO usage (request_id, day, tenant, charged_tokens) VALUES ('huge', '1970-01-01', 'a', ?)",
            (2**63 - 1,),
        )
        db.execute(
            "INSERT INTO usage (request_id, day, tenant, charged_tokens) VALUES ('more', '1970-01-01', 'a', 100)"
        )
        db.commit()
    assert past_of(path).open == ()


def test_unwritable_table_is_refused_at_start(tmp_path: Path) -> None:
    """A table without the primary key that writing needs is refused at the start."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("r"))
    with closing(sqlite3.connect(path)) as db:
        table = db.execute("SELECT sql FROM sqlite_master WHERE name = 'usage'").fetchone()[0]
        db.execute("DROP TABLE usage")
        db.execute(table.replace("PRIMARY KEY", "").replace("WITHOUT ROWID", ""))
        db.commit()
    with pytest.raises(StorageError, match=r"usage\.sqlite: ON CONFLICT"):
        past_of(path)


@pytest.mark.parametrize(
    "error", [ValueError("odd"), OverflowError("large"), MemoryError(), RecursionError(), SystemExit(3)]
)
@pytest.mark.parametrize("where", ["_write", "_prepare"])
def test_ledger_thread_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    """Any error that ends the ledger's thread is reported, at its start or later."""

    def fail(*_: object) -> None:
        raise error

    async def body() -> None:
        told: asyncio.Queue[StorageError] = asyncio.Queue()
        ledger = Ledger(
            SqliteStore(tmp_path / "usage.sqlite"), on_committed=lambda ids: None, on_failed=told.put_nowait
        )
        if where == "_prepare":
            monkeypatch.setattr(f"coordinator.accounting.sqlite_store.{where}", fail)
            with pytest.raises(StorageError, match=rf"usage\.sqlite: {type(error).__name__}"):
                await asyncio.wait_for(ledger.start(0), 60)
        else:
            await ledger.start(0)
            monkeypatch.setattr(f"coordinator.accounting.sqlite_store.{where}", fail)
            ledger.write(opened("r"))
            assert type(error).__name__ in str(await asyncio.wait_for(told.get(), 60))
        await ledger.close()

    asyncio.run(body())


def test_ledger_files_are_private(tmp_path: Path) -> None:
    """Ledger files have mode 0600, and the folder created for them mode 0700, whatever the umask."""
    path = tmp_path / "made" / "usage.sqlite"
    before = os.umask(0)
    try:

        async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
            ledger.write(opened("r"))
            async with asyncio.timeout(60):
                while not committed:
                    await asyncio.wait_for(asyncio.sleep(0), 10)
            assert {each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {0o600}
            assert len(list(path.parent.iterdir())) == 3

        with_ledger(path, work)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        path.chmod(0o644)  # as earlier versions made it
        with_ledger(path, work)
    finally:
        os.umask(before)


def test_special_file_is_refused(tmp_path: Path) -> None:
    """A named pipe in place of the ledger file is refused."""
    path = tmp_path / "usage.sqlite"
    os.mkfifo(path)
    with pytest.raises(StorageError, match="it is not a file"):
        past_of(path)


def test_wrong_clock_deletes_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that is years ahead when the process starts deletes no rows of the ledger."""
    path = tmp_path / "usage.sqlite"
    write(path, opened("old"), closed("old"))
    monkeypatch.setattr(clock, "unix_time", lambda: time.time() + 1e9)

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        ledger.write(opened("new"))
        await until(lambda: "new" in committed)

    with_ledger(path, work, keep_days=30)
    assert set(rows(path)) == {"old", "new"}


def test_old_odd_row_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old row whose amount cannot be summed is deleted like other old rows."""
    monkeypatch.setattr(clock, "SETTLE_S", 0.0)
    path = tmp_path / "usage.sqlite"
    write(path, opened("odd"), closed("odd"), opened("old"), closed("old"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE usage SET accepted_s = 5.0")
        db.execute("UPDATE usage SET charged_tokens = 9e999 WHERE request_id = 'odd'")
        db.commit()

    async def work(ledger: Ledger, _past: Past, committed: list[str]) -> None:
        ledger.write(opened("new"))
        async with asyncio.timeout(60):
            while not committed or set(rows(path)) != {"new"}:
                await asyncio.wait_for(asyncio.sleep(0.01), 60)

    with_ledger(path, work, keep_days=30)
