"""Responses kept in PostgreSQL (`--database`), so that `previous_response_id` works at any gateway and after restarts.

Only the tenant of a response can find it. Over the bound of all, or over a quarter of it for an organisation, the tenants that
hold most lose their oldest responses. Writes at the same time may go over the bounds, until the next one.

Threads talk to the database. After it has failed, one call at a time tries it again, and the others fail at once.
"""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import psycopg

from gateway.http.errors import ApiError
from gateway.response_store import BYTES_MAX, KeptResponse, cost_bytes
from gateway.shares import FairShare
from runtime.process import clock, log
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.storage.errors import StorageError, StorageUnavailable
from runtime.storage.postgres import PostgresSession, prepare

T = TypeVar("T")
THREADS: Final = 4
CALLS_MAX: Final = 1024  # that run or wait for a thread; a tenant has no more of them than it leaves free
ANSWER_S: Final = 2.0  # of the database, to one transaction
WAIT_S: Final = 3.0  # for a thread, a connection and the answer
RETRY_S: Final = 1.0
TIDY_S: Final = 60.0
_ID_CHARS_MAX: Final = 128
_TIDY_LOCK: Final = 0x74696479
_TABLE: Final = (
    """
    CREATE TABLE responses (
        tenant TEXT NOT NULL,
        response_id TEXT NOT NULL,
        items BYTEA NOT NULL, -- JSON, as `response`
        response BYTEA NOT NULL,
        cost_bytes BIGINT NOT NULL,
        until TIMESTAMPTZ NOT NULL,
        PRIMARY KEY (tenant, response_id)
    )
    """,
    "CREATE INDEX responses_by_end ON responses (until)",
)
_PUT: Final = """
INSERT INTO responses VALUES (%s, %s, %s, %s, %s, now() + %s * interval '1 second') ON CONFLICT DO NOTHING
"""
_OF: Final = "tenant = %s AND response_id = %s AND until > now()"
_HELD: Final = """
SELECT COALESCE(MAX(held), 0)::bigint, COALESCE(SUM(held), 0)::bigint
FROM (SELECT SUM(cost_bytes) AS held FROM responses GROUP BY split_part(tenant, '/', 1)) AS of_organisations
"""
_ORGANISATION: Final = "PARTITION BY split_part(tenant, '/', 1)"
_TRIM: Final = """
DELETE FROM responses USING (
    SELECT tenant, response_id, SUM(cost_bytes) OVER ({group} ORDER BY newer_bytes, until DESC, response_id) AS held
    FROM (
        SELECT tenant, response_id, cost_bytes, until,
            SUM(cost_bytes) OVER (PARTITION BY tenant ORDER BY until DESC, response_id) - cost_bytes AS newer_bytes
        FROM responses
    ) AS of_tenants
) AS ranked
WHERE ranked.held > %s AND responses.tenant = ranked.tenant AND responses.response_id = ranked.response_id
"""


