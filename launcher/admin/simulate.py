"""`crossdock simulate`: the simulated world from the command line."""

import os
import queue
import subprocess
import sys
import threading
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launcher import tables
from launcher.admin.simulate_settings import SimulateSettings
from launcher.process import ROOT
from launcher.reports import console_for, write_json
from runtime.process import clock
from simulation.batch import Sum, as_json, from_line
from simulation.faults.plan import FAULTS
from simulation.run import SeedResult, run_seed, timeline

_TIMELINE_ALL = 100_000


def run(settings: SimulateSettings) -> int:
    console = console_for(settings, highlight=False)
    kinds = frozenset(settings.faults)
    if settings.seed >= 0:
        result = _one(settings.seed, kinds, settings.timeline, console)
        write_json(settings, _as_json(result))
        return 0 if result.failure is None else 1
    began = clock.now()
    total = _many(settings, console)
    took_s = clock.now() - began
    _show(total, took_s, console)
    write_json(settings, as_json(total) | {"took_s": took_s})
    if not total.failed:
        return 0
    seed, why = min(total.failed)
    console.print(f"[red]Seed {seed}: {escape(why)}[/red]")
    _one(seed, kinds, "", console)
    return 1


# --- one seed -----------------------------------------------------------------------------------------------------------


def _one(seed: int, kinds: frozenset[str], request_id: str, console: Console) -> SeedResult:
    result = run_seed(seed, kinds, keep=True)
    assert result.cluster is not None
    plan = result.cluster.plan
    console.print(
        f"Seed {seed}: {plan.gateways} gateways, {plan.prefill} prefill and {plan.decode} decode workers,"
        f" {len(plan.asked)} requests",
        soft_wrap=True,
    )
    for fault in plan.faults:
        console.print(f"  {fault}")
    if plan.hostility is not None or plan.corrupt:
        console.print(f"  chance of damage to a segment {plan.corrupt:g}; to a frame {plan.hostility or 'none'}")
    concerned = request_id or str(getattr(result.failure, "request_id", ""))
    if request_id or result.failure is not None:
        most = _TIMELINE_ALL if request_id else 80
        for line in timeline(result.cluster, "" if request_id == "all" else concerned, most):
            console.print(escape(line), soft_wrap=True)
    _say_end(result, kinds, concerned, console)
    return result


def _as_json(result: SeedResult) -> dict[str, Any]:
    failure = None if result.failure is None else f"{type(result.failure).__name__}: {result.failure}"
    return {
        "seed": result.seed,
        "log": result.digest,
        "events": result.events,
        "virtual_s": result.virtual_s,
        "outcomes": result.outcomes,
        "failure": failure,
    }


def _say_end(result: SeedResult, kinds: frozenset[str], concerned: str, console: Console) -> None:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
    console.print(
        f"{result.events} events in {result.virtual_s:.1f} virtual s, log {result.digest}; requests: {outcomes}"
    )
    if result.failure is None:
        console.print("[green]All promises held.[/green]")
        return
    console.print(f"[red]{escape(f'{type(result.failure).__name__}: {result.failure}')}[/red]", soft_wrap=True)
    some = "" if kinds == frozenset(FAULTS) else f" --faults {','.join(sorted(kinds)) or 'none'}"
    console.print(
        f"Again: crossdock simulate --seed {result.seed}{some} --timeline {concerned or 'all'}", soft_wrap=True
    )


# --- many ---------------------------------------------------------------------------------------------------------------


def _many(settings: SimulateSettings, console: Console) -> Sum:
    """Runs the seeds in child processes, of which each takes every n-th seed; all stop at the first failure."""
    count = min(settings.processes or len(os.sched_getaffinity(0)), settings.seeds)
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    children = [_child(settings, number, count) for number in range(count)]
    readers = [threading.Thread(target=_read, args=(n, child, lines), daemon=True) for n, child in enumerate(children)]
    total, running = Sum(), count
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        for reader in readers:
            reader.start()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("seeds", total=settings.seeds)
            while running and not total.failed:
                number, line = lines.get()
                if line:
                    total.merge(from_line(line))
                    progress.update(task, completed=total.seeds)
                elif children[number].wait() == 0:
                    running -= 1
                else:
                    raise RuntimeError(f"a child process ended with status {children[number].returncode}")
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
    return total


def _child(settings: SimulateSettings, number: int, stride: int) -> "subprocess.Popen[str]":
    share = (settings.first + number, settings.seeds - number, stride)
    command = [sys.executable, "-m", "simulation", *map(str, share), ",".join(settings.faults)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def _read(number: int, child: "subprocess.Popen[str]", lines: "queue.Queue[tuple[int, str]]") -> None:
    """Reads a child's lines into the queue; an empty line marks the end."""
    assert child.stdout is not None
    for line in child.stdout:
        lines.put((number, line))
    lines.put((number, ""))


def _show(total: Sum, took_s: float, console: Console) -> None:
    table = tables.Table(f"What was injected into {total.seeds:,} seeds", "fault", "times")
    for name, count in sorted(total.injected.items(), key=lambda entry: -entry[1]):
        table.row(name, f"{count:,}")
    table.show(console)
    outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(total.outcomes.items(), key=lambda e: -e[1]))
    console.print(f"Requests: {outcomes}. {total.tokens:,} tokens delivered and compared.")
    console.print(
        f"{total.seeds:,} seeds in {took_s:.1f} s: {total.seeds / took_s:.1f} seeds/s, {total.events / took_s:,.0f} events/s,"
        f" {total.virtual_s / 3600:.1f} hours of virtual time. Violations: {len(total.failed)}."
    )
