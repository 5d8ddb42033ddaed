"""`scripts/simulate`: runs seeds of the fault world from the command line.

Each seed is a small cluster with a few requests, in virtual time: processes are killed, stopped and cut off, then all heals,
and every token, block, quota and row is checked. Status 0: all held. 1: a promise was broken.
"""

import argparse
import os
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from launcher import tables
from tests.world import batch
from tests.world.batch import Sum
from tests.world.faults.plan import FAULTS
from tests.world.run import SeedResult, run_seed, timeline

TIMELINE_ALL = 100_000


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    console = Console(highlight=False)
    kinds: frozenset[str] = asked.faults
    try:
        if asked.seed is not None:
            return 0 if _one(asked.seed, kinds, asked.timeline, console).failure is None else 1
        began = time.monotonic()
        total = _many(range(asked.first, asked.first + asked.seeds), kinds, asked.processes, console)
    except KeyboardInterrupt:
        return 130
    _show(total, time.monotonic() - began, console)
    if not total.failed:
        return 0
    seed, why = min(total.failed)
    console.print(f"[red]Seed {seed}: {escape(why)}[/red]")
    _one(seed, kinds, "", console)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this seed only and print what happened")
    parser.add_argument(
        "--timeline", default="", help="with --seed: what happened to this request, like r0; all: to all"
    )
    parser.add_argument("--seeds", type=_positive, default=1000, help="number of seeds to run (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    names = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser.add_argument(
        "--faults", type=_kinds, default=frozenset(FAULTS), help=f"kinds of faults with commas, or none. {names}"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=_positive, default=cores, help="processes that share the work (all cores)")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _kinds(text: str) -> frozenset[str]:
    kinds = frozenset(name.strip() for name in text.split(",")) - {"none", ""}
    if unknown := sorted(kinds - FAULTS.keys()):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(FAULTS)} and none")
    return kinds


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
        most = TIMELINE_ALL if request_id else 80
        for line in timeline(result.cluster, "" if request_id == "all" else concerned, most):
            console.print(escape(line), soft_wrap=True)
    _say_end(result, kinds, concerned, console)
    return result


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
    console.print(f"Again: scripts/simulate --seed {result.seed}{some} --timeline {concerned or 'all'}", soft_wrap=True)


# --- many ---------------------------------------------------------------------------------------------------------------


def _many(seeds: range, kinds: frozenset[str], processes: int, console: Console) -> Sum:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        return batch.search(seeds, kinds, processes, lambda so_far: progress.update(task, completed=so_far.seeds))


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


if __name__ == "__main__":
    sys.exit(main())
