"""`python -m benchmarks kv-utilization`: how full a decode worker's KV pool gets under overload, and whether it ever runs out.

KV use is the mean over the loaded steps of blocks really held (prompts on their way included) over all blocks. It is compared
with that of whole-life reservation (prompt + max_tokens for each request) in the same world with the same seed.

How full the pool gets depends on the lengths. A prompt takes its blocks from the start, so the larger its part of a request's
life, the less must be guessed. With outputs uniform between 1 and max_tokens L, staggered evenly, and prompts of p · L, the
sum over what is to come in x · L steps is in proportion to 1/3 + p + x - (1 + p) x² - x³/3, so the use is at most its value at
x = 0 over its highest: 60 % for p = 0, 76 % for 1/4, 84 % for 1/2, 92 % for 1 and 97 % for 2. If all answers are equally long,
those that began together also end together, and the pool is as empty at their start as it is full at their end. A policy that
never interrupts an answer cannot do better without knowing lengths beforehand. `--kv-overcommit` can, but it interrupts some
answers: a factor of 1.1 brings nearly all of its gain, and larger factors bring nearly all of its cost.
"""

import time
from collections.abc import Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.kv_utilization_load import Figures, Job, OverloadedCluster
from benchmarks.settings import RoomBenchSettings
from launcher import tables
from launcher.reports import console_for, write_json
from scheduler.kv_admission.admission import KvAdmission, KvDemand

Draw = Callable[[Random], Job]
UNIFORM = {"uniform, prompt L/4": 0.25, "uniform, prompt L/2": 0.5, "uniform, prompt L": 1.0, "uniform, prompt 2L": 2.0}
"""Prompt lengths as parts of max_tokens."""
OVERCOMMITS = (1.1, 2.0)
_OVERCOMMITTED = ("uniform, prompt L/4", "uniform, prompt L/2", "uniform, prompt L")


