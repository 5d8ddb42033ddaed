"""The SQLite file of uploaded files, batches and results, and the two threads that use it: one writes, one reads.

A commit is on disk when it returns (`synchronous=FULL`). So everything confirmed to a client survives kill -9 and a loss of
power. Several gateways of one host may use the same file; SQLite's own locks keep their transactions apart.

The gateway that holds the lock on `FILE.lock` runs the batches. The kernel frees the lock when its holder ends in any way.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from filelock import FileLock

from gateway.batches.store import SCHEMA, VERSION, Database, Work
from runtime.process import clock
from runtime.storage.errors import StorageError
from runtime.storage.lock_file import is_at, lock_of, network_file_system, open_lock
from runtime.storage.private_file import make_private

P = ParamSpec("P")
T = TypeVar("T")
_BUSY_TIMEOUT_S: Final = 10.0
SOON_S: Final = 2.0  # A client's request waits so long for its turn at the file


class RunnerLock:
    def __init__(self, store_path: str) -> None:
        self._path = lock_of(store_path)
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether this process holds the lock now. Raises `OSError`."""
        if self._descriptor is not None:
            if is_at(self._descriptor, self._path):
                return True
            self.give_up()  # the file was removed, and another process may have a new one
        descriptor = open_lock(self._path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def give_up(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SqliteBatchStore:
    """See `BatchStore`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._db: sqlite3.Connection | None = None
        self._reading_db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reading_thread = ThreadPoolExecutor(1, "batches-read")
        self._lock = RunnerLock(str(self.path))
        # A lock is lost only where its file is removed, and `lead` finds that out.
        self.on_lost: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Raises `StorageError`."""
        await self._call(self._thread, self._open)

    async def close(self) -> None:
        """Transactions that have begun are finished first."""
        await self._call(self._reading_thread, self._close_reading)
        await self._call(self._thread, self._close)

    async def write(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        return await self._call(self._thread, partial(self._write, lambda db: work(db, *args, **kw), None))

    async def write_soon(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Raises `StorageError` also if the transaction has not begun after `SOON_S`: the file is locked, or an
        earlier transaction waits for the disk."""
        writing = partial(self._write, lambda db: work(db, *args, **kw), clock.now() + SOON_S)
        return await self._call(self._thread, writing, SOON_S)

    async def read(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        return await self._call(self._reading_thread, partial(self._read, lambda db: work(db, *args, **kw)))

    async def lead(self) -> int:
        try:
            return int(self._lock.take())
        except OSError as error:
            raise StorageError(str(error)) from None

    async def give_up(self) -> None:
        self._lock.give_up()

    async def _call(self, thread: ThreadPoolExecutor, work: Callable[[], T], begin_s: float | None = None) -> T:
        job = thread.submit(work)
        waiting = asyncio.wrap_future(job)
        try:
            await asyncio.wait({waiting}, timeout=begin_s)
            if job.cancel():  # it has not begun
                raise StorageError(f"{self.path}: earlier transactions take longer than {SOON_S:.0f} s")
            return await waiting
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"{self.path}: {error}") from None
        finally:
            waiting.cancel()

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        make_private(self.path)
        if kind := network_file_system(self.path.resolve().parent):
            raise StorageError(f"{self.path} is on {kind}, a network file system, whose locks may be lost")
        # One process at a time: if two change a file to WAL at once, they fail, and SQLite's own wait for locks does not help.
        with FileLock(f"{self.path}.opening", timeout=_BUSY_TIMEOUT_S, mode=0o600):
            self._db = self._prepared()
        # Made here, and used on the other thread only.
        self._reading_db = sqlite3.connect(self.path, timeout=SOON_S, isolation_level=None, check_same_thread=False)
        self._reading_db.execute("PRAGMA query_only = 1")

    def _prepared(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise StorageError(f"{self.path}: it is of version {version}, this program writes version {VERSION}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _close_reading(self) -> None:
        if self._reading_db is not None:
            self._reading_db.close()
            self._reading_db = None

    def _write(self, work: Callable[[Database], T], begin_by: float | None) -> T:
        db = self._open_one(self._db)
        patience_s = _BUSY_TIMEOUT_S if begin_by is None else max(begin_by - clock.now(), 0.0)
        db.execute(f"PRAGMA busy_timeout = {round(1000 * patience_s)}")
        return _in_transaction(db, "BEGIN IMMEDIATE", work)

    def _read(self, work: Callable[[Database], T]) -> T:
        return _in_transaction(self._open_one(self._reading_db), "BEGIN", work)

    def _open_one(self, db: sqlite3.Connection | None) -> sqlite3.Connection:
        if db is None:
            raise StorageError(f"{self.path}: it is closed")
        return db


def _in_transaction(db: sqlite3.Connection, begin: str, work: Callable[[Database], T]) -> T:
    db.execute(begin)
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # an error like a full disk has undone it already
            db.execute("ROLLBACK")
        raise
    return result
