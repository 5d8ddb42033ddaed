"""Every table of the command line at 80 columns, in a narrow terminal and in a pipe: whole, so that an id can be copied."""

import ast
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from lab.commands import check as tune_check
from lab.commands import show as tune_show
from lab.commands import simulate as simulate_load
from lab.commands.profiles.show import show as show_profile
from launcher import config, rollout, tables
from launcher.admin import explain_words, policy, status, tenants, usage
from launcher.bench import agents as bench_agents
from launcher.bench import compare as bench_compare
from launcher.bench import continuity as bench_continuity
from launcher.bench import isolation as bench_isolation
from launcher.bench import ratio as bench_ratio
from launcher.cluster import check as cluster_check
from launcher.load import show as load_show
from launcher.models import commands as model_commands
from launcher.tables import Table
from proto.policy import ArmStatus
from tests.lab.profiles import GPU
from tests.launcher import tables_shown as shown

ROOT = Path(__file__).parents[2]
SHOWN: dict[str, Callable[[Console], Any]] = {
    "bench.agents": lambda c: bench_agents.show(shown.AGENTS, c),
    "bench.compare": lambda c: bench_compare.show(shown.DIFFERENCES, shown.COMPARED, c),
    "bench.continuity": lambda c: bench_continuity.show(shown.CONTINUITY, c),
    "bench.ratio": lambda c: bench_ratio.show(shown.RATIOS, c),
    "bench.isolation": lambda c: bench_isolation.show_isolation(shown.ISOLATION, c),
    "config": lambda c: config.listed(shown.OPTIONS).show(c),
    "models.commands": lambda c: shown.model_table(model_commands.listed()).show(c),
    "cluster.check": lambda c: cluster_check._table("node-0 (10.0.0.1)", shown.PLANNED).show(c),
    "admin.explain_words": lambda c: (
        explain_words.show_felt(shown.FELT, shown.WORST, shown.WORST, "ttft", c),
        explain_words.show_timeline(shown.REQUEST, shown.STORY, c),
    ),
    "load.show": lambda c: load_show.show(shown.FIGURES, c),
    "admin.policy": lambda c: (policy.listed(shown.POLICIES).show(c), policy.compared(shown.POLICIES, None).show(c)),
    "rollout": lambda c: rollout.revisions(shown.REVISIONS).show(c),
    "lab.commands.simulate": lambda c: simulate_load.show(shown.LOADED, c),
    "admin.status": lambda c: (status.show(shown.REPORT, c), status.show(shown.REPORT, c, wide=True)),
    "admin.tenants": lambda c: tenants.show(shown.TENANTS, c),
    "admin.usage": lambda c: usage.show(shown.USAGE, c),
    "lab.commands.profiles.show": lambda c: show_profile(GPU, c),
    "lab.commands.check": lambda c: tune_check.show(shown.CHECKED, c),
    "lab.commands.show": lambda c: (
        tune_show._ranked(shown.RANKED, c),
        tune_show._by_workers(shown.TUNED, c),
        tune_show._what_if(shown.TUNED, c),
    ),
}


def test_all_tables_use_the_helper() -> None:
    """Every table of the launcher and the lab is made by the helper and tested here."""
    makers = set()
    for path in (path for package in ("launcher", "lab") for path in sorted((ROOT / package).rglob("*.py"))):
        if path.name in ("tables.py", "top.py"):  # top draws a whole screen again and again
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not any(isinstance(n, ast.ImportFrom) and n.module == "rich.table" for n in ast.walk(tree)), path
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if {"tables.Table", "Table"} & set(calls):
            makers.add(".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("launcher."))
    assert makers == set(SHOWN)


def test_dashes_of_a_comparison_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """policy compare says why it shows dashes: no request of that arm has finished."""
    arms = (ArmStatus("active", 4, 4, 4, 40.0, 40.0), ArmStatus("candidate", 1))
    monkeypatch.setattr(policy, "_ask", lambda *_: msgspec.structs.replace(shown.POLICIES, arms=arms))
    assert policy.compare(policy.PolicyCompareSettings(for_s=0)) == 0
    said = capsys.readouterr().out
    assert said.endswith("–: no request of arm candidate has come and finished since the trial began.\n")
    assert said.count("no request") == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """The tables that were shown."""
    found: list[Table] = []
    show = Table.show
    monkeypatch.setattr(Table, "show", lambda self, console: (found.append(self), show(self, console)))
    return found


def printed(name: str, width: int, *, terminal: bool) -> str:
    out = io.StringIO()
    colours = {"force_terminal": True, "color_system": "truecolor"} if terminal else {}
    SHOWN[name](Console(file=out, width=width, **colours) if terminal else tables.console(file=out))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("name", SHOWN)
def test_terminal_table_fits_uncut(name: str, width: int, made: list[Table]) -> None:
    """A table on a terminal fits its width and cuts nothing."""
    text = re.sub(r"\x1b\[[\d;]*m", "", printed(name, width, terminal=True))
    assert made and "…" not in text
    lines = text.splitlines()
    if width == 80:
        assert max(map(len, lines)) <= 80, max(lines, key=len)
    words = set(text.split())
    for table in made:
        assert table.rows
        for cells, _ in table.rows:
            for cell, column in zip(cells, table.columns, strict=True):
                if column.folds:
                    assert set(cell.split()) <= words, cell
                else:
                    assert any(cell in line for line in lines), cell


@pytest.mark.parametrize("name", SHOWN)
def test_piped_table_is_plain(name: str, made: list[Table]) -> None:
    """A table in a pipe is plain text with one line per row."""
    text = printed(name, 80, terminal=False)
    assert "\x1b" not in text and not re.search(r"[─-╿…]", text)
    lines = text.splitlines()
    for table in made:
        for cells, _ in table.rows:
            row = [cell for cell in cells if cell]
            gaps = r" {2,}"
            pattern = r"\s*" + gaps.join(map(re.escape, row))
            assert any(re.fullmatch(pattern, line) for line in lines), row


def test_wide_ids_are_left_whole() -> None:
    """Ids wider than the terminal are printed whole."""
    table = Table("", "request", "waited s", tables.words("tenant"))
    table.row("chatcmpl-" + "a" * 60, "1.250", "an organisation")
    out = io.StringIO()
    table.show(Console(file=out, width=40, force_terminal=True))
    assert "chatcmpl-" + "a" * 60 in out.getvalue() and "waited s  1.250" in out.getvalue()


def test_key_columns_are_in_every_part() -> None:
    """Each part of a split table repeats the key columns."""
    table = Table("Sums", "day", "tenant", *(f"figure {n}" for n in range(12)), keys=2)
    table.row("2026-11-21", "acme/ann", *(f"{10**n:,}" for n in range(12)))
    out = io.StringIO()
    table.show(Console(file=out, width=80, force_terminal=True))
    rows = [line for line in out.getvalue().splitlines() if "2026-11-21" in line]
    assert len(rows) > 1 and all("acme/ann" in row for row in rows)
    assert [cell for row in rows for cell in row.split()[2:]] == [f"{10**n:,}" for n in range(12)]
