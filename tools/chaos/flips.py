"""Workers that change their roles under load, and processes that are killed meanwhile: `scripts/flips`."""

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.admin.flip import follow, role_of
from launcher.admin.status import NoAnswer, converse
from launcher.http.streams import percentile
from proto.drain import FlipAnswer, FlipRequest
from proto.messages import Role
from proto.status import FlipStatus, WorkerStatus
from tools.chaos import bench
from tools.chaos.client import Seen
from tools.chaos.cluster import Cluster, Member, Violation
from tools.chaos.gaps import Fault
from tools.chaos.orders import Order
from tools.chaos.run import Plan, Run

ASK_MS = 5_000
REFUSED_MAX = 40
FINISH_MS = 500.0  # time that streams have to end, where they are not moved at once
FIRST_STEP_S = 20.0
KILL_WITHIN_S = 0.3
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


@dataclass
class Result:
    flips: list[FlipStatus] = field(default_factory=list)
    given_up: Counter[str] = field(default_factory=Counter)  # reasons for which changes beside a kill were given up
    ratios: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    answers: int = 0
    turns: int = 0  # how many of the answers were to later turns of conversations
    tokens: int = 0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # the longest of each stream
    violations: list[str] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        done = [flip for flip in self.flips if flip.commit_ms]
        found: dict[str, Any] = {}
        for name in ("drained_ms", "commit_ms", "first_step_ms"):
            values = [getattr(flip, name) for flip in done]
            found |= {f"{name}_p50": statistics.median(values), f"{name}_max": max(values)} if values else {}
        if self.gaps_s:
            gaps = {
                "p50": statistics.median(self.gaps_s),
                "p99": percentile(self.gaps_s, 0.99),
                "max": max(self.gaps_s),
            }
            found |= {f"longest_gap_s_{name}": value for name, value in gaps.items()}
        return found


Processes = dict[str, list[WorkerStatus]]  # the name of each process → the workers that it registers as


