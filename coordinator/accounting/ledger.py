"""The usage ledger: SQLite in WAL mode, written by one thread of its own, one row for each accepted request.

**Journalled before it is acknowledged.** A request's row is written when it is accepted, open and charged at its estimate, and
nothing about the request (its acceptance, its order to a worker) leaves the coordinator until that row is committed
(`coordinator.outbox`). At its end the row is closed with what was computed and emitted. So every request that another process
has heard of has one row, whenever this process is killed:

- killed before the row is committed: nobody has heard of the request. Its gateway submits it again, and it gets a row then.
- killed while the row is open: the next coordinator counts the estimate to the tenant's day, holds the reservation again, and
  closes the row when a worker or the gateway tells how the request ended. If no report comes within a bound (the stream ended
  while no coordinator was there), the row is written off: closed as `lost`, charged at the estimate. Charging nothing would
  give work away; the estimate is the best known figure.
- killed after the end but before the row is closed: the same, the row being open.
- killed after the row is closed: done.

- killed after the row is closed, and the stream's gateway resumes it, as after a worker's link was lost: the row is opened
  again. Amounts are those of the whole answer, with each token counted once. So the greater of the row's old amount and the
  new closing's amount is right, no matter what came in between.

Closed rows are deleted `keep_days` after their acceptance, a bounded number between any two batches.

Rows are found by request id; a second opening or closing of one changes nothing. The rates per minute go on from the
rows of the last minute.

**A start does not take longer with the day.** It reads only rows that an index finds: open rows, rows of the last minute, and
the sums of the day. Triggers keep these sums in the transaction that writes the rows.

**No row keeps a coordinator from starting.** Other programs may have written to the file, and disks fail. So a row that this
program would not write is left out and counted.

**Private.** The file and those that SQLite makes beside it can be read by this user alone: they have tenants and their usage.

**Durability.** `synchronous=NORMAL`: a commit is in the operating system's hands, so it outlives the process, kill -9 included.
A machine that loses power may lose the last commits, never the file's consistency. Full durability would cost an fsync for each
batch, which the first message about each request would wait for; the streams themselves die with the machine anyway.

**The event loop never waits.** Entries go into a bounded queue; the thread takes all that is there, commits them as one
transaction and tells the loop which requests are on disk. More load makes larger batches, not more commits.

**Locked, full or hanging storage is waited for.** The thread tries to commit its batch until it succeeds. Meanwhile `trouble`
says why new requests are refused.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import date
from math import inf
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from coordinator.accounting.billing import Closed, Entry, Opened, Past
from coordinator.accounting.quota import DAY_S, Ask
from proto.errors import CrossdockError
from proto.fields import Count, RequestId, Text
from runtime.process import clock, log
from runtime.process.exits import is_passing
from runtime.storage.private_file import make_private

OPEN_MAX: Final = 1 << 17  # open rows taken over at a start
RECENT_MAX: Final = 1 << 18
_EPOCH: Final = date(1970, 1, 1).toordinal()
_READ_OPEN: Final = """
SELECT request_id, day, tenant, model, priority_class, borrowed, from_token, prompt_tokens, output_tokens, kv_blocks,
    output_tokens_max
