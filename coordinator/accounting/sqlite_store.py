"""The ledger's rows in a SQLite file in WAL mode.

**A start does not take longer with the day.** It reads only rows that an index finds: open rows, rows of the last minute, and
the sums of the day. Triggers keep these sums in the transaction that writes the rows.

**Private.** The file and those that SQLite makes beside it can be read by this user alone: they have tenants and their usage.

**Durability.** `synchronous=NORMAL`: a commit is in the operating system's hands, so it outlives the process, kill -9 included.
A machine that loses power may lose the last commits, never the file's consistency. Full durability would cost an fsync for each
batch, which the first message about each request would wait for; the streams themselves die with the machine anyway.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.accounting.billing import Entry, Past
from coordinator.accounting.ledger import RETRY_S
from coordinator.accounting.past import OPEN_MAX, RECENT_MAX, RECENT_S, day_text, past_of
from coordinator.accounting.statements import (
    LAST_MINUTE,
    OF_DAY,
    OLD,
    PRUNE,
    READ_OPEN,
    SCHEMA,
    TRIED,
    VERSION,
    statement_of,
)
from runtime.process import clock
from runtime.process.exits import is_passing
from runtime.storage.errors import StorageError, StorageUnavailable
from runtime.storage.private_file import make_private

_MEND: Final = f"""
UPDATE OR IGNORE usage SET charged_tokens = 0 -- no sum of a day can be made without infinity or NaN
WHERE typeof(charged_tokens) <> 'integer' AND request_id IN {OLD}
"""
_TRIGGERS: Final = """
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


class SqliteStore:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.name = str(self.path)
        self._connection: sqlite3.Connection | None = None

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    def open(self) -> None:
        """Raises `StorageError`, or `OSError`."""
        make_private(self.path)
        try:
            self._connection = sqlite3.connect(self.path, timeout=RETRY_S, isolation_level=None)
            _prepare(self._connection)
        except sqlite3.Error as error:
            raise (StorageUnavailable if is_passing(error) else StorageError)(str(error)) from error

    def read(self, today: int) -> tuple[Past, int]:
        try:
            return read_past(self._db, today, clock.unix_time())
        except sqlite3.Error as error:
            raise _failure(error) from error

    def commit(self, entries: Sequence[Entry]) -> None:
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            for entry in entries:
                _write(db, entry)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction and _may_pass(error):
                db.execute("ROLLBACK")
            raise _failure(error) from error

    def prune(self, before_s: float, rows_max: int) -> int:
        try:
            self._db.execute(_MEND, (before_s, rows_max))
            return self._db.execute(PRUNE, (before_s, rows_max)).rowcount
        except sqlite3.Error as error:
            raise _failure(error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def read_past(db: sqlite3.Connection, today: int, unix_s: float) -> tuple[Past, int]:
    """Returns what `db` says, and how many rows were left out. Raises `sqlite3.Error`."""
    db.text_factory = _text_or_bytes
    try:
        # Left to itself, SQLite goes through all rows for their order.
        opened = db.execute(READ_OPEN.replace("FROM usage", "FROM usage INDEXED BY usage_open"), (OPEN_MAX,))
        recent = db.execute(LAST_MINUTE, (unix_s - RECENT_S, unix_s, RECENT_MAX))
        return past_of(opened, db.execute(OF_DAY, (day_text(today),)), recent, today, unix_s)
    finally:
        db.text_factory = str


def _text_or_bytes(raw: bytes) -> str | bytes:
    """Returns bytes that are not UTF-8 as they are; the check of the row refuses them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _failure(error: sqlite3.Error) -> StorageError:
    return (StorageUnavailable if _may_pass(error) else StorageError)(str(error))


def _may_pass(error: sqlite3.Error) -> bool:
    """Whether another try may succeed. Some failures of a disk look like a file that may not be opened or written."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    return is_passing(error) or error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def _prepare(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        raise StorageError(f"it is of version {version}, this program writes version {VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.executescript(SCHEMA + _TRIGGERS)
    # A file that cannot be written to, such as one with another table, is refused before any request is served.
    db.execute("BEGIN IMMEDIATE")
    for entry in TRIED:
        _write(db, entry)
    db.execute("ROLLBACK")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _write(db: sqlite3.Connection, entry: Entry) -> None:
    db.execute(*statement_of(entry, clock.unix_time()))