class FlipRun(Run):
    """Flips one worker after the other between prefill, decode and mixed until there were enough flips and answers."""

    def __init__(
        self, cluster: Cluster, plan: Plan, flips: int, answers: int, kill_share: float, progress: Callable[[int], None]
    ) -> None:
        super().__init__(cluster, plan, lambda _, __: None)
        self.found = Result()
        self._flips, self._answers, self._kill_share = flips, answers, kill_share
        self._progress = progress

    def _judge(self, order: Order, seen: Seen, again: bool) -> None:
        super()._judge(order, seen, again)
        if not seen.error:
            self.found.gaps_s.append(seen.longest_gap_s)

    async def change_roles(self, clients: list[asyncio.Task[None]]) -> None:
        while len(self.found.flips) < self._flips or self.result.answers < self._answers:
            due = self._answers * len(self.found.flips) / self._flips if self._flips else 0
            await asyncio.wait(clients, timeout=0.2, return_when="FIRST_EXCEPTION")
            await self.check(clients)
            if len(self.found.flips) < self._flips and self.result.answers >= due:
                await self._flip_one()
            self._progress(min(len(self.found.flips), self._flips))
        await self._flip_back()
        await asyncio.wait(clients, timeout=1.0, return_when="FIRST_EXCEPTION")
        await self.check(clients)

    # --- one change -----------------------------------------------------------------------------------------------------

    async def _processes(self) -> Processes:
        found: Processes = {}
        for worker in (await self.cluster.watcher.next_report()).workers:
            found.setdefault(worker.process, []).append(worker)
        return found

    async def _flip_one(self) -> None:
        processes = await self._processes()
        self.found.ratios[ratio(processes)] += 1
        name = self.random.choice([one for one in processes if _others_serve(processes, one)])
        role = self.random.choice([one for one in ROLES if one is not role_of(processes[name][0])])
        victim = self._victim(name, processes) if self.random.random() < self._kill_share else None
        hand_over_ms = self.random.choice((0.0, 0.0, FINISH_MS))
        killing = asyncio.create_task(self._kill_soon(victim)) if victim is not None else None
        flip = await self._flip(processes[name][0], role, hand_over_ms, is_disturbed=killing is not None)
        if killing is not None:
            await killing
        if flip is not None and flip.state == "done":
            self.found.flips.append(flip)
        elif flip is not None:
            self.found.given_up[flip.failure.split(":")[0]] += 1
            if killing is None:
                raise Violation(f"{flip.worker} stays a {flip.before} worker: {flip.failure}")

    async def _flip(
        self, worker: WorkerStatus, role: Role, hand_over_ms: float, *, is_disturbed: bool = False, force: bool = False
    ) -> FlipStatus | None:
        """Orders the change of role. Returns None if it was refused beside a kill."""
        name, before, address = worker.process, role_of(worker), self.cluster.coordinator
        try:
            request = FlipRequest(name, role, hand_over_ms, force, "scripts/flips")
            answer = await converse(address, request, FlipAnswer, ASK_MS)
        except NoAnswer:
            if is_disturbed:
                return None
            raise Violation("the coordinator does not answer") from None
        if answer.refusal:
            if is_disturbed:
                return None
            raise Violation(f"{name} to {role}: {answer.refusal}")
        first_step_s = 0.0 if is_disturbed else FIRST_STEP_S
        flip = await follow(address, worker, before, role, hand_over_ms / 1000, first_step_s, ASK_MS)
        if flip.state == "done" and not flip.first_step_ms and not is_disturbed:
            raise Violation(f"{name} has run no step as a {role} worker in {FIRST_STEP_S:g} s under load")
        return flip

    def _victim(self, flipping: str, processes: Processes) -> Member | None:
        """Chooses the process to kill: one whose loss leaves a worker of each role, however the change ends; or a
        coordinator."""
        members = [self.cluster.serving()]
        for member in self.cluster.members:
            if member.role in ("prefill", "decode") and _others_serve(processes, member.name, flipping):
                members.append(member)
            if member.name == flipping:
                members += [member] * 2
        return self.random.choice(members)

    async def _kill_soon(self, member: Member) -> None:
        await asyncio.sleep(self.random.uniform(0.0, KILL_WITHIN_S))
        self.found.kills += 1
        await self._strike(member, Fault(member.role, "kill", member.name, time.monotonic()))

    async def _flip_back(self) -> None:
        """Gives each process the role it was started in, so that the audit compares like with like."""
        for _ in range(REFUSED_MAX):
            started = {member.name: member.role for member in self.cluster.members}
            processes = await self._processes()
            changed = [name for name, (one, *_) in processes.items() if started.get(name) != role_of(one)]
            if not changed:
                return
            name = next((one for one in changed if _others_serve(processes, one)), changed[0])
            force = not _others_serve(processes, name)
            await self._flip(processes[name][0], Role(started[name]), 0.0, is_disturbed=True, force=force)
        raise Violation("workers do not take their own roles again")


def _others_serve(processes: Processes, *but: str) -> bool:
    """Whether there is a worker of each role beside these."""
    rest = {worker.role for name, workers in processes.items() if name not in but for worker in workers}
    return rest == {Role.PREFILL, Role.DECODE}


def ratio(processes: Processes) -> str:
    roles = Counter(role_of(workers[0]) for workers in processes.values())
    parts = [f"{roles[Role.PREFILL]}P{roles[Role.DECODE]}D"] if roles - Counter(mixed=99) else []  # type: ignore[operator]
    return "+".join(parts + ([f"{roles[Role.MIXED]}M"] if roles[Role.MIXED] else []))


