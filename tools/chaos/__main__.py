"""`python -m tools.chaos`, or `scripts/chaos`: kill and stop the processes of a real cluster while it serves. See --help."""

import argparse
import asyncio
import sys
from collections.abc import Callable

from runtime.process.driver import cancelled
from tools.chaos import bench, show
from tools.chaos.cluster import ROLES, Cluster, Violation
from tools.chaos.run import Plan, Result, Run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Kill (SIGKILL) and stop (SIGSTOP, fenced, SIGCONT) processes of a real cluster at random instants while"
        " clients stream from a tiny model, and compare every stream with that of a quiet cluster: ids, text,"
        " log-probabilities. Blocks, the ledger, descriptors, threads and shared memory are audited at the end."
        " Status 1 if a promise was broken; logs are kept then.",
    )
    made.add_argument("--faults", type=int, default=None, metavar="N", help="number of faults (20 without --seconds)")
    made.add_argument("--seconds", type=float, default=None, metavar="S", help="or for so long")
    made.add_argument("--roles", default=",".join(ROLES), help="who may be hurt, separated by commas (default: all)")
    made.add_argument(
        "--hosts",
        action="store_true",
        help="kill and cut off hosts, network namespaces with a prefill and a decode worker each; needs root",
    )
    made.add_argument(
        "--stop-share", type=float, default=0.2, help="of faults that stop or cut, not kill (default 0.2)"
    )
    made.add_argument(
        "--rank-share", type=float, default=0.0, metavar="SHARE",
        help="of kills of workers that kill one of several ranks (vLLM with tensor parallelism; default 0)",
    )  # fmt: skip
    made.add_argument("--overlap", type=float, default=0.2, help="of faults amid another's recovery (default 0.2)")
    made.add_argument("--clients", type=int, default=6, help="streams at once (default 6)")
    made.add_argument("--leave-share", type=float, default=0.05, help="of clients that leave early (default 0.05)")
    made.add_argument(
        "--constrained-share", type=float, default=0.0, metavar="SHARE",
        help="of streams that must follow a grammar, call a tool, or show their prompt's log-probabilities; all that end are"
        " checked (default 0)",
    )  # fmt: skip
    made.add_argument(
        "--session-share", type=float, default=0.0, metavar="SHARE",
        help="of streams that begin a conversation of up to six turns, each compared with an answer computed without a cache"
        " (default 0)",
    )  # fmt: skip
    bench.add_common(made)
    return made


def plan_of(arguments: argparse.Namespace, made: argparse.ArgumentParser) -> Plan:
    roles = tuple(part.strip() for part in arguments.roles.split(",") if part.strip())
    if not roles or set(roles) - set(ROLES):
        made.error(f"--roles: of {', '.join(ROLES)}")
    for name in ("stop_share", "rank_share", "overlap", "leave_share", "constrained_share", "session_share"):
        if not 0.0 <= getattr(arguments, name) <= 1.0:
            made.error(f"--{name.replace('_', '-')}: between 0 and 1")
    faults = arguments.faults if arguments.faults is not None or arguments.seconds is not None else 20
    return Plan(
        seed=arguments.seed, hosts=arguments.hosts, faults=faults, seconds=arguments.seconds, roles=roles,
        stop_share=arguments.stop_share, rank_share=arguments.rank_share, overlap=arguments.overlap,
        clients=arguments.clients, leave_share=arguments.leave_share, constrained_share=arguments.constrained_share,
        session_share=arguments.session_share,
    )  # fmt: skip


async def chaos(cluster: Cluster, plan: Plan, progress: Callable[[int], None] = lambda done: None) -> Result:
    """A broken promise is in the result, even where the run could not go on."""

    def on_progress(result: Result, seconds: float) -> None:
        done = sum(fault.kind != "none" for fault in result.faults)
        progress(done if plan.faults is not None else int(seconds))

    run = Run(cluster, plan, on_progress)
    telling = asyncio.create_task(show.tell(run.result, sys.stdout))
    try:
        await run.run()
    except Violation as error:
        run.result.violations = run.result.violations or [str(error)]
    finally:
        await cancelled(telling)
    return run.result


def main() -> int:
    made = parser()
    arguments = made.parse_args()
    plan = plan_of(arguments, made)

    async def work(cluster: Cluster, progress: Callable[[int], None]) -> Result:
        return await chaos(cluster, plan, progress)

    total = plan.faults if plan.faults is not None else int(plan.seconds or 0)
    return bench.run(arguments, total, work, show.show, show.as_dict)


if __name__ == "__main__":
    sys.exit(main())
