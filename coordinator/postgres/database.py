"""Usage ledger and policies in PostgreSQL, in the schema `crossdock`. Imported only with `--database`.

Each transaction that writes is fenced by its term (`runtime.lease.lease_table`). So when a new leader reads the ledger,
everything that earlier leaders wrote is there, and nothing can be added.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final

from coordinator.accounting.billing import Entry, Past
from coordinator.accounting.past import OPEN_MAX, RECENT_MAX, RECENT_S, day_text, past_of
from coordinator.accounting.statements import LAST_MINUTE, OF_DAY, PRUNE, READ_OPEN, SCHEMA, VERSION, statement_of
from coordinator.policy_keeper import PolicyStoreError
from runtime.lease.lease_table import SESSIONS, LeaseTable
from runtime.process import clock
from runtime.storage.errors import StorageError
from runtime.storage.postgres import PostgresSession

ANSWER_S: Final = 10.0
ROWS_MAX: Final = 512  # in one transaction, which the next leader may wait for
_DIALECT: Final = {
    "?": "%s",
    "MAX(": "GREATEST(",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    " WITHOUT ROWID": "",
}
_TABLES: Final = (
    "CREATE TABLE policies (content TEXT NOT NULL)",
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


def lease_table(url: str) -> LeaseTable:
    """Raises `StorageError` where the URL is not one of libpq."""
    return LeaseTable(url, (*translated(SCHEMA).split(";"), *_TABLES), VERSION)


def session_of_term(url: str, answer_s: float, term: int) -> PostgresSession:
    """A transaction fails if this is not the term of the lease until its end."""
    return PostgresSession(url, answer_s, f"{SESSIONS} {term}", f"SELECT check_term({term:d})")


class PostgresStore:
    """The rows of the usage ledger, written in one term."""

    def __init__(self, url: str, term: int) -> None:
        self._session = session_of_term(url, ANSWER_S, term)
        self.name = self._session.name
        self._ahead_s = 0.0  # the server's clock; it counts, since leaders on several hosts write times

    def open(self) -> None: ...

    def read(self, today: int) -> tuple[Past, int]:
        with self._session.transaction() as db:
            [[epoch]] = db.execute("SELECT extract(epoch FROM clock_timestamp())").fetchall()
            unix_s = float(epoch)
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
