"""Attack a real cluster in every way that its reviews found, while other tenants are served, and measure what they notice."""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from runtime.link import keys as link_keys
from tests import tiny_models
from tests.e2e.parts import ROOT, parts
from tools.attacks.cluster import Measured, Probed
from tools.attacks.kinds import ATTACKS
from tools.attacks.others import Noticed, Others
from tools.chaos.bench import go_first

ALONE_S, FIRST_ALONE_S = 3.0, 10.0
AFTER_S = 1.0
STALLED_S_MAX = 15.0  # how long a process may stand still behind an attack before it is killed
STALL_MS_MAX, GAP_RATIO_MAX = 50.0, 3.0


@dataclass
class Row:
    name: str
    line: str
    outcome: dict[str, int]
    measured: Measured
    alone_ms: tuple[float, float]  # longest and 99th percentile of the streams' gaps in all pauses between attacks
    gap_ms: float
    p99_ms: float
    slowest_s: float
    answers: int
    failed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def judge(self) -> None:
        stalls = {role: ms for role, ms in self.measured.stall_ms.items() if role in ("gateway", "coordinator")}
        self.faults += [f"the {role} stands still for {ms:.0f} ms" for role, ms in stalls.items() if ms > STALL_MS_MAX]
        if self.gap_ms > max(GAP_RATIO_MAX * self.alone_ms[0], STALL_MS_MAX):
            self.faults.append(f"a gap of {self.gap_ms:.0f} ms, where {self.alone_ms[0]:.0f} ms is the longest alone")
        self.faults += [f"ended: {one}" for one in self.measured.ended]
        if self.failed:
            self.faults.append(f"{len(self.failed)} requests of others failed, the first one: {self.failed[0]}")
        self.faults += [f"{what}: {count}" for what, count in self.outcome.items() if what.startswith(("WRONG", "500"))]


@dataclass
class Window:
    noticed: Noticed
    measured: Measured
    outcome: dict[str, int]


