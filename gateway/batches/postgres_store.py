"""Files, batches and results in PostgreSQL (`--database`), for gateways on any hosts. Imported only with `--database`.

The gateway that holds a lease runs the batches, and the database refuses what the one before still writes. Transactions that
write wait for each other, as in SQLite. One that stands still holds the others up until the server ends it.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import psycopg

from gateway.batches.store import SCHEMA, VERSION, Database, Work
from gateway.postgres_pool import RETRY_S, PostgresPool
from runtime.lease.held_lease import HeldLease
from runtime.lease.lease_table import LeaseTable
from runtime.process import clock
from runtime.storage.errors import StorageUnavailable

P = ParamSpec("P")
T = TypeVar("T")
LEASE_S: Final = 10.0
ANSWER_S: Final = 10.0  # to one transaction that writes, like the deletion of a large file
SOON_S: Final = 5.0  # for a client's turn to write, and what it writes
_READERS: Final = 2
_DIALECT: Final = {"INTEGER": "BIGINT", "BLOB": "BYTEA", "TEXT": 'TEXT COLLATE "C"'}
_SESSIONS: Final = "crossdock batches term"
_WRITE_LOCK: Final = 0x62617463
_WRITE: Final = "SELECT pg_advisory_xact_lock(%s)"
_WRITE_IN_TERM: Final = """
SELECT set_config('application_name', %s, true), pg_advisory_xact_lock(%s), check_batch_term(%s)
"""


class PostgresBatchStore:
    """See `BatchStore`."""

    def __init__(self, url: str, holder: str) -> None:
        """Raises `StorageError` where the URL is not one of libpq."""
        lease = LeaseTable(url, _tables(), VERSION, lease="batch_lease", check="check_batch_term", sessions=_SESSIONS)
        self._reading = PostgresPool(url, "batch_lease", lease.statements, threads=_READERS)
        self._writing = PostgresPool(url, "batch_lease", lease.statements, threads=1, answer_s=ANSWER_S)
        self._lease = HeldLease(lease, holder, lambda: self.on_lost(), lease_s=LEASE_S)
        self._close_lease = lease.close
        self.on_lost: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """The database may be away now."""

    async def close(self) -> None:
        self._reading.close()
        self._writing.close()
        self._close_lease()

    async def read(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        return await self._reading.call("", lambda db: work(_Connection(db), *args, **kw))

    async def write_soon(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        def writing(db: psycopg.Connection) -> T:
            db.execute(_WRITE, (_WRITE_LOCK,))
            return work(_Connection(db), *args, **kw)

        return await self._writing.call("", writing, SOON_S)

    async def write(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Waits for the database, for the time of a lease. Where the answer to a commit was lost, `work` runs again."""
        term, until = self._lease.term, clock.now() + LEASE_S

        def writing(db: psycopg.Connection) -> T:
            db.execute(_WRITE_IN_TERM, (f"{_SESSIONS} {term}", _WRITE_LOCK, term))
            return work(_Connection(db), *args, **kw)

        while True:
            try:
                return await self._writing.call("", writing, ANSWER_S + RETRY_S)
            except StorageUnavailable:
                if clock.now() >= until:
                    raise
            await asyncio.sleep(RETRY_S)

    async def lead(self) -> int:
        return self._lease.term if self._lease.is_held(clock.now()) or await self._lease.take() else 0

    async def give_up(self) -> None:
        await self._lease.give_up()


class _Connection(Database):
    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return _Cursor(self._db).execute(_marked(statement), _texts(values), binary=True)

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        _Cursor(self._db).executemany(_marked(statement), map(_texts, rows))


class _Cursor(psycopg.Cursor[Any]):
    @property
    def rowcount(self) -> int:
        with self.connection.pipeline():
            pass  # its end waits for answers that the connection has not waited for
        return super().rowcount


def _marked(statement: str) -> Any:
    return statement.replace("?", "%s")


def _texts(values: Sequence[Any]) -> list[Any]:
    """PostgreSQL takes no text with a NUL, nor half of a surrogate pair."""
    odd = "\N{REPLACEMENT CHARACTER}"
    return [
        value.encode("utf-8", "replace").decode().replace("\0", odd) if isinstance(value, str) else value
        for value in values
    ]


def _tables() -> list[str]:
    """One statement for each table and index."""
    schema = re.sub(r"--.*", "", SCHEMA)
    for theirs, ours in _DIALECT.items():
        schema = schema.replace(theirs, ours)
    return schema.split(";")
