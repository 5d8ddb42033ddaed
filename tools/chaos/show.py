"""A run's table and its JSON."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from launcher.http.streams import percentile
from tools.chaos.gaps import Fault
from tools.chaos.orders import IS_BATCH_INVARIANT
from tools.chaos.run import Result


def rows(result: Result) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in result.faults:
        groups.setdefault((fault.role, fault.kind), []).append(fault)
    return [_row(*key, groups[key]) for key in sorted(groups)]


def _row(role: str, kind: str, faults: Sequence[Fault]) -> dict[str, Any]:
    alone = [fault for fault in faults if fault.alone]
    gaps = [fault.worst_gap_s for fault in alone]
    added = [fault.worst_gap_s - fault.earlier_gap_s for fault in alone]
    detected = [fault.detected_s for fault in alone if fault.detected_s is not None]
    # Of the coordinator: until it lets a new request in; of others: until they are registered.
    back = [s for fault in alone if (s := fault.back_s if fault.admitted_s is None else fault.admitted_s) is not None]
    return {
        "role": role,
        "fault": kind,
        "number": len(faults),
        "alone": len(alone),
        **{what: sum(f.difference[what] for f in faults) for what in ("lost", "duplicated", "changed")},
        "errors": sum(len(fault.errors) for fault in faults),
        **_figures("gap", gaps),
        **_figures("added", added),
        **_figures("detected", detected),
        **_figures("back", back),
        "stall_max_s": max((fault.stall_s for fault in alone), default=0.0),
    }


def _figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys((f"{name}_p50_s", f"{name}_p99_s", f"{name}_max_s"))
    return {
        f"{name}_p50_s": statistics.median(values),
        f"{name}_p99_s": percentile(values, 0.99),
        f"{name}_max_s": max(values),
    }


def as_dict(result: Result) -> dict[str, Any]:
    return {
        "plan": asdict(result.plan),
        "table": rows(result),
        "faults": [
            {**vars(fault), "at": fault.at - result.begun, "healed_at": fault.healed_at - result.begun}
            for fault in result.faults
        ],
        **{
            what: getattr(result, what)
            for what in (
                "answers",
                "constrained",
                "turns",
                "cached_tokens",
                "tokens",
                "left",
                "resent",
                "seconds",
                "violations",
                "audit",
            )
        },
    }


async def tell(result: Result, out: TextIO, every_s: float = 30.0) -> None:
    """A line now and then, where no progress bar can be shown; to be cancelled."""
    begun = time.monotonic()
    while not out.isatty():
        await asyncio.sleep(every_s)
        faults = sum(fault.kind != "none" for fault in result.faults)
        print(
            f"{time.monotonic() - begun:.0f} s: {faults} faults, {result.answers:,} whole answers,"
            f" {result.tokens:,} tokens compared, {len(result.violations)} wrong",
            file=out,
            flush=True,
        )


def show(result: Result, console: Console) -> None:
    table = Table(title="Worst gap of any stream at each fault that struck alone, in s", title_justify="left")
    columns = "role fault number lost dup. changed errors".split()
    columns += "gap-p50 p99 added-p50 max detected-p50 max back-p50 max stall-max".split()
    for number, heading in enumerate(columns):
        table.add_column(heading.replace("-", " "), justify="left" if number < 2 else "right")
    for row in rows(result):
        counts = [str(row[what]) for what in ("number", "lost", "duplicated", "changed", "errors")]
        figures = ["gap_p50_s", "gap_p99_s", "added_p50_s", "added_max_s", "detected_p50_s", "detected_max_s"]
        figures += ["back_p50_s", "back_max_s", "stall_max_s"]
        times = ["–" if row[name] is None else f"{row[name]:.3f}" for name in figures]
        table.add_row(row["role"], row["fault"], *counts, *times)
    console.print(table)
    console.print("Stall: how long the machine itself stood still, at most, between such a fault and its end.")
    ledger = result.audit.get("ledger", {})
    overlooked = sum(fault.kind == "stop" and fault.detected_s is None for fault in result.faults)
    if overlooked:
        console.print(
            f"{overlooked} stopped processes were missed by nobody: the machine itself had stood still meanwhile,"
            " or the coordinator began anew."
        )
    if not IS_BATCH_INVARIANT:
        console.print(
            "Matrix products of this machine round rows differently: a sampled token may change when it is resumed."
        )
    if result.plan.constrained_share:
        console.print(
            f"{result.constrained:,} whole answers had to follow a grammar, call a tool or show their prompt's scores;"
            " what is not valid is a violation."
        )
    if result.turns:
        console.print(
            f"{result.turns:,} of them were later turns of conversations; {result.cached_tokens:,} tokens of their prompts"
            " were cached."
        )
    console.print(
        f"{result.answers:,} whole answers, {result.tokens:,} tokens compared, {result.resent} requests sent again to another"
        f" gateway, {result.left} clients left; {result.seconds:.0f} s. Idle after {result.audit.get('idle_after_s', 0):.2f} s."
    )
    if ledger:
        said = ", ".join(f"{count} {name}" for name, count in sorted(ledger["outcomes"].items()))
        console.print(
            f"Ledger: {said}. Tokens charged beyond those got: {ledger['drift_single']} of one choice,"
            f" {ledger['drift_several']} of several, {ledger['drift_lost']} of rows written off,"
            f" {ledger['drift_fenced']} of {ledger['fenced']} answers that a stopped"
            " coordinator took for cancelled."
        )
