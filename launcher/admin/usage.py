"""`crossdock usage`: what tenants used, from the coordinator's ledger, by day."""

import json
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, Field
from rich.console import Console

from launcher import tables
from launcher.local import registry
from proto.errors import CrossdockError
from runtime.settings.types import JsonOption

_BUSY_TIMEOUT_S = 5.0
_QUERY = """
SELECT day, tenant, COUNT(*), COUNT(*) - COUNT(outcome), {borrowed}, {charged_tokens}, {prompt_tokens}, {cached_tokens},
    {output_tokens}, AVG(queue_ms), AVG(prefill_ms), AVG(transfer_ms), AVG(decode_ms)
FROM usage WHERE day >= ? {tenant} AND typeof(day) = 'text' AND typeof(tenant) = 'text'
GROUP BY day, tenant ORDER BY day, tenant
"""
# TOTAL, because SUM fails where odd rows are too large, and gives no number for no rows.
_SUMS = {name: f"CAST(TOTAL({name}) AS INTEGER)" for name in ("borrowed", "charged_tokens", "cached_tokens")} | {
    name: f"CAST(TOTAL(CASE WHEN outcome IS NULL THEN 0 ELSE {name} END) AS INTEGER)"
    for name in ("prompt_tokens", "output_tokens")
}
_OUTCOMES = """
SELECT day, tenant, COALESCE(CAST(outcome AS TEXT), 'open'), COUNT(*) FROM usage WHERE day >= ? {tenant}
GROUP BY day, tenant, outcome
"""
_COLUMNS = (
    "day tenant requests open borrowed charged_tokens prompt_tokens cached_tokens output_tokens"
    " queue_ms_mean prefill_ms_mean transfer_ms_mean decode_ms_mean"
).split()


class NoLedger(CrossdockError):
    """There is no ledger where one was looked for, or it is something else."""


def _check_day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat() if value else value
    except ValueError:
        raise ValueError("is not a day like 2026-11-21") from None


Day = Annotated[str, AfterValidator(_check_day)]


class UsageSettings(JsonOption):
    """Show what tenants used, by day (UTC), from the ledger that a coordinator writes with --usage-db.

    Open requests are charged at their estimate until they end. Times are means over ended requests, in milliseconds.
    """

    db: str = Field("", description="The ledger; empty: where crossdock serve --tenants writes.")
    since: Day = Field("", description="This day and all after it, as 2026-11-21; empty: all days.")
    tenant: str = Field("", description="One tenant, or an organisation with its users.")


def read(settings: UsageSettings) -> list[dict[str, Any]]:
    """Usage by day and tenant. Raises `NoLedger`."""
    path = Path(settings.db or registry.default_db()).expanduser()
    if not path.is_file():
        raise NoLedger(f"--db: there is no ledger at {path}; a coordinator writes one with --usage-db")
    tenant = settings.tenant
    only = "AND (tenant = ? OR substr(tenant, 1, ?) = ?)" if tenant else ""
    parameters: list[Any] = [settings.since, *([tenant, len(tenant) + 1, tenant + "/"] if tenant else [])]
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)) as db, db:
            rows = db.execute(_QUERY.format(tenant=only, **_SUMS), parameters).fetchall()
            outcomes = db.execute(_OUTCOMES.format(tenant=only), parameters).fetchall()
    except sqlite3.Error as error:
        raise NoLedger(f"--db: {path}: {error}") from None
    entries = {row[:2]: {**dict(zip(_COLUMNS, row, strict=True)), "outcomes": {}} for row in rows}
    for day, name, outcome, count in outcomes:
        # A row that was written between the two queries is left out here, and is there next time.
        if (day, name) in entries:
            entries[day, name]["outcomes"][outcome] = count
    return list(entries.values())


def run(settings: UsageSettings) -> int:
    entries = read(settings)
    if settings.as_json:
        sys.stdout.write(json.dumps(entries, indent=2) + "\n")
    else:
        show(entries, tables.console())
    return 0


def show(entries: Iterable[dict[str, Any]], console: Console) -> None:
    counted = ("requests", "charged", "prompt", "cached", "output")
    timed = ("queue ms", "prefill ms", "transfer ms", "decode ms")
    table = tables.Table("Usage, in tokens", "day", "tenant", *counted, *timed, tables.words("ended as"), keys=2)
    for entry in entries:
        counts = [f"{entry[key]:,}" for key in ("requests", "charged_tokens")]
        counts += [f"{entry[f'{kind}_tokens']:,}" for kind in ("prompt", "cached", "output")]
        means = [entry[f"{phase}_ms_mean"] for phase in ("queue", "prefill", "transfer", "decode")]
        outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(entry["outcomes"].items()))
        times = ("-" if ms is None else f"{ms:,.0f}" for ms in means)
        table.row(entry["day"], entry["tenant"], *counts, *times, outcomes)
    if table.rows:
        table.show(console)
    else:
        console.print("Nothing was used.")
