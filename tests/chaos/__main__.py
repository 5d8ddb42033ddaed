"""`python -m tests.chaos`, or `scripts/chaos`: kill and stop the processes of a real cluster while it serves. See --help."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from launcher.local import until_interrupted
from tests import tiny_models
from tests.chaos import show
from tests.chaos.cluster import ROLES, Cluster, Violation
from tests.chaos.orders import CONTEXT_TOKENS
from tests.chaos.run import Plan, Result, Run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Kill (SIGKILL) and stop (SIGSTOP, fenced, SIGCONT) processes of a real cluster at random instants while"
        " clients stream from a tiny model, and compare every stream with that of a quiet cluster: ids, text,"
        " log-probabilities. Blocks, the journal, descriptors, threads and shared memory are audited at the end."
        " Status 1 if a promise was broken; logs are kept then.",
    )
    made.add_argument("--faults", type=int, default=None, metavar="N", help="number of faults (20 without --seconds)")
    made.add_argument("--seconds", type=float, default=None, metavar="S", help="or for so long")
    made.add_argument("--seed", type=int, default=1, help="draws requests, victims and instants (default 1)")
    made.add_argument("--roles", default=",".join(ROLES), help="who may be hurt, separated by commas (default: all)")
    made.add_argument(
        "--stop-share", type=float, default=0.2, help="of faults that stop instead of killing (default 0.2)"
    )
    made.add_argument("--overlap", type=float, default=0.2, help="of faults amid another's recovery (default 0.2)")
    made.add_argument("--clients", type=int, default=6, help="streams at once (default 6)")
    made.add_argument("--leave-share", type=float, default=0.05, help="of clients that leave early (default 0.05)")
    made.add_argument("--kv-transport", default="auto", help="of the workers (default auto)")
    made.add_argument("--fresh", action="store_true", help="start every process as a new program; slower")
    made.add_argument("--json", dest="json_out", default="", metavar="FILE", help="write what was found there")
    return made


def plan_of(arguments: argparse.Namespace, fail: argparse.ArgumentParser) -> Plan:
    roles = tuple(part.strip() for part in arguments.roles.split(",") if part.strip())
    if not roles or set(roles) - set(ROLES):
        fail.error(f"--roles: of {', '.join(ROLES)}")
    for name in ("stop_share", "overlap", "leave_share"):
        if not 0.0 <= getattr(arguments, name) <= 1.0:
            fail.error(f"--{name.replace('_', '-')}: between 0 and 1")
    faults = arguments.faults if arguments.faults is not None or arguments.seconds is not None else 20
    return Plan(
        seed=arguments.seed, faults=faults, seconds=arguments.seconds, roles=roles, stop_share=arguments.stop_share,
        overlap=arguments.overlap, clients=arguments.clients, leave_share=arguments.leave_share,
    )  # fmt: skip


async def chaos(plan: Plan, home: Path, console: Console, *, fresh: bool, kv_transport: str) -> Result:
    """Raises nothing for what it finds: that is in the result."""
    model = tiny_models.make("llama", home / "tiny", max_position_embeddings=CONTEXT_TOKENS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    run: Run | None = None
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting, and the right answers", total=plan.faults or int(plan.seconds or 0))

        def on_progress(result: Result, seconds: float) -> None:
            done = sum(fault.kind != "none" for fault in result.faults)
            said = f"{done} faults, {result.answers} answers, {result.resent} sent again"
            progress.update(bar, completed=done if plan.faults else int(seconds), description=said)

        try:
            async with Cluster(model, home, fresh=fresh, worker_options=("--kv-transport", kv_transport)) as cluster:
                run = Run(cluster, plan, on_progress)
                await run.run()
                ended = await cluster.close()
        except Violation as error:
            result = run.result if run is not None else Result(plan)
            if not result.violations:
                result.violations.append(str(error))
            return result
    result = run.result
    result.audit["ended"] = ended
    result.violations += [f"{name} ended with status {status}" for name, status in ended.items() if status]
    return result


def report(found: Result, json_out: str, console: Console) -> None:
    show.show(found, console)
    if json_out:
        Path(json_out).write_text(json.dumps(show.as_dict(found), indent=2))
    for said in found.violations[:20]:
        console.print(f"[red]violation[/red] {escape(said)}", highlight=False)


def main() -> int:
    made = parser()
    arguments = made.parse_args()
    plan, console = plan_of(arguments, made), Console(width=None if sys.stdout.isatty() else 180)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="crossdock-chaos-"))

    async def work() -> int:
        found = await chaos(plan, folder, console, fresh=arguments.fresh, kv_transport=arguments.kv_transport)
        report(found, arguments.json_out, console)
        if found.violations:
            console.print(f"seed {plan.seed}; logs and journal are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder)
        return 1 if found.violations else 0

    async def outer() -> int | None:
        return await until_interrupted(work(), console)

    status = uvloop.run(outer())
    return 130 if status is None else status


if __name__ == "__main__":
    sys.exit(main())