def workloads(most: int) -> dict[str, Draw]:
    """Returns the workloads by name; `most` is max_tokens. The first ones have outputs of half of it on average; the others
    are extreme cases."""

    def uniform(prompt: int) -> Draw:
        return lambda random: Job(prompt, most, (random.randint(1, most),))

    def long_after_short(random: Random) -> Job:
        return random.choice([Job(most // 4, 16, (16,)), Job(16, 2 * most, (2 * most,))])

    def choices(random: Random) -> Job:
        return Job(most // 2 + random.randint(0, 40), most, tuple(random.randint(1, most) for _ in range(4)))

    found = {name: uniform(int(prompt * most)) for name, prompt in UNIFORM.items()}
    return found | {
        "exactly half, prompt L": lambda random: Job(most, most, (most // 2,)),
        "all L long, prompt L/2": lambda random: Job(most // 2, most, (most,)),
        "long after short": long_after_short,
        "4 choices, prompt L/2": choices,
        "stop at L/4, prompt L/2": lambda random: Job(most // 2, most, (max(most // 4, 1),)),
    }


def most_use(prompt: float) -> float:
    """Returns the largest possible KV use with outputs uniform up to L and prompts of `prompt` · L (see the module's head)."""
    ahead = [step / 1000 for step in range(1001)]
    sums = [1 / 3 + prompt + x - (1 + prompt) * x**2 - x**3 / 3 for x in ahead]
    return sums[0] / max(sums)


def measure(settings: RoomBenchSettings, draw: Draw, *, whole_life: bool = False, overcommit: float = 1.0) -> Figures:
    cluster = OverloadedCluster(
        draw,
        settings.kv_blocks,
        settings.block_size,
        settings.overload,
        whole_life=whole_life,
        overcommit=overcommit,
        seed=settings.seed,
    )
    return cluster.run(2 * settings.max_tokens, settings.steps)


def decision_costs(attempts: int, block_size: int) -> dict[str, float]:
    """Returns the median microseconds of thread CPU time of each operation, with `attempts` attempts there and a full pool."""
    random, room = Random(0), KvAdmission(1, block_size)
    costs: dict[str, list[int]] = {"fits": [], "place": [], "joined": [], "release": []}

    def timed(name: str, move: Callable[[], object]) -> None:
        began = time.thread_time_ns()
        move()
        costs[name].append(time.thread_time_ns() - began)

    names = [(f"r{number}", 1) for number in range(3 * attempts)]
    for number, key in enumerate(names):
        life = KvDemand(random.randint(100, 2000), random.randint(50, 1000))
        room.reached(2 * number)
        room.kv_blocks = room.peak + life.grown(0, block_size)  # it must neither surely fit nor surely not fit
        timed("fits", lambda life=life: room.fits(life))  # type: ignore[misc]
        timed("place", lambda key=key, life=life: room.place(key, life))  # type: ignore[misc]
        timed("joined", lambda key=key, number=number: room.joined(key, 2 * number))  # type: ignore[misc]
        if number >= attempts:
            timed("release", lambda number=number: room.release(names[number - attempts]))  # type: ignore[misc]
    return {name: sorted(found)[len(found) // 2] / 1000 for name, found in costs.items()}


def run(settings: RoomBenchSettings) -> int:
    console = console_for(settings)
    console.print(
        f"{settings.kv_blocks} blocks of {settings.block_size} tokens, max_tokens L = {settings.max_tokens},"
        f" {settings.overload:g} x the load the pool could carry if full, {settings.steps} steps each"
    )
    found = workloads(settings.max_tokens)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("worlds", total=2 * len(found) + len(OVERCOMMITS) * len(_OVERCOMMITTED))
        rows: dict[str, Any] = {}
        for name, draw in found.items():
            rows[name] = {}
            for policy, whole_life in (("peak", False), ("whole_life", True)):
                rows[name][policy] = _figures(measure(settings, draw, whole_life=whole_life))
                progress.advance(bar)
        over: dict[str, dict[str, Any]] = {}
        for name in _OVERCOMMITTED:
            over[name] = {}
            for factor in OVERCOMMITS:
                over[name][f"{factor:g}"] = _figures(measure(settings, found[name], overcommit=factor))
                progress.advance(bar)
    _show(rows, console)
    _show_overcommit(over, console)
    costs = {str(count): decision_costs(count, settings.block_size) for count in (16, 256, 1024)}
    for count, moves in costs.items():
        words = ", ".join(f"{name} {cost:.0f}" for name, cost in moves.items())
        console.print(f"With {count} attempts there, µs of CPU: {words}")
    broken = sum(row["peak"]["refused_after_prefill"] + row["peak"]["out_of_memory"] for row in rows.values())
    write_json(settings, {"kv_use": rows, "overcommit": over, "decision_us": costs})
    return 1 if broken else 0


def _show(rows: dict[str, Any], console: Console) -> None:
    title = "Blocks really held (most: no more is possible) and tokens, and by whole lives"
    headings = ("KV use", "most", "whole KV use", "tok/step", "whole tok/step", "refused", "OOM")
    table = tables.Table(title, "outputs", *headings)
    for name, row in rows.items():
        peak, whole = row["peak"], row["whole_life"]
        prompt = UNIFORM.get(name)
        table.row(
            name,
            f"{peak['kv_use']:.1%}",
            "" if prompt is None else f"{most_use(prompt):.0%}",
            f"{whole['kv_use']:.1%}",
            f"{peak['output_tokens'] / peak['steps']:.0f}",
            f"{whole['output_tokens'] / whole['steps']:.0f}",
            str(peak["refused_after_prefill"]),
            str(peak["out_of_memory"]),
        )
    table.show(console)


def _show_overcommit(over: dict[str, dict[str, Any]], console: Console) -> None:
    title = "With --kv-overcommit (again: prompt tokens computed for victims)"
    headings = ("KV use", "tok/step", "ended", "victims", "OOM", "again")
    table = tables.Table(title, "outputs", "factor", *headings, keys=2)
    for name, factors in over.items():
        for factor, row in factors.items():
            numbers = (row["finished"], row["preempted"], row["out_of_memory"], row["recomputed_tokens"])
            tokens = row["output_tokens"] / row["steps"]
            table.row(name, factor, f"{row['kv_use']:.1%}", f"{tokens:.0f}", *map(str, numbers))
    table.show(console)


def _figures(figures: Figures) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in Figures.__dataclass_fields__}