class ResponseTable:
    """Used on the event loop's thread."""

    def __init__(self, url: str, *, keep_s: float, bytes_max: int = BYTES_MAX) -> None:
        """Raises `StorageError` where the URL is not one of libpq."""
        self._keep_s, self._bytes_max = keep_s, bytes_max
        self._idle = [PostgresSession(url, ANSWER_S) for _ in range(THREADS)]
        self._pool = ThreadPoolExecutor(THREADS, "responses")
        self._is_prepared = False
        self._calls = FairShare(CALLS_MAX)
        self._failing = ""  # why, since the last failure
        self._again_s = 0.0
        self._warn = RateLimitedLog(log.get("crossdock.gateway.responses").warning)

    async def put(self, tenant: str, response_id: str, items: bytes, response: bytes) -> None:
        """Store a response, unless it is too large or the database fails."""
        cost = cost_bytes(items, response)
        if cost > self._bytes_max // 4:
            return

        def work(db: psycopg.Connection) -> None:
            db.execute(_PUT, (tenant, response_id, items, response, cost, self._keep_s))
            self._tidy(db)

        try:
            await self._call(tenant, work)
        except StorageError as error:
            self._warn("a response is not kept", error=str(error))

    async def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Raises `ApiError` (503) where the database fails."""

        def work(db: psycopg.Connection) -> Any:
            query = f"SELECT items, response FROM responses WHERE {_OF}"
            return db.execute(query, (tenant, response_id), binary=True).fetchone()

        row = await self._found(tenant, work) if _may_be(response_id) else None
        return None if row is None else KeptResponse(row[0], row[1], math.inf)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Raises `ApiError` (503) where the database fails."""

        def work(db: psycopg.Connection) -> bool:
            query = f"DELETE FROM responses WHERE {_OF} RETURNING 1"
            return db.execute(query, (tenant, response_id)).fetchone() is not None

        return _may_be(response_id) and await self._found(tenant, work)

    async def run(self) -> None:
        """Delete what is over its time, until cancelled."""
        while True:
            try:
                await self._call("", self._tidy)
            except StorageError as error:
                self._warn("the database cannot be used", error=str(error))
            await asyncio.sleep(TIDY_S)

    def close(self) -> None:
        """Calls that have begun go on for a short time."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for session in list(self._idle):
            session.close()

    async def _found(self, tenant: str, work: Callable[[psycopg.Connection], T]) -> T:
        try:
            return await self._call(tenant, work)
        except StorageError as error:
            self._warn("kept responses cannot be read", error=str(error))
            message = "Kept responses cannot be read now. Try again, or send the conversation's items as 'input'."
            raise ApiError(503, message, code="storage_unavailable", retry_after_s=2 * RETRY_S) from None

    async def _call(self, tenant: str, work: Callable[[psycopg.Connection], T]) -> T:
        """The result of `work`, from a thread. Raises `StorageError`."""
        if self._failing and (self._calls.held or clock.now() < self._again_s):
            raise StorageUnavailable(self._failing)
        if not self._calls.take(tenant):
            raise StorageUnavailable(f"{self._calls.held} calls wait for the database")
        job = self._pool.submit(self._run, work)
        running = asyncio.wrap_future(job)
        running.add_done_callback(partial(self._ended, tenant))
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(running)
        except TimeoutError:
            self._failed(f"no answer within {WAIT_S:.0f} s")
            raise StorageUnavailable(self._failing) from None
        finally:
            job.cancel()  # if it has not begun

    def _ended(self, tenant: str, running: "asyncio.Future[Any]") -> None:
        self._calls.give_back(tenant)
        if running.cancelled():
            return
        error = running.exception()
        if isinstance(error, StorageError):
            self._failed(str(error))
        elif error is None:
            self._failing = ""

    def _failed(self, why: str) -> None:
        self._failing, self._again_s = why, clock.now() + RETRY_S

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[psycopg.Connection], T]) -> T:
        session, again_until = self._idle.pop(), clock.now() + ANSWER_S / 2
        try:
            return self._once(session, work)
        except StorageUnavailable:  # at once, if the connection is from before a restart of the database
            if clock.now() > again_until:
                raise
            return self._once(session, work)
        finally:
            self._idle.append(session)

    def _once(self, session: PostgresSession, work: Callable[[psycopg.Connection], T]) -> T:
        try:
            with session.transaction() as db:
                if not self._is_prepared:
                    prepare(db, "responses", _TABLE)
                done = work(db)
        except StorageError:
            self._is_prepared = False
            raise
        self._is_prepared = True
        return done

    def _tidy(self, db: psycopg.Connection) -> None:
        """Delete what is over its time or over the bounds, unless another session is at it."""
        [[is_mine]] = db.execute("SELECT pg_try_advisory_xact_lock(%s)", (_TIDY_LOCK,)).fetchall()
        if not is_mine:
            return
        db.execute("DELETE FROM responses WHERE until <= now()")
        [[of_one, of_all]] = db.execute(_HELD).fetchall()
        if of_one > self._bytes_max // 4:
            db.execute(_TRIM.format(group=_ORGANISATION), (self._bytes_max // 4,))
        if of_all > self._bytes_max:
            db.execute(_TRIM.format(group=""), (self._bytes_max,))


def _may_be(response_id: str) -> bool:
    """PostgreSQL takes no text with a NUL, nor half of a surrogate pair."""
    return len(response_id) <= _ID_CHARS_MAX and response_id.isascii() and response_id.isprintable()
