"""`crossdock usage`: what tenants used, from the coordinator's ledger, by day."""

import csv
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, Field
from rich.console import Console

from launcher import tables
from launcher.local import registry
from proto.errors import CrossdockError
from runtime.settings.addresses import check_database
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption
from runtime.storage.errors import StorageError
from runtime.tenancy import file
from runtime.tenancy.tenants import Tenants, TenantsError

_BUSY_TIMEOUT_S = 5.0
_ANSWER_S = 60.0
_QUERY = """
SELECT day, tenant, COUNT(*), COUNT(*) - COUNT(outcome), {borrowed}, {charged_tokens}, {prompt_tokens}, {cached_tokens},
    {output_tokens}, AVG(queue_ms), AVG(prefill_ms), AVG(transfer_ms), AVG(decode_ms)
FROM usage WHERE day >= ? {tenant} {of_text}
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

    db: str = Field(
        "", description="The ledger, a file or the URL of --database; empty: where crossdock serve --tenants writes."
    )
    since: Day = Field("", description="This day and all after it, as 2026-11-21; empty: all days.")
    tenant: str = Field("", description="One tenant, or an organisation with its users.")
    tenants: str = Field(
        "", description="The tenants file: also show limits, and what is left of tokens_per_day today."
    )
    as_csv: bool = Field(False, description="Print CSV on stdout.", json_schema_extra={"option": "--csv"})


def read(settings: UsageSettings) -> list[dict[str, Any]]:
    """Usage by day and tenant. Raises `NoLedger`."""
    tenant = settings.tenant
    only = "AND (tenant = ? OR substr(tenant, 1, length(?)) = ?)" if tenant else ""
    parameters: list[Any] = [settings.since, *([tenant, tenant + "/", tenant + "/"] if tenant else [])]
    in_postgres = settings.db.startswith("postgres")
    # Other programs may have written to a file, and SQLite checks no types.
    of_text = "" if in_postgres else "AND typeof(day) = 'text' AND typeof(tenant) = 'text'"
    queries = _QUERY.format(tenant=only, of_text=of_text, **_SUMS), _OUTCOMES.format(tenant=only)
    rows, outcomes = (_from_postgres if in_postgres else _from_file)(settings.db, queries, parameters)
    entries = {row[:2]: {**dict(zip(_COLUMNS, row, strict=True)), "outcomes": {}} for row in rows}
    for day, name, outcome, count in outcomes:
        # A row that was written between the two queries is left out here, and is there next time.
        if (day, name) in entries:
            entries[day, name]["outcomes"][outcome] = count
    return list(entries.values())


def _from_file(db: str, queries: Iterable[str], parameters: Sequence[Any]) -> list[list[Any]]:
    path = Path(db or registry.default_db()).expanduser()
    if not path.is_file():
        raise NoLedger(f"--db: there is no ledger at {path}; a coordinator writes one with --usage-db")
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)) as read,
            read,
        ):
            return [read.execute(query, parameters).fetchall() for query in queries]
    except sqlite3.Error as error:
        raise NoLedger(f"--db: {path}: {error}") from None


def _from_postgres(url: str, queries: Iterable[str], parameters: Sequence[Any]) -> list[list[Any]]:
    try:
        check_database("--db", url)
        from coordinator.postgres.database import translated
        from runtime.storage.postgres import PostgresSession

        with PostgresSession(url, _ANSWER_S).transaction() as read:
            translations = [translated(query.replace("TOTAL(", "SUM(")) for query in queries]
            return [read.execute(query, parameters).fetchall() for query in translations]
    except ImportError as error:
        raise NoLedger(f"--db: needs psycopg 3; install crossdock[postgresql] ({error})") from None
    except ValueError as error:
        raise NoLedger(str(error)) from None
    except StorageError as error:
        raise NoLedger(f"--db: {error}") from None


def add_limits(entries: Sequence[dict[str, Any]], tenants: Tenants, today: str) -> None:
    """Adds each tenant's own limits, and the tokens that its limits and its organisation's leave it today."""
    used: Counter[str] = Counter()
    for entry in entries:
        if entry["day"] == today:
            organisation, _, _ = entry["tenant"].partition("/")
            used.update(dict.fromkeys({organisation, entry["tenant"]}, entry["charged_tokens"]))
    for entry in entries:
        policy = tenants.policy(entry["tenant"])
        levels = policy.levels if policy is not None else ()
        own = vars(levels[0].limits) if levels else {}
        entry["limits"] = {name: value for name, value in own.items() if value is not None}
        left = [most - used[level.name] for level in levels if (most := level.limits.tokens_per_day) is not None]
        entry["left_today"] = max(min(left), 0) if left and entry["day"] == today else None


def run(settings: UsageSettings) -> int:
    """Raises `NoLedger` or `SettingsError`."""
    try:
        tenants = file.read(Path(settings.tenants).expanduser()) if settings.tenants else None
    except TenantsError as error:
        raise SettingsError("\n".join(f"--tenants: {line}" for line in str(error).splitlines())) from None
    # An organisation's other users take from its limits, too.
    entries = read(settings.model_copy(update={"tenant": settings.tenant.partition("/")[0]}) if tenants else settings)
    if tenants is not None:
        add_limits(entries, tenants, f"{datetime.now(UTC):%Y-%m-%d}")
        entries = (
            [entry for entry in entries if f"{entry['tenant']}/".startswith(f"{settings.tenant}/")]
            if settings.tenant
            else entries
        )
    if settings.as_json:
        sys.stdout.write(json.dumps(entries, indent=2) + "\n")
    elif settings.as_csv:
        more = ["limits", "left_today"] if tenants is not None else []
        writer = csv.DictWriter(sys.stdout, [*_COLUMNS, "outcomes", *more], lineterminator="\n")
        writer.writeheader()
        for entry in entries:
            texts = {key: _counts(entry[key]) for key in ("outcomes", "limits") if key in entry}
            writer.writerow(entry | texts)
    else:
        show(entries, tables.console())
    return 0


def show(entries: Iterable[dict[str, Any]], console: Console) -> None:
    counted = ("requests", "charged", "prompt", "cached", "output")
    timed = ("queue ms", "prefill ms", "transfer ms", "decode ms")
    entries = list(entries)
    has_limits = any("limits" in entry for entry in entries)
    more = (tables.words("limits"), "left today") if has_limits else ()
    table = tables.Table("Usage, in tokens", "day", "tenant", *counted, *timed, tables.words("ended as"), *more, keys=2)
    for entry in entries:
        counts = [f"{entry[key]:,}" for key in ("requests", "charged_tokens")]
        counts += [f"{entry[f'{kind}_tokens']:,}" for kind in ("prompt", "cached", "output")]
        means = [entry[f"{phase}_ms_mean"] for phase in ("queue", "prefill", "transfer", "decode")]
        times = ("-" if ms is None else f"{ms:,.0f}" for ms in means)
        left = entry.get("left_today")
        limits = (_counts(entry["limits"]), "-" if left is None else f"{left:,}") if has_limits else ()
        table.row(entry["day"], entry["tenant"], *counts, *times, _counts(entry["outcomes"]), *limits)
    if table.rows:
        table.show(console)
    else:
        console.print("Nothing was used.")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