FROM usage INDEXED BY usage_open -- left to itself, SQLite goes through all rows for their order
WHERE outcome IS NULL ORDER BY day DESC LIMIT ?
"""
_LAST_MINUTE: Final = """
SELECT tenant, accepted_s, charged_tokens FROM usage WHERE accepted_s BETWEEN ? AND ? AND NOT borrowed
ORDER BY accepted_s LIMIT ?
"""
_TOTALS_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS usage_totals (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    requests INTEGER NOT NULL,
    charged_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS usage_totals_inserted AFTER INSERT ON usage BEGIN
    INSERT INTO usage_totals VALUES (NEW.day, NEW.tenant, 1, NEW.charged_tokens)
    ON CONFLICT (day, tenant) DO UPDATE SET requests = requests + 1,
        charged_tokens = charged_tokens + excluded.charged_tokens;
END;
CREATE TRIGGER IF NOT EXISTS usage_totals_updated AFTER UPDATE OF charged_tokens ON usage BEGIN
    UPDATE usage_totals SET charged_tokens = charged_tokens + NEW.charged_tokens - OLD.charged_tokens
    WHERE day = NEW.day AND tenant = NEW.tenant;
END;
CREATE TRIGGER IF NOT EXISTS usage_totals_deleted AFTER DELETE ON usage BEGIN
    UPDATE usage_totals SET requests = requests - 1, charged_tokens = charged_tokens - OLD.charged_tokens
    WHERE day = OLD.day AND tenant = OLD.tenant;
    DELETE FROM usage_totals WHERE day = OLD.day AND tenant = OLD.tenant AND requests = 0;
END;
"""
_OF_DAY: Final = "SELECT tenant, charged_tokens FROM usage_totals WHERE day = ?"
_Name = Annotated[Text, Meta(min_length=1)]


class _OpenRow(msgspec.Struct, array_like=True):
    request_id: RequestId
    day: Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d\Z")]
    tenant: _Name
    model: Text
    priority_class: Text
    borrowed: Literal[0, 1]
    from_token: Count
    prompt_tokens: Count
    output_tokens: Count
    kv_blocks: Count
    output_tokens_max: Count


class _RecentRow(msgspec.Struct, array_like=True):
    tenant: _Name
    accepted_s: float
    charged_tokens: Count


class _TotalRow(msgspec.Struct, array_like=True):
    tenant: _Name
    charged_tokens: Count


R = TypeVar("R", bound=msgspec.Struct)


def day_text(day: int) -> str:
    """Days since 1970 as `2026-11-21`."""
    return date.fromordinal(_EPOCH + day).isoformat()


def read_past(db: sqlite3.Connection, today: int, unix_s: float) -> tuple[Past, int]:
    """The bills that are open, the charges of `today`, and the last minute before `unix_s`; and how many rows were left out.
    Raises `sqlite3.Error`."""
    left_out: list[object] = []

    def rows(kind: type[R], statement: str, *arguments: object) -> Iterator[R]:
        for row in db.execute(statement, arguments):
            try:
                yield msgspec.convert(row, kind)
            except msgspec.ValidationError:
                left_out.append(row)

    def opened() -> Iterator[Opened]:
        for row in rows(_OpenRow, _READ_OPEN, OPEN_MAX):
            try:
                day = date.fromisoformat(row.day).toordinal() - _EPOCH
            except ValueError:
                left_out.append(row)
                continue
            ask = Ask(row.prompt_tokens, row.output_tokens, row.kv_blocks, row.output_tokens_max)
            names = (row.tenant, row.model, row.priority_class)
            yield Opened(row.request_id, day, *names, bool(row.borrowed), ask, from_token=row.from_token)

    db.text_factory = _text_or_bytes
    try:
        bills = {row.request_id: row for row in opened()}
        charged = [(row.tenant, today, row.charged_tokens) for row in rows(_TotalRow, _OF_DAY, day_text(today))]
        minute = rows(_RecentRow, _LAST_MINUTE, unix_s - 60.0, unix_s, RECENT_MAX)
        recent = [(row.tenant, unix_s - row.accepted_s, row.charged_tokens) for row in minute]
    finally:
        db.text_factory = str
    return Past(tuple(bills.values()), tuple(charged), tuple(recent)), len(left_out)


