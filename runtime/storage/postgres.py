"""Sessions with PostgreSQL, and crossdock's schema there. Imported only with `--database`, since psycopg comes with an extra.

**Bounded waits.** The server ends statements that are too slow. A timer shuts the connection down when no answer comes, for
which libpq has no limit.
"""

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.types.numeric import Int8Dumper

from runtime.storage.errors import StorageError, StorageUnavailable

CONNECT_S: Final = 2  # the least that libpq takes
_READ_ONLY: Final = "25006"  # SQLSTATE, as after a failover
_SESSION: Final = (
    "-c search_path=crossdock -c statement_timeout=8s -c lock_timeout=1s -c idle_in_transaction_session_timeout=8s"
)
_PREPARE_LOCK: Final = 0x63726F73  # processes that start at the same time create tables one after the other


class PostgresSession:
    """One connection, which is made when it is needed, and again after an error."""

    def __init__(self, url: str, answer_s: float, name: str = "crossdock", check: str = "") -> None:
        """`check`: a statement that begins each transaction. Raises `StorageError` where the URL is not one of libpq."""
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise StorageError(str(error)) from None
        self.name = f"postgresql://{given.get('host', '')}/{given.get('dbname', '')}"
        self._parameters: dict[str, Any] = {
            "connect_timeout": CONNECT_S,
            "tcp_user_timeout": int(1000 * answer_s),
            "keepalives_idle": 1,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            **given,
            "application_name": name,
            "options": f"{given.get('options', '')} {_SESSION}",
        }
        self._answer_s, self._check = answer_s, check
        self._connection: psycopg.Connection | None = None
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """Statements are sent without waiting for each other's results. Raises `StorageUnavailable` if another try may succeed,
        otherwise `StorageError`."""
        with self._lock:
            try:
                connection = self._connect()
                with self._bounded(connection), connection.pipeline(), connection.transaction():
                    if self._check:
                        connection.execute(self._check)
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


def _failure(error: psycopg.Error) -> StorageError:
    why = str(error).partition("\n")[0] or type(error).__name__
    passing = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or error.sqlstate == _READ_ONLY
    return (StorageUnavailable if passing else StorageError)(why)


def prepare(db: psycopg.Connection, table: str, statements: Iterable[str]) -> None:
    """Run the statements, which make `table`, in the schema `crossdock`, unless the table is there."""
    db.execute("SELECT pg_advisory_xact_lock(%s)", (_PREPARE_LOCK,))
    if db.execute("SELECT 1 WHERE to_regclass(%s) IS NOT NULL", (f"crossdock.{table}",)).fetchone():
        return
    for statement in ("CREATE SCHEMA IF NOT EXISTS crossdock", *statements):
        if statement.strip():
            db.execute(statement)
