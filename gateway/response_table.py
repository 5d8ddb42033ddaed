"""Responses kept in PostgreSQL (`--database`), so that `previous_response_id` works at any gateway and after restarts.

Only the tenant of a response can find it. Over the bound of all, or over a quarter of it for an organisation, the tenants that
hold most lose their oldest responses. Writes at the same time may go over the bounds, until the next one.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg

from gateway.http.errors import ApiError
from gateway.postgres_pool import RETRY_S, PostgresPool
from gateway.response_store import BYTES_MAX, KeptResponse, cost_bytes
from runtime.process import log
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.storage.errors import StorageError

T = TypeVar("T")
THREADS: Final = 4
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
        self._pool = PostgresPool(url, "responses", _TABLE, threads=THREADS)
        self.close = self._pool.close
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
            await self._pool.call(tenant, work)
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
                await self._pool.call("", self._tidy)
            except StorageError as error:
                self._warn("the database cannot be used", error=str(error))
            await asyncio.sleep(TIDY_S)

    async def _found(self, tenant: str, work: Callable[[psycopg.Connection], T]) -> T:
        try:
            return await self._pool.call(tenant, work)
        except StorageError as error:
            self._warn("kept responses cannot be read", error=str(error))
            message = "Kept responses cannot be read now. Try again, or send the conversation's items as 'input'."
            raise ApiError(503, message, code="storage_unavailable", retry_after_s=2 * RETRY_S) from None

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
