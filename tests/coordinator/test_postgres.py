"""The ledger, the lease and the policies in a real PostgreSQL, with what a lost connection and an old term may do."""

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.accounting.billing import Past
from coordinator.accounting.ledger import LATE_S, Ledger
from coordinator.accounting.sqlite_store import SqliteStore
from coordinator.policy_keeper import PolicyStoreError
from coordinator.postgres.lease import LeaseRow
from launcher.admin.usage import NoLedger, UsageSettings, read
from runtime.process import clock
from runtime.storage.errors import StorageError, StorageUnavailable
from tests.coordinator.ledger_words import closed, opened
from tests.coordinator.test_ledger_totals import DAYS, random_entry
from tests.helpers import until
from tests.postgres_server import PostgresServer, postgres_server

psycopg = pytest.importorskip("psycopg")
postgres: Any = pytest.importorskip("coordinator.postgres.database")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    """An empty database."""
    yield server.url
    query(server.url, "DROP SCHEMA IF EXISTS crossdock CASCADE")


def query(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True, options="-c search_path=crossdock") as db:
        done = db.execute(statement)
        return done.fetchall() if done.description else []


def lead(url: str, holder: str = "one") -> int:
    """Take the lease from whoever has it; returns the term."""
    table, until_s = postgres.LeaseTable(url), time.monotonic() + 20.0
    while True:
        try:
            row: LeaseRow = table.read()
            if table.take(row, holder):
                table.close()
                return row.term + 1
        except StorageUnavailable:
            assert time.monotonic() < until_s


def test_rows_are_those_of_sqlite(url: str, tmp_path: Path) -> None:
    """Random entries leave the same rows, sums and open bills in PostgreSQL and in SQLite."""
    source, term = random.Random(3), lead(url)
    stores = [postgres.PostgresStore(url, term), SqliteStore(tmp_path / "usage.sqlite")]
    for store in stores:
        store.open()
    for _ in range(30):
        entries = [random_entry(source) for _ in range(source.randrange(12))]
        for store in stores:
            store.commit(entries)
    large = opened("large", day=DAYS[0])
    for store in stores:
        store.commit([large])
    pasts = [store.read(DAYS[0])[0] for store in stores]
    ours, theirs = ({bill.request_id: bill for bill in past.open} for past in pasts)
    assert ours == theirs and len(ours) > 5
    assert sorted(pasts[0].charged) == sorted(pasts[1].charged) and pasts[0].charged
    assert {tenant: tokens for tenant, _, tokens in pasts[0].recent} == {
        tenant: tokens for tenant, _, tokens in pasts[1].recent
    }
    sums = "SELECT day, tenant, COUNT(*), SUM(charged_tokens)::bigint FROM usage GROUP BY day, tenant ORDER BY 1, 2"
    totals = "SELECT day, tenant, requests, charged_tokens FROM usage_totals ORDER BY 1, 2"
    assert query(url, sums) == query(url, totals)
    query(url, "UPDATE usage SET accepted_s = 0")
    assert 0 < stores[0].prune(1.0, 7) <= 7 and query(url, sums) == query(url, totals)
    for store in stores:
        store.close()


def test_old_term_cannot_write(url: str) -> None:
    """After another coordinator has taken the lease, the database refuses entries and policies of the one before."""
    term = lead(url)
    store, policies = postgres.PostgresStore(url, term), postgres.PostgresPolicies(url, term)
    store.commit([opened("r")])
    policies.write(b"{}")
    assert lead(url, "two") == term + 1
    for _ in range(2):  # the first one finds that its session was ended
        with pytest.raises(StorageError) as refused:
            store.commit([opened("late"), closed("r")])
        with pytest.raises(PolicyStoreError) as not_written:
            policies.write(b"[]")
    assert not isinstance(refused.value, StorageUnavailable)
    assert f"term {term} is over" in str(refused.value) and f"term {term} is over" in str(not_written.value)
    assert query(url, "SELECT request_id, outcome FROM usage") == [("r", None)]
    assert postgres.PostgresPolicies(url, term + 1).read() == b"{}"


def test_takeover_waits_for_open_writes(url: str) -> None:
    """A transaction that has begun in a term is in the database before the next term begins; renewals do not wait for it."""
    term = lead(url)
    table = postgres.LeaseTable(url)
    row = table.read()
    with psycopg.connect(url, options="-c search_path=crossdock") as db:
        db.execute("SELECT check_term(%s)", (term,))
        db.execute("INSERT INTO policies VALUES ('written')")
        assert postgres.LeaseTable(url).renew(term)
        row = row._replace(renewals=row.renewals + 1)
        taken: list[tuple[bool, float]] = []
        thread = threading.Thread(target=lambda: taken.append((table.take(row, "two"), time.monotonic())))
        thread.start()
        time.sleep(0.3)
        assert not taken
        committed_at = time.monotonic()
        db.commit()
    thread.join(10)
    assert taken[0][0] and taken[0][1] >= committed_at
    assert query(url, "SELECT content FROM policies") == [("written",)]


