"""`crossdock bench serve --start 1P1D,2P1D`: the same load on each ratio of prefill to decode workers in turn.

The same seed makes the same requests at the same times; only the workers differ. It prints the figures measured at the client,
and from the coordinator's event log how long requests were queued.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import uvloop
from rich.console import Console

from launcher import reports, tables
from launcher.bench import serve
from launcher.bench.serve import check_files, measure, started
from launcher.load import plan, plot, records
from launcher.load.records import RunFile
from launcher.load.settings import ServeBenchSettings
from launcher.load.show import number
from launcher.load.tenants import Ratio
from launcher.local.lifetime import until_interrupted
from launcher.models import resolve
from runtime.process.exits import INTERRUPTED_EXIT

SERVED_SHARE: Final = 0.9  # of requests; a limit that fewer meet has failed, and goodput is quoted at this share


def run(settings: ServeBenchSettings) -> int:
    if len(settings.start) < 2:
        return serve.run(settings)
    check_files(settings)
    plan.make_plan(settings, plan.tenants_of(settings), 0)  # a bad trace is told before minutes are spent
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: ServeBenchSettings, console: Console) -> int:
    model = resolve.ready(settings.model, "", console)
    tenants = plan.tenants_of(settings)
    results: dict[str, RunFile] = {}
    for text in settings.start:
        ratio = Ratio.parse(text)
        console.print(f"[bold]{ratio}[/bold]", highlight=False)
        async with started(settings, ratio, tenants, model, console) as site:
            results[str(ratio)] = await measure(settings, site, "", console)
        if results[str(ratio)].about["interrupted"]:
            break
    rows = [row(name, result.figures) for name, result in results.items()]
    show(rows, console)
    if settings.as_json:
        sys.stdout.write(records.encoded({"ratios": rows, "runs": results}))
    if settings.plot:
        plot.draw(settings.plot, list(results.items()))
    return INTERRUPTED_EXIT if any(result.about["interrupted"] for result in results.values()) else 0


def row(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    latency, goodput = figures["latency"], figures["goodput"]
    return {
        "ratio": name,
        "goodput_requests_per_s": goodput["requests_per_s"],
        "attainment": goodput["attainment"],
        **{
            f"{metric.removesuffix('_ms')}_{rank}_ms": latency[metric] and latency[metric][rank]
            for metric in ("ttft_ms", "itl_ms", "tpot_ms", "queue_ms")
            for rank in ("p50", "p99")
        },
        "fails": failing(goodput),
        "bottleneck": bottleneck(figures),
    }


def failing(goodput: Mapping[str, Any]) -> list[str]:
    """The limits that too many requests missed, the worst first."""
    most = (1 - SERVED_SHARE) * goodput["judged"]
    missed = sorted(goodput["missed"].items(), key=lambda item: -item[1])
    return [name for name, count in missed if count > most]


def bottleneck(figures: Mapping[str, Any]) -> str:
    """Returns the phase with the larger ratio of p90 to its limit, or "nothing" if both are within their limits.

    First tokens wait for prefill, later ones for decode.
    """
    limits, latency = figures["goodput"]["limits_ms"], figures["latency"]
    strain = {}
    for phase, metric, limit in (("prefill", "ttft_ms", "ttft"), ("decode", "tpot_ms", "tpot")):
        if latency[metric] and limits[limit]:
            strain[phase] = latency[metric]["p90"] / limits[limit]
    if not strain:
        return "unknown"
    worst = max(strain, key=lambda phase: strain[phase])
    return worst if strain[worst] > 1 else "nothing"


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    headings = ("good/s", "%", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "queue")
    texts = (tables.words(heading) for heading in ("fails", "short of"))
    shown = tables.Table("Goodput by ratio; times in ms, queue p50", "", *headings, *texts)
    best = max((one["goodput_requests_per_s"] or 0.0 for one in rows), default=0.0)
    for one in rows:
        bold = "bold" if one["goodput_requests_per_s"] == best else ""
        shown.row(
            one["ratio"],
            number(one["goodput_requests_per_s"], 2),
            number(one["attainment"] and 100 * one["attainment"]),
            *(
                number(one[key], 0)
                for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "queue_p50_ms")
            ),
            ", ".join(one["fails"]) or "none",
            one["bottleneck"],
            style=bold,
        )
    shown.show(console)
