"""`python -m benchmarks engine`: rounds of the engine and of plain transformers, each case beside what the machine reaches.

Same weights, dtype and threads for both. The machine itself is measured just before each case, in the same process, so that a
case and its floor are measured under the same conditions.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.engine import llama_bench
from benchmarks.engine.cases import BLOCK_SIZE, Case, cases, kv_bytes, size_of
from benchmarks.engine.machine import Machine
from benchmarks.settings import EngineBenchSettings
from engine.cpu.decoder import CpuDecoder
from engine.model.loader import load_engine
from launcher import tables
from runtime.settings.options import SettingsError


@dataclass
class Measured:
    """Seconds of a case and of its floor, round by round."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    floors_s: list[float] = field(default_factory=list)


def run(settings: EngineBenchSettings, model_path: str, console: Console) -> dict[str, Any]:
    """Measures and prints a table; returns its figures. About two minutes for the default model."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device: no GPU is visible here")
    torch.set_num_threads(settings.threads)
    dtype = torch.float32 if settings.device == "cpu" else "auto"
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    plain: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, trust_remote_code=False)
    plain.to(settings.device).eval()
    size = size_of(plain)
    engine = load_engine(model_path, device=settings.device, block_size=BLOCK_SIZE, kv_bytes=kv_bytes(size))
    machine = Machine(settings.device, plain.dtype, isinstance(engine.runner, CpuDecoder))
    measured = [Measured(case) for case in cases(engine, plain, size, settings.device)]
    _measure(measured, machine, settings.rounds, console)
    result: dict[str, Any] = {
        "settings": settings.model_dump(),
        "model_type": engine.info.model_type,
        "dtype": engine.info.dtype,
        "backend": engine.runner.backend,
        "floor": {"read_gb_per_s": _medians(machine.read_bytes_per_s), "gflop_per_s": _medians(machine.flops_per_s)},
        "rows": rows(measured),
    }
    if settings.llama_bench:
        console.print("running llama-bench")
        result["rows"] += llama_bench.rows(settings)
    show(result, console)
    return result


def _measure(measured: Sequence[Measured], machine: Machine, rounds: int, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:  # drawing in between would use a core
        bar = progress.add_task("", total=(rounds + 1) * len(measured))
        for number in range(rounds + 1):
            for one in measured:
                what = f"round {number} of {rounds}" if number else "warming up"
                progress.update(bar, description=what, refresh=True)
                rates = machine.measure()
                seconds = one.case.measure()
                if number:
                    one.seconds.append(seconds)
                    one.floors_s.append(one.case.work.floor_s(rates))
                progress.advance(bar)
            if not number:
                machine.forget()
        progress.refresh()


def _medians(rates: dict[str, list[float]]) -> dict[str, float]:
    """Returns medians in billions per second."""
    return {name: statistics.median(values) / 1e9 for name, values in rates.items()}


def rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    plain_s = {one.case.name: statistics.median(one.seconds) for one in measured if one.case.is_transformers}
    return [_row(one, None if one.case.is_transformers else plain_s.get(one.case.name)) for one in measured]


def _row(one: Measured, plain_s: float | None) -> dict[str, Any]:
    """Returns a row of the table. `time_over_floor` is compared within each round, so it may differ a little from the quotient
    of the medians."""
    median = statistics.median(one.seconds)
    return {
        "name": one.case.name + (", transformers" if one.case.is_transformers else ""),
        "tokens_per_s": one.case.tokens / median,
        "lowest": one.case.tokens / max(one.seconds),
        "highest": one.case.tokens / min(one.seconds),
        "ms": 1e3 * median,
        "floor_ms": 1e3 * statistics.median(one.floors_s),
        "time_over_floor": statistics.median(s / floor for s, floor in zip(one.seconds, one.floors_s, strict=True)),
        "against_transformers": plain_s / median if plain_s else None,
    }


def show(result: dict[str, Any], console: Console) -> None:
    settings = result["settings"]
    title = (
        f"{result['model_type']}, {result['dtype']} on {settings['device']}, backend {result['backend']},"
        f" {settings['threads']} thread(s), {settings['rounds']} rounds"
    )
    headings = ("tokens/s", "lowest", "highest", "ms", "floor ms", "time / floor", "against transformers")
    table = tables.Table(title, tables.words(""), *headings)
    for row in result["rows"]:
        table.row(
            row["name"],
            *(f"{row[name]:.1f}" for name in ("tokens_per_s", "lowest", "highest")),
            *("" if row[name] is None else f"{row[name]:.1f}" for name in ("ms", "floor_ms")),
            *("" if row[name] is None else f"{row[name]:.2f}" for name in ("time_over_floor", "against_transformers")),
        )
    table.show(console)
    floor = result["floor"]
    reads, products = (_fastest_first(floor[name]) for name in ("read_gb_per_s", "gflop_per_s"))
    console.print(f"The machine, medians: reads {reads} GB/s; multiplies matrices with {products} GFLOP/s")


def _fastest_first(rates: dict[str, float]) -> str:
    return ", ".join(f"{rate:.1f} ({name})" for name, rate in sorted(rates.items(), key=lambda one: -one[1]))