def _text_or_bytes(raw: bytes) -> str | bytes:
    """Returns bytes that are not UTF-8 as they are; the check of the row refuses them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


T = TypeVar("T")
QUEUE_MAX: Final = 1 << 16
BATCH_MAX: Final = 4096
PRUNE_MAX: Final = 2000  # rows deleted in one transaction: some ten milliseconds
PRUNE_AGAIN_S: Final = 60.0  # when rows are deleted after storage failed
_BUSY_TIMEOUT_S: Final = 10.0  # how long a start waits for a locked file
RETRY_S: Final = 0.25
LATE_S: Final = 2.0  # new requests are refused while an entry has waited for so long
CLOSE_S: Final = 15.0  # how long a process that ends waits for its storage
_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS usage (
    request_id TEXT PRIMARY KEY,
    day TEXT NOT NULL,               -- of acceptance, UTC
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    priority_class TEXT NOT NULL,
    borrowed INTEGER NOT NULL,
    accepted_s REAL NOT NULL,        -- Unix time
    outcome TEXT,                    -- NULL while it is open
    charged_tokens INTEGER NOT NULL, -- while it is open: the estimate
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL,
    kv_blocks INTEGER NOT NULL,
    queue_ms REAL, prefill_ms REAL, transfer_ms REAL, decode_ms REAL,
    from_token INTEGER NOT NULL DEFAULT 0,
    before_prompt_tokens INTEGER NOT NULL DEFAULT 0, -- charged when it was opened again
    before_output_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens_max INTEGER NOT NULL DEFAULT 0 -- while it is open: the most that its output may come to
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_by_day ON usage (day, tenant);
CREATE INDEX IF NOT EXISTS usage_by_time ON usage (accepted_s);
CREATE INDEX IF NOT EXISTS usage_open ON usage (request_id) WHERE outcome IS NULL;
"""
_OPEN: Final = """
INSERT INTO usage (request_id, day, tenant, model, priority_class, borrowed, accepted_s,
    charged_tokens, prompt_tokens, output_tokens, output_tokens_max, kv_blocks, from_token)
VALUES (:request_id, :day, :tenant, :model, :priority_class, :borrowed, :accepted_s,
    :prompt_tokens + :output_tokens, :prompt_tokens, :output_tokens, :output_tokens_max, :kv_blocks, :from_token)
ON CONFLICT (request_id) DO UPDATE SET outcome = NULL,
    before_prompt_tokens = prompt_tokens, before_output_tokens = output_tokens, kv_blocks = :kv_blocks,
    output_tokens_max = :output_tokens_max,
    prompt_tokens = MAX(prompt_tokens, :prompt_tokens), output_tokens = MAX(output_tokens, :output_tokens),
    charged_tokens = MAX(prompt_tokens, :prompt_tokens) + MAX(output_tokens, :output_tokens)
WHERE :again AND outcome IS NOT NULL
"""
_CLOSE: Final = """
UPDATE usage SET outcome = :outcome, prompt_tokens = MAX(before_prompt_tokens, :prompt_tokens),
    cached_tokens = CASE WHEN before_prompt_tokens < :prompt_tokens THEN :cached_tokens
        WHEN before_prompt_tokens > :prompt_tokens THEN cached_tokens
        ELSE MAX(cached_tokens, :cached_tokens) END, -- who found the row open does not know of what was cached before
    output_tokens = MAX(before_output_tokens, :output_tokens + :from_token - from_token),
    charged_tokens = MAX(before_prompt_tokens, :prompt_tokens)
        + MAX(before_output_tokens, :output_tokens + :from_token - from_token),
    queue_ms = COALESCE(queue_ms, 0) + :queue_ms, prefill_ms = COALESCE(prefill_ms, 0) + :prefill_ms,
    transfer_ms = COALESCE(transfer_ms, 0) + :transfer_ms, decode_ms = COALESCE(decode_ms, 0) + :decode_ms
WHERE request_id = :request_id AND outcome IS NULL
"""
_OLD: Final = "(SELECT request_id FROM usage WHERE accepted_s < ? AND outcome IS NOT NULL ORDER BY accepted_s LIMIT ?)"
_MEND: Final = f"""
UPDATE OR IGNORE usage SET charged_tokens = 0 -- no sum of a day can be made without infinity or NaN
WHERE typeof(charged_tokens) <> 'integer' AND request_id IN {_OLD}
"""
_PRUNE: Final = f"DELETE FROM usage WHERE request_id IN {_OLD}"
_TRIED: Final[tuple[Entry, ...]] = (
    Opened("", 0, "", "", "", False, Ask(0, 0, 0)),
    Closed("", "", 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0),
)


