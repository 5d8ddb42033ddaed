"""`crossdock usage` and `crossdock tenants`, and how `serve` hands a tenants file on."""

import asyncio
import csv
import hashlib
import io
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.accounting.billing import Closed, Entry, Opened
from coordinator.accounting.ledger import Ledger
from coordinator.accounting.quota import Ask
from coordinator.accounting.sqlite_store import SqliteStore
from launcher.admin.usage import NoLedger, UsageSettings, add_limits, read, run, show
from launcher.local import cluster as clusters
from launcher.process import child_environment
from runtime.settings.options import SettingsError
from runtime.settings.serve import ServeSettings
from runtime.tenancy.tenants import parse
from tests.launcher.built import build

DAY = 20_778  # 2026-11-21


def opened(name: str, tenant: str, day: int = DAY) -> Opened:
    return Opened(name, day, tenant, "m", "standard", False, Ask(100, 50, 3))


def closed(name: str, outcome: str = "finished") -> Closed:
    return Closed(name, outcome, 90, 60, 40, 30, 10.0, 20.0, 30.0, 40.0)


@pytest.fixture
def event_log(tmp_path: Path) -> str:
    path = tmp_path / "usage.sqlite"
    entries: list[Entry] = [
        opened("r1", "acme/ann"),
        closed("r1"),
        opened("r2", "acme/ann"),
        closed("r2", "cancelled"),
        opened("r3", "acme/ann"),
        opened("r4", "acme"),
        opened("r5", "acmeologists"),
        opened("r6", "acme/ann", DAY + 1),
    ]

    async def body() -> None:
        ledger = Ledger(SqliteStore(path), on_committed=lambda ids: None, on_failed=lambda error: None)
        await ledger.start(DAY)
        for entry in entries:
            ledger.write(entry)
        await ledger.close()

    asyncio.run(body())
    return str(path)


def test_usage_shows_limits_and_what_is_left(event_log: str, tmp_path: Path) -> None:
    """Limits are those of the tenants file; what is left today is the least that tenant or organisation leaves."""
    entries = read(UsageSettings(db=event_log))
    tenants = parse(
        "[tenants.acme.limits]\ntokens_per_day = 500\nconcurrency = 4\n"
        "[tenants.acme.users.ann]\nlimits = { tokens_per_day = 400 }\n"
    )
    add_limits(entries, tenants, "2026-11-21")
    found = {(entry["day"], entry["tenant"]): (entry["limits"], entry["left_today"]) for entry in entries}
    assert found["2026-11-21", "acme/ann"] == ({"tokens_per_day": 400}, 20)  # 480 of 500 are used by acme, 330 by ann
    assert found["2026-11-21", "acme"] == ({"tokens_per_day": 500, "concurrency": 4}, 20)
    assert found["2026-11-22", "acme/ann"][1] is None and found["2026-11-21", "acmeologists"] == ({}, None)


def test_usage_as_csv(event_log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """CSV has a header and a line for each day and tenant."""
    assert run(UsageSettings(db=event_log, as_csv=True)) == 0
    first, *rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert len(rows) == 3 and first["tenant"] == "acme" and first["outcomes"] == "1 open"


def test_usage_sums_include_open_requests(event_log: str) -> None:
    """Sums by day and tenant include open requests at their estimate."""
    first = read(UsageSettings(db=event_log, tenant="acme/ann"))[0]
    assert first["outcomes"] == {"finished": 1, "cancelled": 1, "open": 1}
    assert (first["requests"], first["open"], first["charged_tokens"]) == (3, 1, 2 * 90 + 150)
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (120, 80, 60)
    assert (first["queue_ms_mean"], first["decode_ms_mean"]) == (10.0, 40.0)


@pytest.mark.parametrize("value", [-1, 2**63 - 1, 1e300, "many", b"\0", float("inf")])
@pytest.mark.parametrize(
    "column", ["day", "tenant", "outcome", "borrowed", "charged_tokens", "prompt_tokens", "cached_tokens", "queue_ms"]
)
def test_odd_rows_do_not_hide_others(event_log: str, column: str, value: object) -> None:
    """A row with an odd value does not keep the other rows from being shown."""
    with closing(sqlite3.connect(event_log)) as db:
        db.execute(f"UPDATE usage SET {column} = ? WHERE request_id IN ('r1', 'r3')", (value,))
        db.commit()
    entries = read(UsageSettings(db=event_log))
    json.dumps(entries)
    show(entries, Console(file=io.StringIO()))
    others = [entry for entry in entries if entry["tenant"] == "acmeologists"]
    assert [entry["charged_tokens"] for entry in others] == [150]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["21 acme", "21 acme/ann", "21 acmeologists", "22 acme/ann"]),
        ({"tenant": "acme"}, ["21 acme", "21 acme/ann", "22 acme/ann"]),
        ({"since": "2026-11-22"}, ["22 acme/ann"]),
        ({"since": "2026-11-22", "tenant": "acmeologists"}, []),
        ({"tenant": "acme/an_"}, []),
    ],
)
def test_usage_filters_by_day_and_tenant(event_log: str, options: dict[str, str], expected: list[str]) -> None:
    """Only the days and tenants asked for are shown."""
    entries = read(UsageSettings(db=event_log, **options))  # type: ignore[arg-type]
    assert [f"{entry['day'][-2:]} {entry['tenant']}" for entry in entries] == expected
    out = io.StringIO()
    show(entries, Console(file=out, width=200))
    assert all(f"{90 * 2 + 150}" in out.getvalue() for entry in entries if entry["charged_tokens"] == 330)
    assert ("Nothing was used" in out.getvalue()) == (not expected)