async def flips(
    cluster: Cluster, number: int, answers: int, seed: int, *, clients: int = 8, kill_share: float = 0.0,
    session_share: float = 0.0, output_tokens_max: int = 160, progress: Callable[[int], None] = lambda done: None,
) -> Result:  # fmt: skip
    """A broken promise is in the result, even where the run could not go on."""
    plan = Plan(
        seed=seed, faults=None, clients=clients, output_tokens_max=output_tokens_max, session_share=session_share
    )
    run = FlipRun(cluster, plan, number, answers, kill_share, progress)
    try:
        await run.run(run.change_roles)
    except Violation as error:
        run.result.violations = run.result.violations or [str(error)]
    found = run.found
    found.answers, found.tokens, found.seconds = run.result.answers, run.result.tokens, run.result.seconds
    found.turns = run.result.turns
    found.violations, found.audit = run.result.violations, run.result.audit
    return found


def as_dict(result: Result) -> dict[str, Any]:
    fields = {name: value for name, value in vars(result).items() if name not in ("flips", "gaps_s")}
    flips = [{name: getattr(one, name) for name in one.__struct_fields__} for one in result.flips]
    return fields | {"figures": result.figures(), "flips": flips}


def show(result: Result, console: Console) -> None:
    figures = result.figures()
    table = Table(title=f"{len(result.flips)} changes of role in {result.seconds:.0f} s", title_justify="left")
    for number, heading in enumerate(("", "p50", "p99", "max")):
        table.add_column(heading, justify="right" if number else "left")
    for label, name, unit in (
        ("until nothing is left, ms", "drained_ms", ".0f"),
        ("commit, ms", "commit_ms", ".0f"),
        ("until the first step, ms", "first_step_ms", ".0f"),
        ("longest gap of a stream, s", "longest_gap_s", ".3f"),
    ):
        values = (figures.get(f"{name}_{which}") for which in ("p50", "p99", "max"))
        table.add_row(label, *("–" if value is None else format(value, unit) for value in values))
    console.print(table)
    console.print(f"From: {', '.join(f'{count} × {ratio}' for ratio, count in sorted(result.ratios.items()))}")
    console.print(
        f"{result.answers:,} whole answers, {result.turns:,} of them to later turns, {result.tokens:,} tokens compared,"
        f" {result.kills} processes killed."
    )
    for why, count in sorted(result.given_up.items()):
        console.print(f"{count} given up: {why}", highlight=False)


def main() -> int:
    made = argparse.ArgumentParser(
        prog="scripts/flips",
        description="Workers change their roles (crossdock flip) between prefill, decode and mixed while clients stream from a"
        " tiny model. Every stream is compared with that of a quiet cluster; blocks, the ledger, descriptors, threads and"
        " shared memory are audited at the end. Status 1 if a promise was broken.",
    )
    made.add_argument("--flips", type=int, default=60, metavar="N", help="number of changes of role (default 60)")
    made.add_argument("--answers", type=int, default=3_000, metavar="N", help="whole answers, at least (default 3000)")
    made.add_argument("--clients", type=int, default=8, help="streams at once (default 8)")
    made.add_argument(
        "--kill-share", type=float, default=0.0, help="of changes beside which a process is killed (default 0)"
    )
    made.add_argument(
        "--session-share", type=float, default=0.0, help="of streams that begin a conversation (default 0)"
    )
    bench.add_common(made)
    arguments = made.parse_args()
    if not 0.0 <= arguments.kill_share <= 1.0:
        made.error("--kill-share: between 0 and 1")
    if not 0.0 <= arguments.session_share <= 1.0:
        made.error("--session-share: between 0 and 1")

    async def work(cluster: Cluster, progress: Callable[[int], None]) -> Result:
        return await flips(
            cluster, arguments.flips, arguments.answers, arguments.seed, clients=arguments.clients,
            kill_share=arguments.kill_share, session_share=arguments.session_share, progress=progress,
        )  # fmt: skip

    return bench.run(arguments, arguments.flips, work, show, as_dict)


if __name__ == "__main__":
    raise SystemExit(main())
