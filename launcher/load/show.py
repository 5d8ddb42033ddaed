"""The output of a run."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from launcher import tables
from launcher.load.figures import METRICS, RANKS

LATE_MS_BAD = 10.0


def number(value: float | None, digits: int = 1) -> str:
    """Returns the number without a fraction if it has four digits or more."""
    return "–" if value is None else f"{value:,.{0 if abs(value) >= 1000 else digits}f}"


def show(figures: Mapping[str, Any], console: Console) -> None:
    """All tables of one run."""
    _latencies(figures["latency"], console)
    _goodput(figures, console)
    if len(figures["fairness"]["tenants"]) > 1:
        _fairness(figures["fairness"], console)
    if figures["priorities"]:
        _priorities(figures["priorities"], console)
    _honesty(figures, console)


def _latencies(latency: Mapping[str, Any], console: Console) -> None:
    rows = tables.Table("Latency at the client, ms", "", "mean", *(f"p{rank}" for rank in RANKS), "max", "count")
    for metric, name in METRICS.items():
        row = latency[metric]
        if row is not None:
            shown = (number(row[key]) for key in ("mean", *(f"p{rank}" for rank in RANKS), "max"))
            rows.row(name, *shown, f"{row['count']:,}")
    rows.show(console)


def _goodput(figures: Mapping[str, Any], console: Console) -> None:
    goodput, throughput = figures["goodput"], figures["throughput"] or {}
    limits = ", ".join(f"{name.upper()} {value:g} ms" for name, value in goodput["limits_ms"].items() if value)
    share = number(goodput["attainment"] and 100 * goodput["attainment"])
    console.print(
        f"Goodput: [bold]{number(goodput['requests_per_s'], 2)} requests/s[/bold],"
        f" {goodput['good']} of {goodput['judged']} ({share} %) within {limits}",
        highlight=False,
    )
    if goodput["missed"]:
        missed = ", ".join(f"{name} {count}" for name, count in sorted(goodput["missed"].items()))
        console.print(f"  missed by: {missed}", highlight=False)
    console.print(
        f"Throughput: {number(throughput.get('requests_per_s'), 2)} requests/s of"
        f" {number(throughput.get('offered_requests_per_s'), 2)} offered,"
        f" {number(throughput.get('output_tokens_per_s'))} output and"
        f" {number(throughput.get('prompt_tokens_per_s'))} prompt tokens/s"
        f" ({number(throughput.get('cached_tokens_per_s'))} cached), over {figures['seconds']:.1f} s",
        highlight=False,
    )
    outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["outcomes"].items()))
    console.print(f"Ended: {outcomes}; {figures['warmup_requests']} of the warm-up not counted", highlight=False)
    for kind in figures["errors"]:
        if kind in figures["error_details"]:
            console.print(f"  {kind}: {escape(figures['error_details'][kind])}", highlight=False)
    retry = figures["retry_after_s"]
    if retry:
        console.print(
            f"  Retry-After in {retry['count']} answers: p50 {retry['p50']:g} s, max {retry['max']:g} s",
            highlight=False,
        )


def _fairness(fairness: Mapping[str, Any], console: Console) -> None:
    title = "Tenants (service: prompt tokens + 2 × answer tokens, by weight; times in ms)"
    headings = ("asked", "ok", "service", "served %", "TTFT p50", "TTFT p99", "ITL p99", "good %")
    rows = tables.Table(title, "", *headings)
    for name, row in fairness["tenants"].items():
        ttft, itl, good = row["ttft_ms"] or {}, row["itl_ms"] or {}, row["goodput"]["attainment"]
        rows.row(
            name,
            str(row["requests"]),
            str(row["outcomes"].get("ok", 0)),
            number(row["service_per_weight"], 0),
            number(row["served_share"] and 100 * row["served_share"], 0),
            *(number(value) for value in (ttft.get("p50"), ttft.get("p99"), itl.get("p99"))),
            number(good and 100 * good),
        )
    rows.show(console)
    console.print(
        f"Jain's index: {number(fairness['jain_service_per_weight'], 3)} of service per weight,"
        f" {number(fairness['jain_served_share'], 3)} of what each got of what it asked",
        highlight=False,
    )


def _priorities(priorities: Mapping[str, Any], console: Console) -> None:
    rows = tables.Table(
        "Priorities (times in ms)", "", "asked", "ok", "TTFT p50", "TTFT p99", "ITL p99", "good %", "good/s"
    )
    for name, row in priorities.items():
        ttft, itl, good = row["ttft_ms"] or {}, row["itl_ms"] or {}, row["goodput"]
        rows.row(
            name,
            str(row["requests"]),
            str(row["outcomes"].get("ok", 0)),
            *(number(value) for value in (ttft.get("p50"), ttft.get("p99"), itl.get("p99"))),
            number(good["attainment"] and 100 * good["attainment"]),
            number(good["requests_per_s"], 2),
        )
    rows.show(console)


def _honesty(figures: Mapping[str, Any], console: Console) -> None:
    """Prints the generator's own delays, and how far lengths were from the plan."""
    late, lengths = figures["late_ms"], figures["lengths"]
    if late:
        mark = "yellow" if late["p99"] > LATE_MS_BAD else "dim"
        console.print(
            f"[{mark}]The generator itself fell behind by {late['p50']:.1f} ms (p50), {late['p99']:.1f} ms (p99),"
            f" {late['max']:.1f} ms at most[/{mark}]",
            highlight=False,
        )
    if lengths["prompt_mean"] is not None:
        console.print(
            f"[dim]Lengths as the server counts: prompts {lengths['prompt_mean']:.1f} tokens on average, off the plan by"
            f" {lengths['prompt_off_mean']:.1f} (mean) and {lengths['prompt_off_max']} (most); answers"
            f" {lengths['output_mean']:.1f}, {100 * lengths['output_exact_share']:.1f} % as long as planned;"
            f" {number(figures['tokens_per_chunk'], 2)} tokens per chunk[/dim]",
            highlight=False,
        )
