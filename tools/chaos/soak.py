"""Half an hour of mixed load with cancels, and what the processes' memory does: `scripts/soak_load`."""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.chaos import audit, bench
from tools.chaos.cluster import Cluster, Violation
from tools.chaos.run import Plan, Run

EVERY_S = 2.0
WARM_UP_SHARE = 1 / 3  # the tables that remember a number of requests are full by then
SLOPE_MAX_MIB = 1.0  # per ten minutes
JUDGED_FROM_S = 600.0  # a line through less time says nothing, so a shorter run shows its growth without judging it


@dataclass
class Growth:
    rss_mib: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MiB)
    fds: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def slope_mib(self) -> float:
        """MiB per ten minutes, by least squares, warm-up cut off."""
        return 600 * slope(after_warm_up(self.rss_mib))


@dataclass
class Result:
    seed: int
    seconds: float = 0.0
    answers: int = 0
    left: int = 0
    processes: dict[str, Growth] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def after_warm_up(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points[int(len(points) * WARM_UP_SHARE) :]


def slope(points: list[tuple[float, float]]) -> float:
    """Returns the slope of the least-squares line; 0 through fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(
    cluster: Cluster, seconds: float, seed: int, progress: Callable[[int], None] = lambda done: None
) -> Result:
    result = Result(seed)
    plan = Plan(
        seed=seed,
        faults=None,
        seconds=seconds,
        roles=(),
        clients=8,
        leave_share=0.2,
        output_tokens_max=120,
        pause_s=0.3,
    )
    run = Run(cluster, plan, lambda _, elapsed_s: progress(int(elapsed_s)))
    watching = asyncio.create_task(_watch(cluster, result, run))
    try:
        await run.run()
    except Violation as error:
        run.result.violations = run.result.violations or [str(error)]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    found = run.result
    result.seconds, result.answers, result.left = found.seconds, found.answers, found.left
    result.audit, result.violations = found.audit, found.violations
    if result.seconds >= JUDGED_FROM_S:
        result.violations += [
            f"{slot} grows by {growth.slope_mib():.2f} MiB in ten minutes"
            for slot, growth in result.processes.items()
            if growth.slope_mib() >= SLOPE_MAX_MIB
        ]
    return result


def resident_mib(pid: int) -> float:
    """Returns resident memory without shared memory, which holds the KV pools: a shared page counts in every process from its
    first use there, and all of them were reserved at the start."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {line[0]: int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssFile:")}
    return sum(kib.values()) / 1024


async def _watch(cluster: Cluster, result: Result, run: Run) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        if not run.result.begun:
            continue  # references are still being made
        for member in cluster.members:
            growth = result.processes.setdefault(member.slot, Growth())
            growth.rss_mib.append((time.monotonic() - run.result.begun, resident_mib(member.pid)))
            counts = audit.of_process(member.pid)
            growth.fds.append(counts["fds"])
            growth.threads.append(counts["threads"])


def show(result: Result, console: Console) -> None:
    title = f"{result.answers:,} answers, {result.left:,} clients left, {result.seconds:.0f} s"
    table = Table(title=title, title_justify="left")
    for heading in (
        "process",
        "MiB without KV pools, after warm-up",
        "at the end",
        "MiB per 10 min",
        "fds most",
        "at the end",
        "threads",
    ):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for slot, growth in result.processes.items():
        settled = after_warm_up(growth.rss_mib)
        row = [f"{settled[0][1]:.1f}", f"{settled[-1][1]:.1f}", f"{growth.slope_mib():+.2f}"]
        table.add_row(slot, *row, str(max(growth.fds)), str(growth.fds[-1]), str(growth.threads[-1]))
    console.print(table)


def main() -> int:
    made = argparse.ArgumentParser(
        prog="scripts/soak_load",
        description="A real cluster under mixed load with cancels, every answer compared. The memory of each process, shared KV"
        f" pools left out, must stay flat: under {SLOPE_MAX_MIB:g} MiB in ten minutes by least squares, the first third cut"
        " off, and no descriptor more at the end. Status 1 if not.",
    )
    made.add_argument("--seconds", type=float, default=1800.0, metavar="S", help="how long (default 1800)")
    bench.add_common(made)
    made.set_defaults(fresh=True)
    arguments = made.parse_args()

    async def work(cluster: Cluster, progress: Callable[[int], None]) -> Result:
        return await soak(cluster, arguments.seconds, arguments.seed, progress)

    return bench.run(arguments, int(arguments.seconds), work, show)


if __name__ == "__main__":
    raise SystemExit(main())
