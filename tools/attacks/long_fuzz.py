"""Case after case, made from seeds, at a real cluster that serves other tenants: `scripts/fuzz --minutes`."""

import asyncio
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests import tiny_models
from tests.e2e.parts import parts
from tools.attacks.cases import KINDS, RUNS, World, run_case
from tools.attacks.cluster import ROLES, Probed
from tools.attacks.others import Others
from tools.chaos.soak import JUDGED_FROM_S, after_warm_up, resident_mib, slope
from tools.fuzz import ports_of

STALL_MS_MAX = 250.0
GROWTH_MIB_MAX = 5.0
"""Most growth of a process in ten minutes, by least squares without the first third: bodies of 8 MB come and go."""
AFTER_S, STANDSTILL_S_MAX = 0.2, 60.0
SHOWN = 25


@dataclass
class Verdict:
    seed: int
    kind: str
    sent: int
    stall_ms: dict[str, float]
    found: list[str] = field(default_factory=list)


@dataclass
class Result:
    verdicts: list[Verdict] = field(default_factory=list)
    memory_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(seconds, MiB) of each process after each case."""
    grown: list[str] = field(default_factory=list)


class LongFuzz:
    def __init__(self, up: Probed) -> None:
        self._up, self._world = up, World(up.target(0), ports_of(up))
        self._others = Others(self._world.target)
        self._result = Result()

    async def run(self, seeds: "range", minutes: float, on_case: Callable[[Verdict], None]) -> Result:
        await self._others.learn()
        tasks = [
            asyncio.create_task(work) for work in (self._up.watch(), self._others.streams(), self._others.requests())
        ]
        started = time.monotonic()
        try:
            for seed in seeds:
                on_case(await self._case(seed))
                for role in ROLES:
                    points = self._result.memory_mib.setdefault(role, [])
                    points.append((time.monotonic() - started, resident_mib(self._up.processes[role].pid)))
                if time.monotonic() - started >= 60 * minutes:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if time.monotonic() - started >= JUDGED_FROM_S:
            growth = {role: 600 * slope(after_warm_up(points)) for role, points in self._result.memory_mib.items()}
            self._result.grown = [f"{role}: {mib:+.1f} MiB" for role, mib in growth.items() if mib > GROWTH_MIB_MAX]
        return self._result

    async def _case(self, seed: int) -> Verdict:
        self._up.begin_window()
        self._others.begin_window()
        case = await asyncio.to_thread(run_case, self._world, seed)
        await asyncio.sleep(AFTER_S)
        await self._up.settle(STANDSTILL_S_MAX)
        still, noticed, measured = self._up.stands_still(), self._others.end_window(), self._up.end_window()
        stalls = {role: ms for role, ms in measured.stall_ms.items() if ms > STALL_MS_MAX}
        found = [f"the {role}'s event loop stands still for {ms:,.0f} ms" for role, ms in stalls.items()]
        found += [f"the {role} still stands still, and is killed" for role in still]
        found += [f"ended: {one}" for one in measured.ended]
        found += [f"others: {one}" for one in noticed.failed] + case.faults
        if still or measured.ended:
            await asyncio.to_thread(self._up.mend)
        self._result.verdicts.append(Verdict(seed, case.kind, case.sent, measured.stall_ms, found))
        return self._result.verdicts[-1]


def show(result: Result, console: Console) -> None:
    table = Table(title="Cases", title_justify="left")
    for heading in ("kind", "cases", "sent", "gateway stall", "coordinator stall", "workers stall", "with findings"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in KINDS:
        cases = [one for one in result.verdicts if one.kind == kind]
        most = [max((one.stall_ms.get(role, 0.0) for one in cases), default=0.0) for role in ROLES]
        stalls = (f"{ms:,.0f} ms" for ms in (most[1], most[0], max(most[2:])))
        faulty = sum(bool(one.found) for one in cases)
        table.add_row(kind, str(len(cases)), f"{sum(one.sent for one in cases):,}", *stalls, str(faulty))
    console.print(table)
    table = Table(title="Memory without KV pools, MiB", title_justify="left")
    for heading in ("process", "after warm-up", "at the end", "in 10 minutes"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for role, points in result.memory_mib.items():
        settled = after_warm_up(points)
        table.add_row(role, f"{settled[0][1]:.1f}", f"{settled[-1][1]:.1f}", f"{600 * slope(settled):+.1f}")
    console.print(table)
    for line in result.grown:
        console.print(f"[red]grows[/red] {line} in ten minutes, where {GROWTH_MIB_MAX:g} may be")


def run(first_seed: int, minutes: float, only: int | None, log: str, console: Console) -> int:
    """Cases from `first_seed` on for so long, or the case `only`. Status 1 on any finding."""
    if not RUNS:
        console.print("tests/fuzz_cores.py is not there: no messages in random states")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits an ignored SIGINT
        signal.signal(number, signal.default_int_handler)
    kinds: Counter[str] = Counter()
    seeds = range(first_seed, 1 << 31) if only is None else range(only, only + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="crossdock-fuzz-") as folder,
        open(log, "a", encoding="utf-8") as kept,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("starting", total=60 * minutes)
        began = time.monotonic()

        def on_case(verdict: Verdict) -> None:
            kept.write(json.dumps(asdict(verdict)) + "\n")
            kept.flush()
            progress.update(bar, completed=time.monotonic() - began, description=f"seed {verdict.seed}, {verdict.kind}")
            for what in verdict.found:
                words = f"{verdict.kind}: {what}"
                kinds[words[:60]] += 1
                if kinds[words[:60]] <= 2 and len(kinds) <= SHOWN:
                    console.print(
                        f"[red]seed {verdict.seed}[/red] {escape(words[:400])}", highlight=False, soft_wrap=True
                    )
                    console.print(f"    alone: scripts/fuzz --case {verdict.seed}", highlight=False)

        model = tiny_models.make("llama", Path(folder) / "tiny-llama", max_position_embeddings=2048)
        result = None
        with parts(model, kind=Probed) as up, suppress(KeyboardInterrupt):
            up.begin(Path(folder))
            fuzz = LongFuzz(up)
            began = time.monotonic()
            result = asyncio.run(fuzz.run(seeds, minutes, on_case))
    if result is None:
        console.print(f"Stopped. The cases so far are in {log}.")
        return 130
    show(result, console)
    found = sum(len(one.found) for one in result.verdicts)
    first, last = result.verdicts[0].seed, result.verdicts[-1].seed
    console.print(
        f"Seeds {first} to {last}, {found} findings; they are in {log}. To go on: --seed {last + 1}", soft_wrap=True
    )
    return 1 if found or result.grown else 0
