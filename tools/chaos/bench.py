"""The part that the scripts on a real cluster share: options, a folder, a progress bar, Ctrl-C, a report."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launcher.local.lifetime import until_interrupted
from tests import tiny_models
from tests.e2e.netns import network
from tools.chaos.cluster import KV_GIB, Cluster, Violation
from tools.chaos.orders import CONTEXT_TOKENS


class Found(Protocol):
    violations: list[str]


F = TypeVar("F", bound=Found)


def add_common(made: argparse.ArgumentParser) -> None:
    made.add_argument("--seed", type=int, default=1, help="draws requests, victims and instants (default 1)")
    made.add_argument("--kv-transport", default="auto", help="of the workers (default auto)")
    made.add_argument("--stall-share", default="", help="of the decode workers; 0: they compute no suffixes")
    made.add_argument("--kv-gib", type=float, default=KV_GIB, help=f"KV cache of each worker (default {KV_GIB:g})")
    made.add_argument("--kv-tier-gib", default="0", help="second tier of each prefill worker (default 0)")
    made.add_argument("--fresh", action="store_true", help="start every process as a new program; slower")
    made.add_argument(
        "--no-standby", dest="standby", action="store_false", help="one coordinator instead of two in turn"
    )
    made.set_defaults(hosts=False)
    made.add_argument("--json", dest="json_out", default="", metavar="FILE", help="write what was found there")


def run(
    arguments: argparse.Namespace,
    total: int,
    work: Callable[[Cluster, Callable[[int], None]], Awaitable[F]],
    show: Callable[[F, Console], None],
    as_dict: Callable[[F], dict[str, Any]] | None = None,
) -> int:
    """Runs `work(cluster, progress)` on a cluster of its own; returns the exit status. Logs are kept where something was
    wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    go_first()
    console, folder = (
        Console(width=None if sys.stdout.isatty() else 180),
        Path(tempfile.mkdtemp(prefix="crossdock-chaos-")),
    )

    async def whole() -> int:
        found, violations = None, []
        try:
            found = await _on_cluster(arguments, total, work, folder, console)
            violations = found.violations
        except Violation as error:
            violations = [str(error)]
        if found is not None:
            show(found, console)
            if arguments.json_out:
                written = as_dict(found) if as_dict is not None else asdict(found) if is_dataclass(found) else {}
                await _write(arguments.json_out, json.dumps(written, indent=2))
        for said in violations[:20]:
            console.print(f"[red]violation[/red] {escape(said)}", highlight=False, soft_wrap=True)
        if violations:
            console.print(f"seed {arguments.seed}; logs and ledger are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder)
        return 1 if violations else 0

    return uvloop.run(until_interrupted(whole(), console))


def go_first() -> None:
    """Puts this process, but not our children, before all others on this machine, where that is permitted. A process that
    measures gaps would otherwise wait for a core behind the processes that it looks at, and measure its own delay."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


async def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:  # noqa: ASYNC230 (nothing else runs any more)
        file.write(text)


async def _on_cluster(
    arguments: argparse.Namespace,
    total: int,
    work: Callable[[Cluster, Callable[[int], None]], Awaitable[F]],
    folder: Path,
    console: Console,
) -> F:
    model = tiny_models.make("llama", folder / "tiny", max_position_embeddings=CONTEXT_TOKENS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    options = ("--kv-transport", arguments.kv_transport, "--kv-tier-gib", arguments.kv_tier_gib)
    options += ("--stall-share", arguments.stall_share) if arguments.stall_share else ()  # type: ignore[assignment]
    with (
        network() if arguments.hosts else nullcontext() as hosts,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("starting", total=total)
        async with Cluster(
            model,
            folder,
            fresh=arguments.fresh,
            worker_options=options,
            standby=arguments.standby,
            kv_gib=arguments.kv_gib,
            network=hosts,
        ) as cluster:
            found = await work(cluster, lambda done: progress.update(bar, completed=done, description="running"))
            ended = await cluster.close()
    found.violations += [f"{name} ended with status {status}" for name, status in ended.items() if status]
    return found