class Bench:
    def __init__(self, up: Probed, seed: int) -> None:
        self._up, self._target = up, up.target(seed)
        self._others = Others(self._target)

    async def run(self, names: list[str], say: Callable[[str, int], None]) -> list[Row]:
        say("learning what streams are alone", 0)
        await self._others.learn()
        work = (self._up.watch(), self._others.streams(), self._others.requests())
        tasks = [asyncio.create_task(one) for one in work]
        rows = []
        try:
            await asyncio.sleep(2)
            alone = await self._window(asyncio.sleep(FIRST_ALONE_S))
            rows.append(self._row("alone", "", alone))
            for number, name in enumerate(names):
                say(name, number)
                alone.noticed.gaps_ms += (await self._window(asyncio.sleep(ALONE_S))).noticed.gaps_ms
                attacked = await self._window(self._attack(name, ATTACKS[name].bound_s))
                rows.append(self._row(name, ATTACKS[name].line, attacked))
                if not await asyncio.to_thread(self._up.mend):
                    rows[-1].faults.append("the cluster did not recover, and was started anew")
                await asyncio.sleep(5 if rows[-1].measured.ended else 2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for row in rows:
            row.alone_ms = (alone.noticed.gap_ms(1), alone.noticed.gap_ms(0.99))
            row.judge()
        return rows

    @staticmethod
    def _row(name: str, line: str, window: Window) -> Row:
        noticed = window.noticed
        return Row(
            name, line, window.outcome, window.measured, (0.0, 0.0), noticed.gap_ms(1), noticed.gap_ms(0.99),
            round(noticed.slowest_s, 1), noticed.answers, noticed.failed[:50],
        )  # fmt: skip

    async def _window(self, work: Coroutine[Any, Any, dict[str, int] | None]) -> Window:
        self._up.begin_window()
        self._others.begin_window()
        outcome = await work
        return Window(self._others.end_window(), self._up.end_window(), outcome or {})

    async def _attack(self, name: str, bound_s: float) -> dict[str, int]:
        command: tuple[str, ...] = ("-m", "tools.attacks.kinds", name, json.dumps(asdict(self._target)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        # A real attacker is elsewhere, so the work of its client must not count.
        command = ("nice", "-n", "19", sys.executable, *command)
        with tempfile.TemporaryFile() as written:
            attacker = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=written)
            try:
                async with asyncio.timeout(bound_s):
                    await attacker.wait()
            except TimeoutError:
                attacker.kill()
                await attacker.wait()
            except asyncio.CancelledError:
                attacker.kill()
                raise
            written.seek(0)
            last = written.read().decode().rpartition("\n")[2]
        if attacker.returncode == 0:
            outcome: dict[str, int] = json.loads(last)
        elif attacker.returncode == -signal.SIGKILL:
            outcome = {f"still at it after {bound_s:.0f} s {last}".strip(): 1}
        else:
            outcome = {"WRONG: the attacker failed": 1}
        await asyncio.sleep(AFTER_S)
        await self._up.settle(STALLED_S_MAX)
        return outcome | {f"WRONG: the {role} still stands still, and is killed": 1 for role in self._up.stands_still()}


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Attacks on one of each role, beside other tenants' requests", title_justify="left")
    headings = (
        "attack", "line", "gateway stall", "coordinator stall", "workers stall", "longest gap", "alone", "p99 gap", "alone",
        "new request", "machine late", "memory", "others failed", "ended",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("attack", "line", "ended") else "right")
    for row in rows:
        stalls = row.measured.stall_ms
        workers = max((ms for role, ms in stalls.items() if role.endswith("_worker")), default=0.0)
        numbers = (
            stalls.get("gateway", 0.0),
            stalls.get("coordinator", 0.0),
            workers,
            row.gap_ms,
            row.alone_ms[0],
            row.p99_ms,
            row.alone_ms[1],
        )
        role, grown = max(row.measured.rss_grown_mib.items(), key=lambda item: item[1])
        colour = "red" if row.faults else "green"
        table.add_row(
            f"[{colour}]{row.name}[/{colour}]",
            row.line,
            *(f"{ms:,.0f} ms" for ms in numbers),
            f"{row.slowest_s:.1f} s",
            f"{row.measured.late_ms:.0f} ms",
            f"{role.split('_')[0]} {grown:+,} MiB",
            f"{len(row.failed)} of {row.answers + len(row.failed)}",
            ", ".join(row.measured.ended) or "none",
        )
    console.print(table)
    for row in rows:
        outcome = ", ".join(f"{what}: {count}" for what, count in row.outcome.items())
        console.print(f"{row.name}: {escape(outcome)}", highlight=False, soft_wrap=True)
        for fault in row.faults:
            console.print(f"    [red]{escape(fault[:300])}[/red]", highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/attacks",
        description=f"{__doc__} Status 1 if the event loop of gateway or coordinator stands still for more than"
        f" {STALL_MS_MAX:.0f} ms of CPU time, a stream's gap is longer and more than {GAP_RATIO_MAX:g} times its longest alone,"
        " a process ends or a request of others fails.",
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="attacks whose name has this in it; may be repeated"
    )
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N", help="number of the first attack")
    parser.add_argument("--to", dest="last", type=int, default=len(ATTACKS), metavar="N", help="and of the last one")
    parser.add_argument("--list", action="store_true", help="names of the attacks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-keys", action="store_true", help="no CURVE keys: attackers need none at any port")
    parser.add_argument("--json", dest="json_out", default="", metavar="FILE", help="write what was found there")
    asked = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 220)
    names = list(ATTACKS)[asked.first - 1 : asked.last]
    names = [name for name in names if not asked.only or any(part in name for part in asked.only)]
    if asked.list:
        for number, name in enumerate(ATTACKS, 1):
            console.print(f"{number:3} {name} ({ATTACKS[name].line})", highlight=False)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits an ignored SIGINT
        signal.signal(number, signal.default_int_handler)
    go_first()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="crossdock-attacks-") as made,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        folder, keys = Path(made), None
        bar = progress.add_task("starting", total=len(names))
        if not asked.without_keys:
            keys = folder / "keys"
            link_keys.make(keys, list(link_keys.ROLES))
        model = tiny_models.make("llama", folder / "tiny-llama", max_position_embeddings=2048)
        with parts(model, keys=keys, kind=Probed) as up:
            up.begin(folder)
            work = Bench(up, asked.seed).run(
                names, lambda name, done: progress.update(bar, completed=done, description=name)
            )
            rows = asyncio.run(work)
            output = "".join(up.output)
    show(rows, console)
    if asked.json_out:
        Path(asked.json_out).write_text(json.dumps([asdict(row) for row in rows], indent=2))
    failed = any(row.faults for row in rows[1:])
    if failed:
        console.print(
            f"seed {asked.seed}; what the processes said at last:\n{output[-3000:]}", markup=False, highlight=False
        )
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
