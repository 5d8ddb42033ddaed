"""The tables of a ledger and the statements on them, in SQLite's dialect, which `coordinator.postgres` translates. Pure."""

from typing import Any, Final

from msgspec.structs import asdict

from coordinator.accounting.billing import Closed, Entry, Opened
from coordinator.accounting.past import day_text
from coordinator.accounting.quota import Ask

VERSION: Final = 1
SCHEMA: Final = """
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
CREATE TABLE IF NOT EXISTS usage_totals (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    requests INTEGER NOT NULL,
    charged_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant)
) WITHOUT ROWID;
"""
OPEN: Final = """
INSERT INTO usage (request_id, day, tenant, model, priority_class, borrowed, accepted_s,
    charged_tokens, prompt_tokens, output_tokens, output_tokens_max, kv_blocks, from_token)
VALUES (:request_id, :day, :tenant, :model, :priority_class, :borrowed, :accepted_s,
    :prompt_tokens + :output_tokens, :prompt_tokens, :output_tokens, :output_tokens_max, :kv_blocks, :from_token)
ON CONFLICT (request_id) DO UPDATE SET outcome = NULL,
    before_prompt_tokens = usage.prompt_tokens, before_output_tokens = usage.output_tokens, kv_blocks = :kv_blocks,
    output_tokens_max = :output_tokens_max,
    prompt_tokens = MAX(usage.prompt_tokens, :prompt_tokens), output_tokens = MAX(usage.output_tokens, :output_tokens),
    charged_tokens = MAX(usage.prompt_tokens, :prompt_tokens) + MAX(usage.output_tokens, :output_tokens)
WHERE :again AND usage.outcome IS NOT NULL
"""
CLOSE: Final = """
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
OLD: Final = "(SELECT request_id FROM usage WHERE accepted_s < ? AND outcome IS NOT NULL ORDER BY accepted_s LIMIT ?)"
PRUNE: Final = f"DELETE FROM usage WHERE request_id IN {OLD}"
READ_OPEN: Final = """
SELECT request_id, day, tenant, model, priority_class, borrowed, from_token, prompt_tokens, output_tokens, kv_blocks,
    output_tokens_max
FROM usage WHERE outcome IS NULL ORDER BY day DESC LIMIT ?
"""
LAST_MINUTE: Final = """
SELECT tenant, accepted_s, charged_tokens FROM usage WHERE accepted_s BETWEEN ? AND ? AND borrowed = 0
ORDER BY accepted_s LIMIT ?
"""
OF_DAY: Final = "SELECT tenant, charged_tokens FROM usage_totals WHERE day = ?"
TRIED: Final[tuple[Entry, ...]] = (
    Opened("", 0, "", "", "", False, Ask(0, 0, 0)),
    Closed("", "", 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0),
)


def statement_of(entry: Entry, unix_s: float) -> tuple[str, dict[str, Any]]:
    """The statement that writes an entry, and its values."""
    if isinstance(entry, Closed):
        return CLOSE, asdict(entry)
    written = {"day": day_text(entry.day), "accepted_s": unix_s, "borrowed": int(entry.borrowed)}
    return OPEN, asdict(entry) | asdict(entry.ask) | written
