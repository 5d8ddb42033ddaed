"""Lease, usage ledger and policies in PostgreSQL, in the schema `crossdock`. Imported only with `--database`.

**Fencing.** Each transaction that writes first takes a shared lock on the lease's row, if its term is still the one in which
this coordinator leads (`check_term`); else PostgreSQL refuses the transaction. A new leader changes the term, which waits for
these locks. So when it reads the ledger, everything that earlier leaders wrote is there, and nothing can be added. Renewals
change no key of the row; so they do not wait for the ledger's transactions, nor these for them.

**Bounded waits.** A host that stands still or is cut off may hold its lock for hours. So a new leader first ends
the sessions of the term before.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import psycopg

from coordinator.accounting.billing import Entry, Past
from coordinator.accounting.past import OPEN_MAX, RECENT_MAX, RECENT_S, day_text, past_of
from coordinator.accounting.statements import LAST_MINUTE, OF_DAY, PRUNE, READ_OPEN, SCHEMA, VERSION, statement_of
from coordinator.policy_keeper import PolicyStoreError
from coordinator.postgres.lease import LeaseRow
from runtime.process import clock
from runtime.storage.errors import StorageError
from runtime.storage.postgres import PostgresSession, prepare

LEASE_ANSWER_S: Final = 1.0
ANSWER_S: Final = 10.0
ROWS_MAX: Final = 512  # in one transaction, which the next leader may wait for
_END_SESSIONS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = %s AND usename = current_user AND datname = current_database()
"""
_DIALECT: Final = {
    "?": "%s",
    "MAX(": "GREATEST(",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    " WITHOUT ROWID": "",
}
_TABLES: Final = (
    """
    CREATE TABLE lease (
        term BIGINT PRIMARY KEY,
        renewals BIGINT NOT NULL,
        holder TEXT NOT NULL,
        version BIGINT NOT NULL -- of these tables
    )
    """,
    "CREATE TABLE policies (content TEXT NOT NULL)",
    """
    CREATE FUNCTION check_term(wanted BIGINT) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
        PERFORM FROM crossdock.lease WHERE term = wanted FOR KEY SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'term % is over: another coordinator leads', wanted USING ERRCODE = 'CD001';
        END IF;
    END $$
    """,
    """
    CREATE FUNCTION add_to_totals() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO crossdock.usage_totals AS totals VALUES (NEW.day, NEW.tenant, 1, NEW.charged_tokens)
            ON CONFLICT (day, tenant) DO UPDATE SET requests = totals.requests + 1,
                charged_tokens = totals.charged_tokens + excluded.charged_tokens;
        ELSIF TG_OP = 'UPDATE' THEN
            UPDATE crossdock.usage_totals SET charged_tokens = charged_tokens + NEW.charged_tokens - OLD.charged_tokens
            WHERE day = NEW.day AND tenant = NEW.tenant;
        ELSE
            UPDATE crossdock.usage_totals SET requests = requests - 1, charged_tokens = charged_tokens - OLD.charged_tokens
            WHERE day = OLD.day AND tenant = OLD.tenant;
            DELETE FROM crossdock.usage_totals WHERE day = OLD.day AND tenant = OLD.tenant AND requests = 0;
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER usage_totals AFTER INSERT OR DELETE OR UPDATE OF charged_tokens ON usage
        FOR EACH ROW EXECUTE FUNCTION add_to_totals()
    """,
    f"INSERT INTO lease VALUES (0, 0, '', {VERSION})",
)


@cache
def translated(statement: str) -> str:
    for theirs, ours in _DIALECT.items():
        statement = statement.replace(theirs, ours)
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def _name(term: int) -> str:
    return f"crossdock term {term}"


def session_of_term(url: str, answer_s: float, term: int) -> PostgresSession:
    """A transaction fails if this is not the term of the lease until its end."""
    return PostgresSession(url, answer_s, _name(term), f"SELECT check_term({term:d})")


