"""The ledger, the lease and the policies in a real PostgreSQL, with what a lost connection and an old term may do."""

import asyncio
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.accounting.billing import Past
from coordinator.accounting.ledger import LATE_S, Ledger
from coordinator.accounting.sqlite_store import SqliteStore
from coordinator.policy_keeper import PolicyStoreError
from launcher.admin.usage import NoLedger, UsageSettings, read
from runtime.lease.lease import LeaseRow
from runtime.process import clock
from runtime.storage.errors import StorageError, StorageUnavailable
from tests.coordinator.ledger_words import closed, opened
from tests.coordinator.test_ledger_totals import DAYS, random_entry
from tests.helpers import until
from tests.postgres_server import PostgresServer, query

psycopg = pytest.importorskip("psycopg")
postgres: Any = pytest.importorskip("coordinator.postgres.database")
lease_table: Any = pytest.importorskip("runtime.lease.lease_table")


def lead(url: str, holder: str = "one") -> int:
    """Take the lease from whoever has it; returns the term."""
    table, until_s = postgres.lease_table(url), time.monotonic() + 20.0
    while True:
        try:
            row: LeaseRow = table.read()
            if table.take(row, holder):
                table.close()
                return row.term + 1
        except StorageUnavailable:
            assert time.monotonic() < until_s


def test_rows_are_those_of_sqlite(pg_url: str, tmp_path: Path) -> None:
    """Random entries leave the same rows, sums and open bills in PostgreSQL and in SQLite."""
    source, term = random.Random(3), lead(pg_url)
    stores = [postgres.PostgresStore(pg_url, term), SqliteStore(tmp_path / "usage.sqlite")]
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
    assert query(pg_url, sums) == query(pg_url, totals)
    query(pg_url, "UPDATE usage SET accepted_s = 0")
    assert 0 < stores[0].prune(1.0, 7) <= 7 and query(pg_url, sums) == query(pg_url, totals)
    for store in stores:
        store.close()


def test_old_term_cannot_write(pg_url: str) -> None:
    """After another coordinator has taken the lease, the database refuses entries and policies of the one before."""
    term = lead(pg_url)
    store, policies = postgres.PostgresStore(pg_url, term), postgres.PostgresPolicies(pg_url, term)
    store.commit([opened("r")])
    policies.write(b"{}")
    assert lead(pg_url, "two") == term + 1
    for _ in range(2):  # the first one finds that its session was ended
        with pytest.raises(StorageError) as refused:
            store.commit([opened("late"), closed("r")])
        with pytest.raises(PolicyStoreError) as not_written:
            policies.write(b"[]")
    assert not isinstance(refused.value, StorageUnavailable)
    assert f"term {term} is over" in str(refused.value) and f"term {term} is over" in str(not_written.value)
    assert query(pg_url, "SELECT request_id, outcome FROM usage") == [("r", None)]
    assert postgres.PostgresPolicies(pg_url, term + 1).read() == b"{}"


def test_takeover_waits_for_open_writes(pg_url: str) -> None:
    """A transaction that has begun in a term is in the database before the next term begins; renewals do not wait for it."""
    term = lead(pg_url)
    table = postgres.lease_table(pg_url)
    row = table.read()
    with psycopg.connect(pg_url, options="-c search_path=crossdock") as db:
        db.execute("SELECT check_term(%s)", (term,))
        db.execute("INSERT INTO policies VALUES ('written')")
        assert postgres.lease_table(pg_url).renew(term)
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
    assert query(pg_url, "SELECT content FROM policies") == [("written",)]


def test_stalled_transaction_delays_no_takeover(pg_url: str) -> None:
    """A host that is cut off in the middle of a transaction does not keep its lock from the next leader."""
    term = lead(pg_url)
    took_s: list[float] = []

    def stall() -> None:
        with postgres.session_of_term(pg_url, 30.0, term).transaction() as db:
            db.execute("SELECT 1").fetchone()
            began = time.monotonic()
            assert lead(pg_url, "two") == term + 1
            took_s.append(time.monotonic() - began)
            db.execute("SELECT 1").fetchone()

    with pytest.raises(StorageUnavailable):
        stall()
    assert took_s[0] < 5


def test_lease_is_taken_once(pg_url: str) -> None:
    """Of several that try to take the same row, one gets it; one that renews in time keeps it."""
    tables = [postgres.lease_table(pg_url) for _ in range(6)]
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


def test_restart_of_database_is_waited_for(pg_server: PostgresServer, pg_url: str) -> None:
    """While the database is down, the ledger says so; afterwards it writes what waited, once."""
    term = lead(pg_url)

    async def body() -> None:
        committed: list[str] = []
        failures: list[StorageError] = []
        ledger = Ledger(postgres.PostgresStore(pg_url, term), on_committed=committed.extend, on_failed=failures.append)
        past: Past = await ledger.start(0)
        assert past == Past((), (), ())
        ledger.write(opened("before"))
        await until(lambda: committed == ["before"])
        await asyncio.to_thread(pg_server.stop)
        ledger.write(opened("r"))
        ledger.write(closed("r"))
        await until(lambda: "could not be written" in ledger.trouble(clock.now() + LATE_S))
        await asyncio.to_thread(pg_server.start)
        await until(lambda: committed == ["before", "r"] and not ledger.behind)
        assert not failures
        await ledger.close()

    asyncio.run(body())
    assert sorted(query(pg_url, "SELECT request_id, outcome, charged_tokens FROM usage")) == [
        ("before", None, opened("before").ask.tokens),
        ("r", "finished", closed("r").charged_tokens),
    ]


def test_silent_server_is_given_up(pg_server: PostgresServer, pg_url: str) -> None:
    """A server that stands still is given up after the time that an answer may take."""
    term = lead(pg_url)
    table = postgres.lease_table(pg_url)
    assert table.renew(term)
    pg_server.signal_all(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StorageUnavailable):
            table.renew(term)
        assert time.monotonic() - began < lease_table.ANSWER_S + 1.0
    finally:
        pg_server.signal_all(signal.SIGCONT)
    assert table.renew(term)


def test_lost_answer_changes_no_amount(pg_url: str) -> None:
    """Entries that are written again, since the answer to their commit was lost, are charged once."""
    store = postgres.PostgresStore(pg_url, lead(pg_url))
    again = msgspec.structs.replace(opened("r"), again=True)
    store.commit([opened("r"), closed("r")])
    for _ in range(2):
        store.commit([again, closed("r")])
    assert query(pg_url, "SELECT outcome, charged_tokens FROM usage") == [("finished", closed("r").charged_tokens)]


def test_usage_is_shown_from_postgres(pg_url: str, tmp_path: Path) -> None:
    """`crossdock usage --db postgresql://…` shows what it shows of a file with the same entries."""
    source, term = random.Random(5), lead(pg_url)
    entries = [random_entry(source) for _ in range(100)]
    path = tmp_path / "usage.sqlite"
    for store in (postgres.PostgresStore(pg_url, term), SqliteStore(path)):
        store.open()
        store.commit(entries)
        store.close()
    for tenant in ("", "a"):
        shown = [read(UsageSettings(db=db, tenant=tenant)) for db in (pg_url, str(path))]
        assert shown[0] == shown[1] and len(shown[0]) >= 2
    with pytest.raises(NoLedger, match="--db: has a password") as refused:
        read(UsageSettings(db="postgresql://u:secret@h/d"))
    assert "secret" not in str(refused.value)
