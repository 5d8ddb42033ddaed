"""The sums that a start reads instead of the day's rows are always what the rows add up to, and found without reading those."""

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.accounting import sqlite_store, statements
from coordinator.accounting.billing import Closed, Entry, Opened, Past
from coordinator.accounting.ledger import Ledger
from coordinator.accounting.past import day_text
from coordinator.accounting.quota import Ask
from coordinator.accounting.sqlite_store import SqliteStore
from runtime.process import clock
from tests.coordinator.ledger_words import closed, opened
from tests.helpers import first

TENANTS = ("a/x", "a/y", "b")
DAYS = (20_000, 20_001)


def connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    sqlite_store._prepare(db)
    return db


def sums(db: sqlite3.Connection) -> list[tuple[str, str, int, int]]:
    return db.execute(
        "SELECT day, tenant, COUNT(*), SUM(charged_tokens) FROM usage GROUP BY day, tenant ORDER BY day, tenant"
    ).fetchall()


def totals(db: sqlite3.Connection) -> list[tuple[str, str, int, int]]:
    found = db.execute("SELECT day, tenant, requests, charged_tokens FROM usage_totals ORDER BY day, tenant")
    return found.fetchall()


def random_entry(source: random.Random) -> Entry:
    """Of few requests, so that most are opened, closed and opened again several times."""
    number = source.randrange(40)
    request_id, tenant, day = f"r{number}", TENANTS[number % 3], DAYS[number % 2]
    prompt, cached, output = (source.randrange(200) for _ in range(3))
    if source.random() < 0.5:
        again, from_token = source.random() < 0.5, source.randrange(10)
        ask = Ask(prompt, output, 1)
        return Opened(request_id, day, tenant, "m", "standard", False, ask, again, from_token)
    outcome = source.choice(["finished", "cancelled", "lost"])
    return Closed(request_id, outcome, prompt + output, prompt, cached, output, 1.0, 1.0, 1.0, 1.0)


def start(path: Path, today: int) -> Past:
    async def body() -> Past:
        one = Ledger(SqliteStore(path), on_committed=lambda ids: None, on_failed=lambda error: None)
        past = await one.start(today)
        await one.close()
        return past

    return asyncio.run(body())


@pytest.mark.parametrize("seed", first(6, range(20)))
def test_totals_equal_sum_of_rows(tmp_path: Path, seed: int) -> None:
    """Stored totals equal the sum of the rows after any entries, crashes and deletions."""
    source, path = random.Random(seed), tmp_path / "usage.sqlite"
    db = connect(path)
    for _ in range(60):
        db.execute("BEGIN IMMEDIATE")
        for _ in range(source.randrange(12)):
            sqlite_store._write(db, random_entry(source))
        match source.randrange(5):
            case 0:  # killed before the commit: what was written is gone, and so is its share of the sums
                db.close()
                db = connect(path)
            case 1:
                db.execute("COMMIT")
                db.execute("UPDATE usage SET accepted_s = accepted_s - 1000 WHERE request_id < ?", (f"r{seed}",))
                db.execute(statements.PRUNE, (db.execute("SELECT MAX(accepted_s) FROM usage").fetchone()[0], 7))
            case _:
                db.execute("COMMIT")
        assert totals(db) == sums(db)
    assert sums(db), "something was written"
    expected = [(tenant, DAYS[0], tokens) for day, tenant, _, tokens in sums(db) if day == day_text(DAYS[0])]
    db.close()
    assert sorted(start(path, DAYS[0]).charged) == expected


def work_of_a_start(path: Path, rows: int) -> int:
    """Hundreds of instructions of SQLite's machine that reading takes, with so many closed rows of the day."""
    with closing(connect(path)) as db:
        db.execute("BEGIN")
        for number in range(rows):
            sqlite_store._write(db, opened(f"r{number}", tenant=f"t{number % 10}"))
            sqlite_store._write(db, closed(f"r{number}"))
        sqlite_store._write(db, opened("open"))
        db.execute("UPDATE usage SET accepted_s = accepted_s - 3600 WHERE outcome IS NOT NULL")
        db.execute("COMMIT")
        steps = [0]

        def step() -> None:
            steps[0] += 1

        db.set_progress_handler(step, 100)
        past, unreadable = sqlite_store.read_past(db, 0, clock.unix_time())
        assert not unreadable and len(past.open) == len(past.recent) == 1 and len(past.charged) == min(rows, 10) + 1
        return steps[0]


def test_start_work_independent_of_row_count(tmp_path: Path) -> None:
    """Reading 5,000 rows at the start takes about as many SQLite steps as reading 100."""
    few, many = work_of_a_start(tmp_path / "few.sqlite", 100), work_of_a_start(tmp_path / "many.sqlite", 5_000)
    assert many <= few + 2, (few, many)
