"""The SQLite file of uploaded files, batches and results, and the two threads that use it: one writes, one reads.

A commit is on disk when it returns (`synchronous=FULL`). So everything confirmed to a client survives kill -9 and a loss of
power. Several gateways of one host may use the same file; SQLite's own locks keep their transactions apart.
"""

import asyncio
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from filelock import FileLock
from starlette.requests import Request

from gateway.http.errors import ApiError
from proto.errors import CrossdockError
from runtime.process import clock
from runtime.storage.lock_file import network_file_system
from runtime.storage.private_file import make_private

P = ParamSpec("P")
T = TypeVar("T")
_BUSY_TIMEOUT_S: Final = 10.0
DAY_S: Final = 86_400
FILE_BYTES_MAX: Final = 64 << 20
SOON_S: Final = 2.0  # A client's request waits so long for its turn at the file
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,        -- in the order of creation, as those of batches
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    is_ready INTEGER NOT NULL,  -- 0: still being uploaded, or the results of a batch that has not ended
    batch_id TEXT,              -- of the batch whose results these are; NULL: uploaded
    is_errors INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    created_s INTEGER NOT NULL, -- Unix time, as all of these
    expires_s INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, id, bytes);
CREATE INDEX IF NOT EXISTS files_by_end ON files (expires_s);
CREATE TABLE IF NOT EXISTS lines (
    file_id TEXT NOT NULL,
    number INTEGER NOT NULL,    -- from 1
    is_request INTEGER NOT NULL, -- 0: blank
    data BLOB NOT NULL,         -- with its end of line
    PRIMARY KEY (file_id, number)
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    status TEXT NOT NULL,
    metadata BLOB NOT NULL,     -- JSON, as errors
    errors BLOB NOT NULL DEFAULT 'null',
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    started_s INTEGER,
    cancelling_s INTEGER,
    ended_s INTEGER,
    keep_s INTEGER NOT NULL,    -- how long its results are kept
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT,
    error_file_id TEXT
);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, id);
CREATE INDEX IF NOT EXISTS batches_open ON batches (tenant, id) WHERE ended_s IS NULL;
CREATE TABLE IF NOT EXISTS results (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,    -- of the line that it answers
    is_error INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (batch_id, number) -- a line has one result, however often it is computed
);
"""


class StoreError(CrossdockError):
    """The file cannot be opened, read or written; `str()` has its path."""


class Store:
    """Used on the event loop's thread. Each call is one transaction."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._db: sqlite3.Connection | None = None
        self._reading_db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reading_thread = ThreadPoolExecutor(1, "batches-read")

    async def open(self) -> None:
        """Raises `StoreError`."""
        await self._call(self._thread, self._open)

    async def close(self) -> None:
        """Transactions that have begun are finished first."""
        await self._call(self._reading_thread, self._close_reading)
        await self._call(self._thread, self._close)

    async def write(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kw: P.kwargs) -> T:
        """The result of `work`, in a transaction that is undone if it raises. Raises `StoreError`."""
        return await self._call(self._thread, partial(self._write, lambda db: work(db, *args, **kw), None))

    async def write_soon(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kw: P.kwargs
    ) -> T:
        """As `write`. Raises `StoreError` also if the transaction has not begun after `SOON_S`: the file is locked, or an
        earlier transaction waits for the disk."""
        writing = partial(self._write, lambda db: work(db, *args, **kw), clock.now() + SOON_S)
        return await self._call(self._thread, writing, SOON_S)

    async def read(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kw: P.kwargs) -> T:
        """The result of `work`, which changes nothing. It waits for no transaction that writes. Raises `StoreError`."""
        return await self._call(self._reading_thread, partial(self._read, lambda db: work(db, *args, **kw)))

    async def _call(self, thread: ThreadPoolExecutor, work: Callable[[], T], begin_s: float | None = None) -> T:
        job = thread.submit(work)
        waiting = asyncio.wrap_future(job)
        try:
            await asyncio.wait({waiting}, timeout=begin_s)
            if job.cancel():  # it has not begun
                raise StoreError(f"{self.path}: earlier transactions take longer than {SOON_S:.0f} s")
            return await waiting
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: {error}") from None
        finally:
            waiting.cancel()

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        make_private(self.path)
        if kind := network_file_system(self.path.resolve().parent):
            raise StoreError(f"{self.path} is on {kind}, a network file system, whose locks may be lost")
        # One process at a time: if two change a file to WAL at once, they fail, and SQLite's own wait for locks does not help.
        with FileLock(f"{self.path}.opening", timeout=_BUSY_TIMEOUT_S, mode=0o600):
            self._db = self._prepared()
        # Made here, and used on the other thread only.
        self._reading_db = sqlite3.connect(self.path, timeout=SOON_S, isolation_level=None, check_same_thread=False)
        self._reading_db.row_factory = sqlite3.Row
        self._reading_db.execute("PRAGMA query_only = 1")

    def _prepared(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise StoreError(f"{self.path}: it is of version {version}, this program writes version {_VERSION}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT")
        except BaseException:
            db.close()
            raise
        db.row_factory = sqlite3.Row
        return db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _close_reading(self) -> None:
        if self._reading_db is not None:
            self._reading_db.close()
            self._reading_db = None

    def _write(self, work: Callable[[sqlite3.Connection], T], begin_by: float | None) -> T:
        db = self._open_one(self._db)
        patience_s = _BUSY_TIMEOUT_S if begin_by is None else max(begin_by - clock.now(), 0.0)
        db.execute(f"PRAGMA busy_timeout = {round(1000 * patience_s)}")
        return _in_transaction(db, "BEGIN IMMEDIATE", work)

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return _in_transaction(self._open_one(self._reading_db), "BEGIN", work)

    def _open_one(self, db: sqlite3.Connection | None) -> sqlite3.Connection:
        if db is None:
            raise StoreError(f"{self.path}: it is closed")
        return db


def _in_transaction(db: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
    db.execute(begin)
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # an error like a full disk has undone it already
            db.execute("ROLLBACK")
        raise
    return result


def new_id(now: float) -> str:
    """Returns a new id. Later ids are greater, and ids cannot be guessed."""
    return f"{int(now * 1000):012x}{secrets.token_hex(8)}"


def insert(db: sqlite3.Connection, table: str, **values: Any) -> None:
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()])


@dataclass
class BatchService:
    store: Store
    file_bytes_max: int
    tenant_bytes_max: int  # Bytes of all files and results of one tenant, with what each file and batch counts beside
    keep_s: int
    wake: Callable[[], None] = lambda: None  # Told when there is something new for the runner


def service_of(request: Request) -> BatchService:
    """Raises `ApiError` (404) where this gateway has none."""
    service = request.app.state.batches
    if not isinstance(service, BatchService):
        message = "This gateway keeps no files and batches: it was started without --batch-db."
        raise ApiError(404, message, code="batches_not_enabled")
    return service