class LedgerError(CrossdockError):
    """The ledger cannot be opened or written; `str()` has its path."""


class Ledger:
    """Used on the event loop's thread, by the coordinator that leads (`coordinator.serve`). `on_committed`
    gets the ids of requests whose opening is on disk, `on_failed` the error after which nothing is written any more; both
    are called on the loop."""

    def __init__(
        self,
        path: str | Path,
        *,
        on_committed: Callable[[list[str]], None],
        on_failed: Callable[[LedgerError], None],
        keep_days: int = 0,
    ) -> None:
        """`keep_days`: after which closed rows are deleted; 0: never."""
        self.path = Path(path).expanduser()
        self.keep_days = keep_days
        self._prune_at = 0.0
        """When old rows are deleted next, by the one clock: soon after the start, and then once a day."""
        self._time = clock.SettledTime()
        self._on_committed, self._on_failed = on_committed, on_failed
        self._entries: queue.Queue[tuple[float, Entry] | None] = queue.Queue(QUEUE_MAX)
        self._oldest_at = inf  # when the first entry of the batch in hand was written; infinite while there is none
        self._failure = ""  # why the last try to commit that batch failed
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self, today: int) -> Past:
        """Open or make the file, and read what it says of `today` and of open requests. Raises `LedgerError`."""
        loop = asyncio.get_running_loop()
        past: Future[Past] = Future()
        self._thread = threading.Thread(target=self._run, args=(loop, past, today), name="ledger", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(past)

    @property
    def behind(self) -> bool:
        """Whether no further request should be admitted: so much waits to be written, or it has waited for so long."""
        return bool(self.trouble(clock.now()))

    def trouble(self, now: float) -> str:
        """Returns why no further request should be admitted; empty where there is no reason."""
        if self._entries.qsize() > QUEUE_MAX // 2:
            return "usage cannot be recorded as fast as requests come"
        late_s = now - self._oldest_at
        if late_s < LATE_S:
            return ""
        return f"storage: the usage ledger could not be written for {late_s:.0f} s ({self._failure or 'no answer yet'})"

    def write(self, entry: Entry) -> None:
        """Raises `LedgerError` where the queue is full, which refusing requests while `behind` prevents."""
        try:
            self._entries.put_nowait((clock.now(), entry))
        except queue.Full:
            raise LedgerError(f"{self.path}: {QUEUE_MAX} entries wait to be written") from None

    async def close(self) -> None:
        """Write what is queued, and let the file go."""
        if self._thread is None:
            return
        await asyncio.to_thread(self._stop, self._thread)
        self._thread = None

    def _stop(self, thread: threading.Thread) -> None:
        self._ends.set()
        # The queue may be full and the thread dead: then there is nothing to wait for.
        while thread.is_alive():
            try:
                self._entries.put(None, timeout=0.1)
                break
            except queue.Full:
                if clock.now() - self._oldest_at > CLOSE_S:
                    break
        thread.join(CLOSE_S)

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, past: "Future[Past]", today: int) -> None:
        try:
            make_private(self.path)
            with closing(sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as db:
                _prepare(db)
                past.set_result(self._read(db, today))
                db.execute(f"PRAGMA busy_timeout = {RETRY_S * 1000:.0f}")
                while self._write_batch(db, loop):
                    self._prune_if_due(db)
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence holds back every message for ever
            failure = LedgerError(f"{self.path}: {_why(error)}")
            if past.done():
                _tell(loop, self._on_failed, failure)
            else:
                past.set_exception(failure)

    def _read(self, db: sqlite3.Connection, today: int) -> Past:
        past, unreadable = read_past(db, today, clock.unix_time())
        if unreadable:
            what = "rows of the ledger cannot be read and are left out: what they say counts for no tenant"
            log.get("crossdock.ledger").warning(what, usage_db=str(self.path), rows=unreadable)
        return past

    def _write_batch(self, db: sqlite3.Connection, loop: asyncio.AbstractEventLoop) -> bool:
        """Wait for entries, or until rows are to be deleted, and commit all that are there; False once told to stop."""
        try:
            batch = [self._entries.get(timeout=max(self._prune_at - clock.now(), 0.0) if self.keep_days else None)]
        except queue.Empty:
            return True
        while batch[-1] is not None and len(batch) < BATCH_MAX:
            try:
                batch.append(self._entries.get_nowait())
            except queue.Empty:
                break
        written = [item for item in batch if item is not None]
        if written:
            self._oldest_at, entries = written[0][0], [entry for _, entry in written]
            while not self._commit(db, entries):
                if self._ends.wait(RETRY_S) and clock.now() - self._oldest_at > CLOSE_S:
                    raise LedgerError(self._failure)
            self._oldest_at = inf
            opened = [entry.request_id for entry in entries if isinstance(entry, Opened)]
            if opened:
                _tell(loop, self._on_committed, opened)
        return batch[-1] is not None

    def _commit(self, db: sqlite3.Connection, entries: list[Entry]) -> bool:
        """Whether the entries are on disk; False: another try may succeed."""
        try:
            db.execute("BEGIN IMMEDIATE")
            for entry in entries:
                _write(db, entry)
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if not _may_pass(error):
                raise
            self._failed(db, error)
            return False
        self._failure = ""
        return True

    def _failed(self, db: sqlite3.Connection, error: sqlite3.OperationalError) -> None:
        if not self._failure:
            log.get("crossdock.ledger").error(
                "usage cannot be written; new requests are refused until it can be",
                usage_db=str(self.path),
                error=str(error),
            )
        self._failure = str(error)
        if db.in_transaction:
            db.execute("ROLLBACK")

    def _prune_if_due(self, db: sqlite3.Connection) -> None:
        if not self.keep_days or clock.now() < self._prune_at:
            return
        settled_s = self._time.at(clock.unix_time(), clock.now())
        if settled_s is None:
            self._prune_at = clock.now() + clock.SETTLE_S
            return
        before_s, self._prune_at = settled_s - self.keep_days * DAY_S, clock.now() + DAY_S
        try:
            db.execute(_MEND, (before_s, PRUNE_MAX))
            if db.execute(_PRUNE, (before_s, PRUNE_MAX)).rowcount == PRUNE_MAX:
                self._prune_at = 0.0
        except sqlite3.OperationalError as error:
            if not _may_pass(error):
                raise
            self._prune_at = clock.now() + PRUNE_AGAIN_S


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], value: T) -> None:
    try:
        loop.call_soon_threadsafe(callback, value)
    except RuntimeError:
        pass  # the loop has closed, and nobody is left to hear it


def _may_pass(error: sqlite3.OperationalError) -> bool:
    """Whether another try may succeed. Some failures of a disk look like a file that may not be opened or written."""
    return is_passing(error) or error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def _why(error: BaseException) -> str:
    expected = isinstance(error, OSError | sqlite3.Error | LedgerError)
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _prepare(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _VERSION):
        raise LedgerError(f"it is of version {version}, this program writes version {_VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.executescript(_SCHEMA + _TOTALS_SCHEMA)
    # A file that cannot be written to, such as one with another table, is refused before any request is served.
    db.execute("BEGIN IMMEDIATE")
    for entry in _TRIED:
        _write(db, entry)
    db.execute("ROLLBACK")
    db.execute(f"PRAGMA user_version = {_VERSION}")


def _write(db: sqlite3.Connection, entry: Entry) -> None:
    match entry:
        case Opened():
            written = {"day": day_text(entry.day), "accepted_s": clock.unix_time()}
            db.execute(_OPEN, asdict(entry) | asdict(entry.ask) | written)
        case Closed():
            db.execute(_CLOSE, asdict(entry))
