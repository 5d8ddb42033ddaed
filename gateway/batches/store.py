"""Where files, batches and results are kept: tables, and the interface of the two stores that have them.

`sqlite_store` is one file, which the gateways of a host may share. `postgres_store` is a database for gateways on any hosts.
Statements are written once, in what SQLite and PostgreSQL have in common.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from starlette.requests import Request

from gateway.http.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")
DAY_S: Final = 86_400
FILE_BYTES_MAX: Final = 64 << 20
VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,        -- in the order of creation, as those of batches
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    is_ready BOOLEAN NOT NULL,  -- false: still being uploaded, or the results of a batch that has not ended
    batch_id TEXT,              -- of the batch whose results these are; NULL: uploaded
    is_errors BOOLEAN NOT NULL DEFAULT FALSE,
    bytes INTEGER NOT NULL DEFAULT 0,
    created_s INTEGER NOT NULL, -- Unix time, as all of these
    expires_s INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, id, bytes);
CREATE INDEX IF NOT EXISTS files_by_end ON files (expires_s);
CREATE TABLE IF NOT EXISTS lines (
    file_id TEXT NOT NULL,
    number INTEGER NOT NULL,    -- from 1
    is_request BOOLEAN NOT NULL, -- false: blank
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
    is_error BOOLEAN NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (batch_id, number) -- a line has one result, however often it is computed
);
"""


class Database(Protocol):
    """A connection with a transaction that has begun. `?` stands for a value."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Returns a cursor, whose rows are sequences."""

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> Any: ...


Work = Callable[Concatenate[Database, P], T]


class BatchStore(Protocol):
    """Used on the event loop's thread. Each call is one transaction, which is undone if `work` raises."""

    on_lost: Callable[[], None]
    """Told when another process may run the batches from then on."""

    async def open(self) -> None:
        """Raises `StorageError`."""

    async def close(self) -> None: ...

    async def read(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """The result of `work`, which changes nothing. It waits for no transaction that writes. Raises `StorageError`."""

    async def write_soon(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """The result of `work`, for a client. Raises `StorageError` if its turn does not come soon."""

    async def write(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """The result of `work`, for the runner. Raises `StorageError`, also if this process may no longer run the batches."""

    async def lead(self) -> int:
        """Returns the term in which this process runs the batches, or 0 if another one does. Raises `StorageError`."""

    async def give_up(self) -> None:
        """Let another process run the batches."""


def new_id(now: float) -> str:
    """Returns a new id. Later ids are greater, and ids cannot be guessed."""
    return f"{int(now * 1000):012x}{secrets.token_hex(8)}"


def insert(db: Database, table: str, **values: Any) -> None:
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()])


@dataclass
class BatchService:
    store: BatchStore
    file_bytes_max: int
    tenant_bytes_max: int  # Bytes of all files and results of one tenant, with what each file and batch counts beside
    keep_s: int
    wake: Callable[[], None] = lambda: None  # Told when there is something new for the runner


def service_of(request: Request) -> BatchService:
    """Raises `ApiError` (404) where this gateway has none."""
    service = request.app.state.batches
    if not isinstance(service, BatchService):
        message = "This gateway keeps no files and batches: it was started without --batch-db and --database."
        raise ApiError(404, message, code="batches_not_enabled")
    return service