class LeaseTable:
    """Reads and changes the lease's row; makes all tables at the first use. Each method may raise `StorageError`."""

    def __init__(self, url: str) -> None:
        self._session = PostgresSession(url, LEASE_ANSWER_S)
        self.name = self._session.name
        self._is_prepared = False

    def read(self) -> LeaseRow:
        with self._session.transaction() as db:
            if not self._is_prepared:
                prepare(db, "lease", (*translated(SCHEMA).split(";"), *_TABLES))
            term, renewals, holder, version = _row(db.execute("SELECT term, renewals, holder, version FROM lease"))
        if version != VERSION:
            raise StorageError(f"its tables are of version {version}, this program writes version {VERSION}")
        self._is_prepared = True
        return LeaseRow(term, renewals, holder)

    def take(self, row: LeaseRow, holder: str) -> bool:
        """Begin the next term, unless the row has changed meanwhile."""
        self._change(_END_SESSIONS, (_name(row.term),))
        return self._change(
            "UPDATE lease SET term = term + 1, renewals = 0, holder = %s WHERE term = %s AND renewals = %s AND holder = %s",
            (holder, *row),
        )

    def renew(self, term: int) -> bool:
        return self._change("UPDATE lease SET renewals = renewals + 1 WHERE term = %s", (term,))

    def release(self, term: int) -> bool:
        return self._change("UPDATE lease SET holder = '' WHERE term = %s", (term,))

    def close(self) -> None:
        self._session.close()

    def _change(self, statement: str, values: Sequence[object]) -> bool:
        with self._session.transaction() as db:
            changed = db.execute(statement, values)
        return changed.rowcount == 1


def _row(cursor: psycopg.Cursor[Any]) -> Any:
    row = cursor.fetchone()
    if row is None:
        raise StorageError("the table of the lease is empty")
    return row


class PostgresStore:
    """The rows of the usage ledger, written in one term."""

    def __init__(self, url: str, term: int) -> None:
        self._session = session_of_term(url, ANSWER_S, term)
        self.name = self._session.name
        self._ahead_s = 0.0  # the server's clock; it counts, since leaders on several hosts write times

    def open(self) -> None: ...

    def read(self, today: int) -> tuple[Past, int]:
        with self._session.transaction() as db:
            unix_s = float(_row(db.execute("SELECT extract(epoch FROM clock_timestamp())"))[0])
            opened = db.execute(translated(READ_OPEN), (OPEN_MAX,))
            totals = db.execute(translated(OF_DAY), (day_text(today),))
            recent = db.execute(translated(LAST_MINUTE), (unix_s - RECENT_S, unix_s, RECENT_MAX))
            self._ahead_s = unix_s - clock.unix_time()
            return past_of(opened, totals, recent, today, unix_s)

    def commit(self, entries: Sequence[Entry]) -> None:
        """The same entries may be written again if the answer to a commit is lost. That changes no amount."""
        for first in range(0, len(entries), ROWS_MAX):
            with self._session.transaction() as db:
                for entry in entries[first : first + ROWS_MAX]:
                    statement, values = statement_of(entry, clock.unix_time() + self._ahead_s)
                    texts = {key: value.replace("\0", "") for key, value in values.items() if isinstance(value, str)}
                    db.execute(translated(statement), values | texts)

    def prune(self, before_s: float, rows_max: int) -> int:
        with self._session.transaction() as db:
            deleted = db.execute(translated(PRUNE), (before_s, rows_max))
        return deleted.rowcount

    def close(self) -> None:
        self._session.close()


class PostgresPolicies:
    """The versions of the policy, written in one term."""

    def __init__(self, url: str, term: int) -> None:
        self._session = session_of_term(url, ANSWER_S, term)
        self.name = self._session.name

    def read(self) -> bytes:
        with _as_policy_error(), self._session.transaction() as db:
            row = db.execute("SELECT content FROM policies").fetchone()
        return row[0].encode() if row is not None else b""

    def write(self, content: bytes) -> None:
        with _as_policy_error(), self._session.transaction() as db:
            db.execute("DELETE FROM policies")
            db.execute("INSERT INTO policies VALUES (%s)", (content.decode(),))


@contextmanager
def _as_policy_error() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise PolicyStoreError(str(error)) from error
