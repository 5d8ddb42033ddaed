"""What the benchmarks print and write: figures from measurements, tables from figures."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher import tables
from launcher.bench.settings import EngineBenchSettings
from launcher.http.sse_client import Stream, percentile
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption


def window_figures(gaps_s: Sequence[float], tokens_per_s: float) -> dict[str, Any]:
    gaps_ms = [1000 * gap for gap in gaps_s]
    figures: dict[str, Any] = {f"p{rank}_ms": percentile(gaps_ms, rank / 100) for rank in (50, 95, 99)}
    return figures | {
        "max_ms": max(gaps_ms),
        "gaps": len(gaps_ms),
        "tokens_per_s": tokens_per_s,
        "gaps_ms": [round(gap, 3) for gap in gaps_ms],
    }


def prompt_figures(streams: Sequence[Stream]) -> dict[str, Any]:
    ttfts = [stream.ttft_s for stream in streams]
    return {
        "finished": len(streams),
        "prompt_tokens_mean": sum(stream.prompt_tokens for stream in streams) / len(streams),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_max_s": max(ttfts),
        "ttft_s": [round(ttft, 3) for ttft in ttfts],
    }


def show_isolation(result: dict[str, Any], console: Console) -> None:
    alone, loaded, prompts = result["alone"], result["loaded"], result["long_prompts"]
    headings = ("p50", "p95", "p99", "max", "gaps", "tokens/s")
    table = tables.Table("Gap between tokens of one stream, ms", "", *headings)
    for name, row in (("streams alone", alone), ("with long prompts", loaded)):
        figures = (f"{row[key]:.1f}" for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms"))
        table.row(name, *figures, str(row["gaps"]), f"{row['tokens_per_s']:.1f}")
    table.show(console)
    console.print(f"p99 with long prompts / p99 alone: [bold]{loaded['p99_ms'] / alone['p99_ms']:.2f}[/bold]")
    console.print(f"Longest gap with long prompts / p50 alone: {loaded['max_ms'] / alone['p50_ms']:.1f}")
    console.print(
        f"Long prompts: {prompts['finished']} finished, {prompts['prompt_tokens_mean']:.0f} tokens each on average,"
        f" TTFT p50 {prompts['ttft_p50_s']:.1f} s, longest {prompts['ttft_max_s']:.1f} s"
    )
    if "prefill" in result:
        prefill = result["prefill"]
        console.print(f"Prefill alone: {prefill['tokens_per_s']:.0f} tokens/s, TTFT {prefill['ttft_s']:.1f} s")
    for count, rate in result.get("throughput", {}).items():
        console.print(f"{count} stream{'s' if count != '1' else ''}: {rate:.1f} tokens/s")


def run_engine(settings: EngineBenchSettings) -> int:
    """`crossdock bench dev engine`."""
    from launcher.models import resolve as models

    console = console_for(settings)
    model = models.ready(settings.model, "", console)
    # OpenMP reads these once, when torch is first imported, which is below.
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    from launcher.bench.dev import engine as bench_engine

    result = bench_engine.run(str(model.path), settings.threads, console)
    write_json(settings, result)
    return 0


def check_writable(path: str, option: str) -> None:
    """Before minutes are spent. Raises `SettingsError`."""
    if path and not Path(path).expanduser().absolute().parent.is_dir():
        raise SettingsError(f"{option}: there is no folder {Path(path).expanduser().parent}")


def console_for(settings: JsonOption, **more: Any) -> Console:
    """For what people read: stdout, or stderr where JSON has that."""
    return tables.console(stderr=settings.as_json, **more)


def machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "cores": os.cpu_count(), "machine": platform.machine()}


def write_json(settings: JsonOption, result: dict[str, Any]) -> None:
    """To stdout, where it was asked for."""
    if settings.as_json:
        sys.stdout.write(json.dumps(result | {"machine": machine()}, indent=1) + "\n")