def test_missing_ledger_names_its_path(tmp_path: Path) -> None:
    """A missing or foreign ledger file is refused with its path."""
    with pytest.raises(NoLedger, match=r"no ledger at .*none\.sqlite"):
        read(UsageSettings(db=str(tmp_path / "none.sqlite")))
    other = tmp_path / "other"
    other.write_bytes(b"something else" * 100)
    with pytest.raises(NoLedger, match="not a database"):
        read(UsageSettings(db=str(other)))


def crossdock(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli", *arguments],
        env={**child_environment(1), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_usage_json_is_for_programs(event_log: str) -> None:
    """usage --json prints the entries of the day as JSON."""
    done = crossdock("usage", "--db", event_log, "--since", "2026-11-22", "--json")
    assert [entry["tenant"] for entry in json.loads(done.stdout)] == ["acme/ann"], done.stderr


def test_new_key_comes_with_file_lines(tmp_path: Path) -> None:
    """A new key is printed with lines for the tenants file that make it valid."""
    done = crossdock("tenants", "key", "acme.org/ann")
    (key,) = re.findall(r"sk-[0-9a-f]{64}", done.stdout)
    lines = done.stdout.split("For the tenants file:")[1]
    tenants = parse(lines)
    assert tenants.keys.get(hashlib.sha256(key.encode()).digest()) == "acme.org/ann"
    file = tmp_path / "tenants.toml"
    file.write_text(lines)
    checked = crossdock("tenants", "check", str(file))
    assert checked.returncode == 0 and "acme.org/ann" in checked.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("usage", "--since", "yesterday"), "crossdock: --since: yesterday is not a day like"),
        (("tenants", "key", "a/b/c"), "crossdock: ORG[/USER]: a/b/c is not ORG or ORG/USER"),
        (("tenants", "key"), "crossdock: ORG[/USER]: needed"),
        (("tenants", "check", "/no/such/file"), "crossdock: /no/such/file: No such file"),
    ],
)
def test_usage_mistakes_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    """A mistake in the arguments gives one line and status 2."""
    done = crossdock(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1


def environments(cluster: clusters.LocalAddresses) -> dict[str, str]:
    """API keys that each process finds in its environment."""
    return {spec.name: spec.environment.get("CROSSDOCK_API_KEYS", "") for spec in cluster.processes}


def test_serve_passes_the_tenants_file_on(tmp_path: Path) -> None:
    """serve passes the tenants file to gateway and coordinator and makes a key of its own."""
    file = tmp_path / "tenants.toml"
    file.write_text(f"[tenants.a]\nkeys = ['{hashlib.sha256(b'k').hexdigest()}']")
    cluster = build(ServeSettings(port=0, tenants=str(file), usage_db=str(tmp_path / "u")))
    arguments = {spec.name: " ".join(spec.arguments) for spec in cluster.processes}
    assert f"--tenants {file}" in arguments["gateway-0"] and f"--tenants {file}" in arguments["coordinator"]
    assert f"--usage-db {tmp_path / 'u'}" in arguments["coordinator"]
    assert len(cluster.key) == 64 and environments(cluster)["gateway-0"] == cluster.key
    assert cluster.key not in " ".join(arguments.values())
    file.write_text("[tenants.a]")
    assert build(ServeSettings(port=0, tenants=str(file))).key == ""


def test_serve_refuses_bad_tenants_file(tmp_path: Path) -> None:
    """serve refuses a bad tenants file with the key that is wrong."""
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.a]\nweight = 0")
    with pytest.raises(SettingsError, match=r"--tenants: .*tenants\.a\.weight: must be > 0"):
        build(ServeSettings(port=0, tenants=str(file)))
