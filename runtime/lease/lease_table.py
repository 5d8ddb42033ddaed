"""The row of a lease in PostgreSQL. Imported only with `--database`.

**Fencing.** Each transaction that writes first takes a shared lock on the lease's row, if its term is still the one in which
this process leads (`check_term`); else PostgreSQL refuses the transaction. A new leader changes the term, which waits for these
locks. So it finds everything that earlier leaders wrote, and nothing can be added. Renewals change no key of the row; so they
do not wait for transactions, nor these for them.

**Bounded waits.** A host that stands still or is cut off may hold its lock for hours. So a new leader first ends the sessions
of the term before, which it knows by their name.
"""

from collections.abc import Sequence
from typing import Final

from runtime.lease.lease import LeaseRow
from runtime.storage.errors import StorageError
from runtime.storage.postgres import PostgresSession, prepare

ANSWER_S: Final = 1.0
SESSIONS: Final = "crossdock term"  # The name of a leader's sessions, before the number of the term
_END_SESSIONS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = %s AND usename = current_user AND datname = current_database()
"""
_TABLE: Final = """
CREATE TABLE {lease} (
    term BIGINT PRIMARY KEY,
    renewals BIGINT NOT NULL,
    holder TEXT NOT NULL,
    version BIGINT NOT NULL -- of the tables that are written in its terms
)
"""
_CHECK: Final = """
CREATE FUNCTION {check}(wanted BIGINT) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
    PERFORM FROM crossdock.{lease} WHERE term = wanted FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'term % is over: another process leads', wanted USING ERRCODE = 'CD001';
    END IF;
END $$
"""


def lease_statements(lease: str, check: str, version: int) -> tuple[str, ...]:
    """Make the table of a lease and the function that checks a term of it."""
    first = f"INSERT INTO {lease} VALUES (0, 0, '', {version:d})"
    return _TABLE.format(lease=lease), _CHECK.format(lease=lease, check=check), first


class LeaseTable:
    """Reads and changes the lease's row; makes all tables at the first use. Each method may raise `StorageError`."""

    def __init__(
        self,
        url: str,
        tables: Sequence[str],
        version: int,
        *,
        lease: str = "lease",
        check: str = "check_term",
        sessions: str = SESSIONS,
    ) -> None:
        """`tables`: statements that make the tables that are written in terms of this lease."""
        self._session = PostgresSession(url, ANSWER_S)
        self.name = self._session.name
        self.statements = (*tables, *lease_statements(lease, check, version))
        self._lease, self._sessions, self._version = lease, sessions, version
        self._is_prepared = False

    def read(self) -> LeaseRow:
        with self._session.transaction() as db:
            if not self._is_prepared:
                prepare(db, self._lease, self.statements)
            rows = db.execute(f"SELECT term, renewals, holder, version FROM {self._lease}").fetchall()
        if not rows:
            raise StorageError("the table of the lease is empty")
        [(term, renewals, holder, version)] = rows
        if version != self._version:
            raise StorageError(f"its tables are of version {version}, this program writes version {self._version}")
        self._is_prepared = True
        return LeaseRow(term, renewals, holder)

    def take(self, row: LeaseRow, holder: str) -> bool:
        """Begin the next term, unless the row has changed meanwhile."""
        self._change(_END_SESSIONS, (f"{self._sessions} {row.term}",))
        return self._change(
            f"UPDATE {self._lease} SET term = term + 1, renewals = 0, holder = %s"
            " WHERE term = %s AND renewals = %s AND holder = %s",
            (holder, *row),
        )

    def renew(self, term: int) -> bool:
        return self._change(f"UPDATE {self._lease} SET renewals = renewals + 1 WHERE term = %s", (term,))

    def release(self, term: int) -> bool:
        return self._change(f"UPDATE {self._lease} SET holder = '' WHERE term = %s", (term,))

    def close(self) -> None:
        self._session.close()

    def _change(self, statement: str, values: Sequence[object]) -> bool:
        with self._session.transaction() as db:
            changed = db.execute(statement, values)
        return changed.rowcount == 1
