"""The simulated usage ledger: rows of requests, without a database."""

from dataclasses import dataclass, field

import msgspec

from coordinator.accounting.billing import Entry, Opened, Past
from coordinator.accounting.quota import DAY_S, Ask

UNIX_S = 20_000.0 * DAY_S + 1000.0
"""Wall-clock time at the beginning; no run lasts until midnight."""
DAY = int(UNIX_S // DAY_S)
RECENT_S = 60.0


@dataclass
class LedgerRow:
    """One request; amounts are of its whole answer, from `opened.from_token` on."""

    opened: Opened
    accepted_at: float
    prompt_tokens: int
    output_tokens: int
    outcome: str = ""
    """Empty while the row is open; the amounts are then estimates."""
    before: tuple[int, int] = (0, 0)
    """Prompt and output tokens at the time when the row was opened again."""

    @property
    def charged_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass
class CheckedLedger:
    """The file of `coordinator.accounting.ledger`; its statements are repeated here."""

    rows: dict[str, LedgerRow] = field(default_factory=dict)

    def write(self, entry: Entry, now: float) -> None:
        row = self.rows.get(entry.request_id)
        if isinstance(entry, Opened):
            ask = entry.ask
            if row is None:
                self.rows[entry.request_id] = LedgerRow(entry, now, ask.prompt_tokens, ask.output_tokens)
            elif entry.again and row.outcome:
                row.outcome, row.before = "", (row.prompt_tokens, row.output_tokens)
                row.opened = msgspec.structs.replace(row.opened, ask=ask)
                row.prompt_tokens = max(row.prompt_tokens, ask.prompt_tokens)
                row.output_tokens = max(row.output_tokens, ask.output_tokens)
        elif row is not None and not row.outcome:
            row.outcome = entry.outcome
            row.prompt_tokens = max(row.before[0], entry.prompt_tokens)
            output_tokens = entry.output_tokens + entry.from_token - row.opened.from_token
            row.output_tokens = max(row.before[1], output_tokens)

    def past(self, now: float) -> Past:
        charged: dict[str, int] = {}
        for row in self.rows.values():
            charged[row.opened.tenant] = charged.get(row.opened.tenant, 0) + row.charged_tokens
        recent = sorted(
            (row for row in self.rows.values() if not row.opened.borrowed and row.accepted_at >= now - RECENT_S),
            key=lambda row: row.accepted_at,
        )
        still_open = [_as_opened(row) for row in self.rows.values() if not row.outcome]
        return Past(
            tuple(still_open),
            tuple((tenant, DAY, tokens) for tenant, tokens in sorted(charged.items())),
            tuple((row.opened.tenant, now - row.accepted_at, row.charged_tokens) for row in recent),
        )


def _as_opened(row: LedgerRow) -> Opened:
    opened = row.opened
    ask = Ask(row.prompt_tokens, row.output_tokens, opened.ask.kv_blocks, opened.ask.output_tokens_max)
    return msgspec.structs.replace(opened, ask=ask, again=False)
