"""The past that the usage ledger tells at a start.

Triggers keep the sum of each tenant's charges today beside the rows, in the transaction that writes the rows: adding up the
rows would take longer with every request of the day, and no request is served meanwhile.

Other programs may have written to the file, and disks fail. So a row that this program would not write is left out and
counted. No row can keep a coordinator from starting, or bring amounts into it that it would not write itself.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from coordinator.accounting.billing import Opened, Past
from coordinator.accounting.quota import Ask
from proto.fields import Count, RequestId, Text

OPEN_MAX: Final = 1 << 17  # open rows taken over at a start
RECENT_MAX: Final = 1 << 18
_EPOCH: Final = date(1970, 1, 1).toordinal()
_OPEN: Final = """
SELECT request_id, day, tenant, model, priority_class, borrowed, from_token, prompt_tokens, output_tokens, kv_blocks,
    output_tokens_max
FROM usage INDEXED BY usage_open -- left to itself, SQLite goes through all rows for their order
WHERE outcome IS NULL ORDER BY day DESC LIMIT ?
"""
_LAST_MINUTE: Final = """
SELECT tenant, accepted_s, charged_tokens FROM usage WHERE accepted_s BETWEEN ? AND ? AND NOT borrowed
ORDER BY accepted_s LIMIT ?
"""
TOTALS_SCHEMA: Final = """
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


def read(db: sqlite3.Connection, today: int, unix_s: float) -> tuple[Past, int]:
    """The bills that are open, the charges of `today`, and the last minute before `unix_s`; and how many rows were left out.
    Raises `sqlite3.Error`."""
    return _Reader(db).read(today, unix_s)


class _Reader:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._unreadable = 0

    def read(self, today: int, unix_s: float) -> tuple[Past, int]:
        self._db.text_factory = _text_or_bytes
        try:
            opened = {row.request_id: row for row in self._opened()}
            charged = [
                (row.tenant, today, row.charged_tokens)
                for row in self._rows(_TotalRow, self._db.execute(_OF_DAY, (day_text(today),)))
            ]
            minute = self._db.execute(_LAST_MINUTE, (unix_s - 60.0, unix_s, RECENT_MAX))
            recent = [
                (row.tenant, unix_s - row.accepted_s, row.charged_tokens) for row in self._rows(_RecentRow, minute)
            ]
        finally:
            self._db.text_factory = str
        return Past(tuple(opened.values()), tuple(charged), tuple(recent)), self._unreadable

    def _rows(self, kind: type[R], rows: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        for row in rows:
            try:
                yield msgspec.convert(row, kind)
            except msgspec.ValidationError:
                self._unreadable += 1

    def _opened(self) -> Iterator[Opened]:
        for row in self._rows(_OpenRow, self._db.execute(_OPEN, (OPEN_MAX,))):
            try:
                day = date.fromisoformat(row.day).toordinal() - _EPOCH
            except ValueError:
                self._unreadable += 1
                continue
            ask = Ask(row.prompt_tokens, row.output_tokens, row.kv_blocks, row.output_tokens_max)
            names = (row.tenant, row.model, row.priority_class)
            yield Opened(row.request_id, day, *names, bool(row.borrowed), ask, from_token=row.from_token)


def _text_or_bytes(raw: bytes) -> str | bytes:
    """Returns bytes that are not UTF-8 as they are; the check of the row refuses them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