def test_stalled_transaction_delays_no_takeover(url: str) -> None:
    """A host that is cut off in the middle of a transaction does not keep its lock from the next leader."""
    term = lead(url)
    took_s: list[float] = []

    def stall() -> None:
        with postgres.session_of_term(url, 30.0, term).transaction() as db:
            db.execute("SELECT 1").fetchone()
            began = time.monotonic()
            assert lead(url, "two") == term + 1
            took_s.append(time.monotonic() - began)
            db.execute("SELECT 1").fetchone()

    with pytest.raises(StorageUnavailable):
        stall()
    assert took_s[0] < 5


def test_lease_is_taken_once(url: str) -> None:
    """Of several that try to take the same row, one gets it; one that renews in time keeps it."""
    tables = [postgres.LeaseTable(url) for _ in range(6)]
    rows: list[LeaseRow] = []
    took: list[bool] = []
    readers = [threading.Thread(target=lambda table=table: rows.append(table.read())) for table in tables]
    for thread in readers:
        thread.start()  # they make the tables at the same time
    for thread in readers:
        thread.join(20)
    assert rows == [LeaseRow(0, 0, "")] * 6
    takers = [threading.Thread(target=lambda table=table: took.append(table.take(rows[0], "x"))) for table in tables]
    for thread in takers:
        thread.start()
    for thread in takers:
        thread.join(20)
    assert sorted(took) == [False] * 5 + [True]
    seen = tables[0].read()
    assert tables[1].renew(1) and not tables[2].take(seen, "y") and not tables[2].renew(0)
    assert tables[1].release(1) and tables[0].read().holder == ""


def test_restart_of_database_is_waited_for(server: PostgresServer, url: str) -> None:
    """While the database is down, the ledger says so; afterwards it writes what waited, once."""
    term = lead(url)

    async def body() -> None:
        committed: list[str] = []
        failures: list[StorageError] = []
        ledger = Ledger(postgres.PostgresStore(url, term), on_committed=committed.extend, on_failed=failures.append)
        past: Past = await ledger.start(0)
        assert past == Past((), (), ())
        ledger.write(opened("before"))
        await until(lambda: committed == ["before"])
        await asyncio.to_thread(server.stop)
        ledger.write(opened("r"))
        ledger.write(closed("r"))
        await until(lambda: "could not be written" in ledger.trouble(clock.now() + LATE_S))
        await asyncio.to_thread(server.start)
        await until(lambda: committed == ["before", "r"] and not ledger.behind)
        assert not failures
        await ledger.close()

    asyncio.run(body())
    assert sorted(query(url, "SELECT request_id, outcome, charged_tokens FROM usage")) == [
        ("before", None, opened("before").ask.tokens),
        ("r", "finished", closed("r").charged_tokens),
    ]


def test_silent_server_is_given_up(server: PostgresServer, url: str) -> None:
    """A server that stands still is given up after the time that an answer may take."""
    term = lead(url)
    table = postgres.LeaseTable(url)
    assert table.renew(term)
    server.signal_all(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StorageUnavailable):
            table.renew(term)
        assert time.monotonic() - began < postgres.LEASE_ANSWER_S + 1.0
    finally:
        server.signal_all(signal.SIGCONT)
    assert table.renew(term)


def test_lost_answer_changes_no_amount(url: str) -> None:
    """Entries that are written again, since the answer to their commit was lost, are charged once."""
    store = postgres.PostgresStore(url, lead(url))
    again = msgspec.structs.replace(opened("r"), again=True)
    store.commit([opened("r"), closed("r")])
    for _ in range(2):
        store.commit([again, closed("r")])
    assert query(url, "SELECT outcome, charged_tokens FROM usage") == [("finished", closed("r").charged_tokens)]


def test_usage_is_shown_from_postgres(url: str, tmp_path: Path) -> None:
    """`crossdock usage --db postgresql://…` shows what it shows of a file with the same entries."""
    source, term = random.Random(5), lead(url)
    entries = [random_entry(source) for _ in range(100)]
    path = tmp_path / "usage.sqlite"
    for store in (postgres.PostgresStore(url, term), SqliteStore(path)):
        store.open()
        store.commit(entries)
        store.close()
    for tenant in ("", "a"):
        shown = [read(UsageSettings(db=db, tenant=tenant)) for db in (url, str(path))]
        assert shown[0] == shown[1] and len(shown[0]) >= 2
    with pytest.raises(NoLedger, match="--db: has a password") as refused:
        read(UsageSettings(db="postgresql://u:secret@h/d"))
    assert "secret" not in str(refused.value)
