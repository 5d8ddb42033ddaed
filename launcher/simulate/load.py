"""`crossdock simulate load`: the production coordinator under a load that a file describes, in virtual time."""

from typing import Any

from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from launcher import tables
from launcher.report import console_for, write_json
from launcher.simulate import scenario
from runtime.settings.types import JsonOption
from simulation.load.figures import figures
from simulation.load.run import play


class SimulateLoadSettings(JsonOption):
    """Play a load against the coordinator's own scheduler in virtual time, and say how each tenant was served.

    SCENARIO is a TOML file with workers, tenants, traffic and failures. No model is needed, and an hour takes a minute or
    so. Change one thing in the file and compare. docs/policy.md explains the format and answers five questions with it.
    """

    file: str = Field(min_length=1, description="TOML file.", json_schema_extra={"argument": "SCENARIO"})
    seed: int = Field(-1, ge=-1, le=1 << 62, description="Replaces the file's seed; -1: the file's.")


def run(settings: SimulateLoadSettings) -> int:
    workload = scenario.read(settings.file, None if settings.seed < 0 else settings.seed)
    console = console_for(settings, highlight=False)
    columns = TextColumn("virtual time"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=workload.duration_s)
        played = play(workload, lambda now_s: progress.update(task, completed=now_s))
    found = figures(played)
    show(found, console)
    write_json(settings, found)
    return 0


def show(found: dict[str, Any], console: Console) -> None:
    served = tables.Table(
        "How each stream of traffic was served", "traffic", "offered", "finished", "goodput/s", "of offered",
        "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "rejections each", "interruptions",
    )  # fmt: skip
    for name, one in (*found["traffic"].items(), ("all", found["all"])):
        ttft, tpot = one["ttft_ms"] or {}, one["tpot_ms"] or {}
        served.row(
            name,
            f"{one['offered']:,}",
            f"{one['finished']:,}",
            f"{one['goodput_per_s']:.2f}",
            f"{one['goodput_share']:.1%}",
            *(f"{times[rank]:,.0f}" if times else "-" for times in (ttft, tpot) for rank in ("p50", "p99")),
            f"{one['rejections_per_request']:.2f}",
            f"{one['interruptions']:,}",
        )
    served.show(console)
    if len(found["classes"]) > 1:
        goodput = tables.Table("Goodput by priority class", "class", "offered", "finished", "within targets", "per s")
        for name, one in found["classes"].items():
            counts = (f"{one[what]:,}" for what in ("offered", "finished", "good"))
            goodput.row(name, *counts, f"{one['goodput_per_s']:.2f}")
        goodput.show(console)
    if len(found["shares"]) > 1:
        shares = tables.Table("Who got what", "tenant", "of prompt tokens", "of sequences × time in decode")
        for tenant, share in found["shares"].items():
            shares.row(tenant, f"{share['prefill']:.1%}", f"{share['decode']:.1%}")
        shares.show(console)
    reasons = [f"{count:,} {reason}" for reason, count in found["all"]["rejected"].items()]
    otherwise = [f"{count:,} {state}" for state, count in found["all"]["ended_otherwise"].items()]
    console.print(
        f"Ended otherwise: {', '.join(otherwise) or 'none'}. Rejected for good: {', '.join(reasons) or 'none'}."
    )
    console.print(
        f"Of the computed prompt tokens, {found['all']['useful_share']:.1%} were of requests that met their goal."
    )
