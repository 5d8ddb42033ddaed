"""Threads that talk to PostgreSQL (`--database`), each with a connection. Imported only with `--database`.

After the database has failed, one call at a time tries it again, and the others fail at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import psycopg

from gateway.shares import FairShare
from runtime.process import clock
from runtime.storage.errors import StorageError, StorageUnavailable
from runtime.storage.postgres import PostgresSession, prepare

T = TypeVar("T")
CALLS_MAX: Final = 1024  # that run or wait for a thread; a tenant has no more of them than it leaves free
ANSWER_S: Final = 2.0  # of the database, to one transaction
WAIT_S: Final = 3.0  # for a thread, a connection and the answer
RETRY_S: Final = 1.0


class PostgresPool:
    """Used on the event loop's thread."""

    def __init__(
        self, url: str, table: str, statements: Sequence[str], *, threads: int, answer_s: float | None = None
    ) -> None:
        """`statements` make `table`, and what belongs to it, where it is missing. Raises `StorageError` where the URL is not
        one of libpq."""
        self._table, self._statements = table, statements
        self._answer_s = ANSWER_S if answer_s is None else answer_s
        self._idle = [PostgresSession(url, self._answer_s) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, table)
        self._is_prepared = False
        self._calls = FairShare(CALLS_MAX)
        self._failing = ""  # why, since the last failure
        self._again_s = 0.0

    async def call(self, tenant: str, work: Callable[[psycopg.Connection], T], wait_s: float | None = None) -> T:
        """The result of `work`, which runs in one transaction on a thread. Raises `StorageError`, also after `wait_s`."""
        wait_s = WAIT_S if wait_s is None else wait_s
        if self._failing and (self._calls.held or clock.now() < self._again_s):
            raise StorageUnavailable(self._failing)
        if not self._calls.take(tenant):
            raise StorageUnavailable(f"{self._calls.held} calls wait for the database")
        job = self._pool.submit(self._run, work)
        running = asyncio.wrap_future(job)
        running.add_done_callback(partial(self._ended, tenant))
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(running)
        except TimeoutError:
            self._failed(f"no answer within {wait_s:.0f} s")
            raise StorageUnavailable(self._failing) from None
        finally:
            job.cancel()  # if it has not begun

    def close(self) -> None:
        """Calls that have begun go on for a short time."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for session in list(self._idle):
            session.close()

    def _ended(self, tenant: str, running: "asyncio.Future[Any]") -> None:
        self._calls.give_back(tenant)
        if running.cancelled():
            return
        error = running.exception()
        if isinstance(error, StorageUnavailable):
            self._failed(str(error))
        else:  # the database has answered
            self._failing = ""

    def _failed(self, why: str) -> None:
        self._failing, self._again_s = why, clock.now() + RETRY_S

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[psycopg.Connection], T]) -> T:
        session, again_until = self._idle.pop(), clock.now() + self._answer_s / 2
        ended: list[T] = []
        try:
            return self._once(session, work, ended)
        except StorageUnavailable:  # at once, if the connection is from before a restart of the database
            if ended or clock.now() > again_until:  # it may have been committed
                raise
            return self._once(session, work, ended)
        finally:
            self._idle.append(session)

    def _once(self, session: PostgresSession, work: Callable[[psycopg.Connection], T], ended: list[T]) -> T:
        try:
            with session.transaction() as db:
                if not self._is_prepared:
                    prepare(db, self._table, self._statements)
                done = work(db)
                ended.append(done)
        except StorageError:
            self._is_prepared = False
            raise
        self._is_prepared = True
        return done
