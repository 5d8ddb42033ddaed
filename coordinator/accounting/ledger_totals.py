"""Charged tokens of each day and tenant, kept in the usage ledger beside its rows.

A coordinator that starts needs what each tenant was charged today. Adding up the rows takes longer with every request of the
day, and nobody is served meanwhile; so triggers keep the sums, in the transaction that writes the rows. A program without this
module (version 2 of the ledger) keeps them right too, since the triggers are in the file: it can be gone back to.
"""

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, Final

_TOTALS: Final = """
CREATE TABLE usage_totals (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    requests INTEGER NOT NULL,
    charged_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant)
) WITHOUT ROWID
"""
_ADD_UP: Final = """
INSERT OR IGNORE INTO usage_totals -- not rows without a day or a tenant
SELECT day, tenant, COUNT(*), SUM(CASE WHEN typeof(charged_tokens) = 'integer' AND charged_tokens BETWEEN 0 AND 1 << 40
    THEN charged_tokens ELSE 0 END)
FROM usage NOT INDEXED GROUP BY day, tenant
"""
_TRIGGERS: Final = (
    """
CREATE TRIGGER usage_totals_inserted AFTER INSERT ON usage BEGIN
    INSERT INTO usage_totals VALUES (NEW.day, NEW.tenant, 1, NEW.charged_tokens)
    ON CONFLICT (day, tenant) DO UPDATE SET requests = requests + 1,
        charged_tokens = charged_tokens + excluded.charged_tokens;
END
""",
    """
CREATE TRIGGER usage_totals_updated AFTER UPDATE OF charged_tokens ON usage BEGIN
    UPDATE usage_totals SET charged_tokens = charged_tokens + NEW.charged_tokens - OLD.charged_tokens
    WHERE day = NEW.day AND tenant = NEW.tenant;
END
""",
    """
CREATE TRIGGER usage_totals_deleted AFTER DELETE ON usage BEGIN
    UPDATE usage_totals SET requests = requests - 1, charged_tokens = charged_tokens - OLD.charged_tokens
    WHERE day = OLD.day AND tenant = OLD.tenant;
    DELETE FROM usage_totals WHERE day = OLD.day AND tenant = OLD.tenant AND requests = 0;
END
""",
)
_IS_THERE: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'usage_totals'"
_OF_DAY: Final = "SELECT tenant, charged_tokens FROM usage_totals WHERE day = ?"


def prepare(db: sqlite3.Connection, adding_up: Callable[[], None]) -> None:
    """Make the table where it is missing. `adding_up()` is called before the rows of an older file are added up, which is done
    once and takes some seconds per million of them."""
    if db.execute(_IS_THERE).fetchone():
        return
    if db.execute("SELECT 1 FROM usage LIMIT 1").fetchone():
        adding_up()
    db.execute("BEGIN IMMEDIATE")
    for statement in (_TOTALS, _ADD_UP, *_TRIGGERS):
        db.execute(statement)
    db.execute("COMMIT")


def of_day(db: sqlite3.Connection, day: str) -> Iterator[tuple[Any, ...]]:
    """(tenant, charged tokens), open requests at their estimate included."""
    return iter(db.execute(_OF_DAY, (day,)))
