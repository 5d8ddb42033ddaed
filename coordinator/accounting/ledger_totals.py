"""Charged tokens of each day and tenant, kept in the usage ledger beside its rows.

A coordinator that starts needs what each tenant was charged today. Adding up the rows takes longer with every request of the
day, and no request is served meanwhile. So triggers keep the sums, in the transaction that writes the rows.
"""

import sqlite3
from collections.abc import Iterator
from typing import Any, Final

SCHEMA: Final = """
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


def of_day(db: sqlite3.Connection, day: str) -> Iterator[tuple[Any, ...]]:
    """(tenant, charged tokens), open requests at their estimate included."""
    return iter(db.execute(_OF_DAY, (day,)))
