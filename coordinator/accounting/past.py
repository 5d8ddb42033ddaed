"""Makes the bills, charges and rates of a coordinator that starts from rows of its ledger. Pure.

**No row keeps a coordinator from starting.** Other programs may have written to the store, and disks fail. So a row that this
program would not write is left out and counted.
"""

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from coordinator.accounting.billing import Opened, Past
from coordinator.accounting.quota import Ask
from proto.fields import Count, RequestId, Text

OPEN_MAX: Final = 1 << 17  # open rows taken over at a start
RECENT_MAX: Final = 1 << 18
RECENT_S: Final = 60.0
_EPOCH: Final = date(1970, 1, 1).toordinal()
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


def past_of(
    opened: Iterable[object], totals: Iterable[object], recent: Iterable[object], today: int, unix_s: float
) -> tuple[Past, int]:
    """Returns what these rows say: bills of open requests, the charges of `today` and the last minute before `unix_s`. And how
    many rows were left out."""
    left_out: list[object] = []

    def checked(kind: type[R], rows: Iterable[object]) -> Iterator[R]:
        for row in rows:
            try:
                yield msgspec.convert(row, kind)
            except msgspec.ValidationError:
                left_out.append(row)

    def bills() -> Iterator[Opened]:
        for row in checked(_OpenRow, opened):
            try:
                day = date.fromisoformat(row.day).toordinal() - _EPOCH
            except ValueError:
                left_out.append(row)
                continue
            ask = Ask(row.prompt_tokens, row.output_tokens, row.kv_blocks, row.output_tokens_max)
            names = (row.tenant, row.model, row.priority_class)
            yield Opened(row.request_id, day, *names, bool(row.borrowed), ask, from_token=row.from_token)

    by_id = {bill.request_id: bill for bill in bills()}
    charged = [(row.tenant, today, row.charged_tokens) for row in checked(_TotalRow, totals)]
    last = [(row.tenant, unix_s - row.accepted_s, row.charged_tokens) for row in checked(_RecentRow, recent)]
    return Past(tuple(by_id.values()), tuple(charged), tuple(last)), len(left_out)
