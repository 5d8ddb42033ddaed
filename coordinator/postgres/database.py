"""Lease, usage ledger and policies in PostgreSQL, in the schema `crossdock`. Imported only with `--database`.

**Fencing.** Each transaction that writes first takes a shared lock on the lease's row, if its term is still the one in which
this coordinator leads (`check_term`); else PostgreSQL refuses the transaction. A new leader changes the term, which waits for
these locks. So when it reads the ledger, everything that earlier leaders wrote is there, and nothing can be added. Renewals
change no key of the row; so they do not wait for the ledger's transactions, nor these for them.

**Bounded waits.** A host that stands still or is cut off may hold its lock for hours. So a new leader first ends
the sessions of the term before. The server ends statements that are too slow. A timer shuts the connection down when no answer
comes, for which libpq has no limit.
"""

import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import psycopg
from psycopg.types.numeric import Int8Dumper

from coordinator.accounting.billing import Entry, Past
from coordinator.accounting.ledger import LedgerError, StorageUnavailable
from coordinator.accounting.past import OPEN_MAX, RECENT_MAX, RECENT_S, day_text, past_of
from coordinator.accounting.statements import LAST_MINUTE, OF_DAY, PRUNE, READ_OPEN, SCHEMA, VERSION, statement_of
from coordinator.policy_keeper import PolicyStoreError
from coordinator.postgres.lease import LeaseRow
from runtime.process import clock

CONNECT_S: Final = 2  # the least that libpq takes
LEASE_ANSWER_S: Final = 1.0
ANSWER_S: Final = 10.0
ROWS_MAX: Final = 512  # in one transaction, which the next leader may wait for
_READ_ONLY: Final = "25006"  # SQLSTATE, as after a failover
_SESSION: Final = "-c search_path=crossdock -c statement_timeout=8s -c lock_timeout=1s"
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
_PREPARE_LOCK: Final = 0x63726F73  # coordinators that start at the same time create the tables one after the other
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
)


@cache
def translated(statement: str) -> str:
    for theirs, ours in _DIALECT.items():
        statement = statement.replace(theirs, ours)
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def _session_name(term: int | None) -> str:
    return "crossdock" if term is None else f"crossdock term {term}"


class PostgresSession:
    """One connection, which is made when it is needed, and again after an error."""

    def __init__(self, url: str, answer_s: float, term: int | None = None) -> None:
        """`term`: a transaction fails if this is not the term of the lease until its end. Raises `LedgerError` where the URL
        is not one of libpq."""
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise LedgerError(str(error)) from None
        self.name = f"postgresql://{given.get('host', '')}/{given.get('dbname', '')}"
        self._parameters: dict[str, Any] = {
            "connect_timeout": CONNECT_S,
            "tcp_user_timeout": int(1000 * answer_s),
            "keepalives_idle": 1,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            **given,
            "application_name": _session_name(term),
            "options": f"{given.get('options', '')} {_SESSION}",
        }
        self._answer_s, self._term = answer_s, term
        self._connection: psycopg.Connection | None = None
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """Statements are sent without waiting for each other's results. Raises `StorageUnavailable` if another try may succeed,
        otherwise `LedgerError`."""
        with self._lock:
            try:
                connection = self._connect()
                with self._bounded(connection), connection.pipeline(), connection.transaction():
                    if self._term is not None:
                        connection.execute("SELECT check_term(%s)", (self._term,))
                    yield connection
            except psycopg.Error as error:
                self._close()
                raise _failure(error) from error

    def close(self) -> None:
        with self._lock:
            self._close()

    def _connect(self) -> psycopg.Connection:
        if self._connection is None:
            self._connection = psycopg.connect(**self._parameters, autocommit=True)
            self._connection.adapters.register_dumper(int, Int8Dumper)  # sums of smaller types would overflow
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _bounded(self, connection: psycopg.Connection) -> Iterator[None]:
        timer = threading.Timer(self._answer_s, _shut_down, (connection,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut_down(connection: psycopg.Connection) -> None:
    """Wake the thread that waits for an answer of this connection."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        pass  # it has just been closed


def _failure(error: psycopg.Error) -> LedgerError:
    why = str(error).partition("\n")[0] or type(error).__name__
    passing = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or error.sqlstate == _READ_ONLY
    return (StorageUnavailable if passing else LedgerError)(why)


class LeaseTable:
    """Reads and changes the lease's row; makes all tables at the first use. Each method may raise `LedgerError`."""

    def __init__(self, url: str) -> None:
        self._session = PostgresSession(url, LEASE_ANSWER_S)
        self.name = self._session.name
        self._is_prepared = False

    def read(self) -> LeaseRow:
        with self._session.transaction() as db:
            if not self._is_prepared:
                _prepare(db)
            term, renewals, holder, version = _row(db.execute("SELECT term, renewals, holder, version FROM lease"))
        if version != VERSION:
            raise LedgerError(f"its tables are of version {version}, this program writes version {VERSION}")
        self._is_prepared = True
        return LeaseRow(term, renewals, holder)

    def take(self, row: LeaseRow, holder: str) -> bool:
        """Begin the next term, unless the row has changed meanwhile."""
        self._change(_END_SESSIONS, (_session_name(row.term),))
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


def _prepare(db: psycopg.Connection) -> None:
    db.execute("SELECT pg_advisory_xact_lock(%s)", (_PREPARE_LOCK,))
    if _row(db.execute("SELECT to_regclass('crossdock.lease') IS NOT NULL"))[0]:
        return
    for statement in ("CREATE SCHEMA IF NOT EXISTS crossdock", *translated(SCHEMA).split(";"), *_TABLES):
        if statement.strip():
            db.execute(statement)
    db.execute("INSERT INTO lease VALUES (0, 0, '', %s)", (VERSION,))


def _row(cursor: psycopg.Cursor[Any]) -> Any:
    row = cursor.fetchone()
    if row is None:
        raise LedgerError("the table of the lease is empty")
    return row


class PostgresStore:
    """The rows of the usage ledger, written in one term."""

    def __init__(self, url: str, term: int) -> None:
        self._session = PostgresSession(url, ANSWER_S, term)
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
        self._session = PostgresSession(url, ANSWER_S, term)
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
    except LedgerError as error:
        raise PolicyStoreError(str(error)) from error
