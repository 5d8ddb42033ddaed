"""`crossdock top`: the workers, queues and tenants of a cluster on the terminal, refreshed each second."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator

import uvloop
from pydantic import Field
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher import tables
from launcher.admin.status import ASK_MS, NoAnswer, ObserverOptions, ask, coordinator_of
from proto.messages import Role
from proto.status import StatusReport, WorkerStatus
from runtime.link.keys import keys_for
from runtime.process import clock

EVERY_S = 1.0
BAR_CELLS = 20
TENANTS_SHOWN = 8
_COLOURS = ((0.9, "red"), (0.7, "yellow"), (0.0, "green"))


class TopSettings(ObserverOptions):
    """Show workers with their load and KV, the queue, and tenants, refreshed each second. q or Ctrl-C ends it."""

    once: bool = Field(False, description="Print this once, with the rates of one second, and end.")


class Rates:
    """Tokens per second of each worker, from one report to the next."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], int] = {}
        self._at = 0.0
        self.per_s: dict[str, float] = {}

    def see(self, report: StatusReport, now: float) -> None:
        took_s, self._at = now - self._at, now
        tokens = {(one.name, one.pid): one.tokens_forwarded for one in report.workers}
        self.per_s = {
            key[0]: max(count - self._before[key], 0) / took_s for key, count in tokens.items() if key in self._before
        }
        self._before = tokens


def run(settings: TopSettings) -> int:
    """Raises `NoAnswer`, `SeveralClusters` or `ConfigError`."""
    with coordinator_of(settings.coordinator) as coordinator, contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_watch(settings, coordinator))
    return 0


async def _watch(settings: TopSettings, coordinator: str) -> None:
    keys, rates, console = keys_for(settings, Role.OBSERVER), Rates(), tables.console()
    report = await ask(coordinator, ASK_MS, keys)
    rates.see(report, clock.now())
    if settings.once or not console.is_terminal:
        await asyncio.sleep(EVERY_S)
        report = await ask(coordinator, ASK_MS, keys)
        rates.see(report, clock.now())
        console.print(frame(report, rates))
        return
    with _quit_on_q() as quits, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(frame(report, rates), refresh=True)
        while not quits.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await quits.wait()
            try:
                report = await ask(coordinator, ASK_MS, keys)
            except NoAnswer as error:
                live.update(Text(f"{error}\nAsking again …", style="yellow"), refresh=True)
                continue
            rates.see(report, clock.now())
            live.update(frame(report, rates), refresh=True)


@contextlib.contextmanager
def _quit_on_q() -> Iterator[asyncio.Event]:
    """Yields what is set once q is typed; the terminal is as before afterwards."""
    quits, loop = asyncio.Event(), asyncio.get_running_loop()
    if not sys.stdin.isatty():
        yield quits
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    loop.add_reader(sys.stdin, lambda: quits.set() if os.read(sys.stdin.fileno(), 64) in (b"q", b"Q", b"") else None)
    try:
        yield quits
    finally:
        loop.remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def frame(report: StatusReport, rates: Rates) -> Group:
    running = sum(report.running.values()) - report.running.get("queued", 0)
    figures = [f"[bold]{report.queued:,}[/bold] queued", f"[bold]{running:,}[/bold] running"]
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        if f"{name}_p50_ms" in report.recent:
            p50, p99 = (report.recent[f"{name}_p{part}_ms"] for part in (50, 99))
            figures.append(f"{label} p50 {p50:,.0f} ms, p99 {p99:,.0f} ms")
    parts: list[RenderableType] = [Text.from_markup("   ".join(figures)), _workers(report, rates)]
    if any(one.waiting or one.share for one in report.tenants):
        parts.append(_tenants(report))
    parts += [Text(f"Left out: {words}", style="red") for words in report.circuit_open]
    return Group(*parts)


def _workers(report: StatusReport, rates: Rates) -> Table:
    table = _table("worker", "role", "requests", "steps", "KV", "tokens/s")
    for one in sorted(report.workers, key=lambda one: (one.model, one.role, one.name)):
        role = f"{one.role.value}{', draining' if one.draining else ''}"
        speed = f"{rates.per_s.get(one.name, 0.0):,.0f}"
        table.add_row(escape(one.name), role, f"{one.requests:,}", f"{one.steps_in_flight}", _kv(one), speed)
    return table


def _kv(one: WorkerStatus) -> str:
    share = one.kv_blocks_used / max(one.kv_blocks, 1)
    colour = next(colour for least, colour in _COLOURS if share >= least)
    filled = round(share * BAR_CELLS)
    return f"[{colour}]{'█' * filled}[/][dim]{'░' * (BAR_CELLS - filled)}[/] {share:4.0%}"


def _tenants(report: StatusReport) -> Table:
    table = _table("tenant", "share of service", "waiting")
    for one in report.tenants[:TENANTS_SHOWN]:
        table.add_row(escape(one.name), f"{one.share:.0%}", f"{one.waiting:,}")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 or heading in ("role", "KV") else "right")
    return table
