"""`python -m tools.scenarios [NAME ...]`: plays the scenarios of tests/scenarios, and shows figures beside the pinned ones.

`--write` pins them: it puts the figures of three seeds into figures.json, and what is required of them into the README there.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.commands.simulate import read, read_scenario
from lab.scenarios.requirements import Checked, check
from launcher.tables import Table, words

FOLDER: Final = Path(__file__).parents[1] / "tests" / "scenarios"
FIGURES: Final = FOLDER / "figures.json"
PAGE: Final = FOLDER / "README.md"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
SEEDS: Final = (1, 2, 3)
STANDARD: Final = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "goodput_share", "finished_share", "recomputed_share")
"""Figures of each stream of traffic that are pinned beside the required ones."""
BAND: Final = 0.03
"""A figure may differ from the pinned one by so much of it."""
LEAST_BAND: Final = 0.01
"""And by so much where that is more, as for shares near 0."""
BEGIN, END = (
    "<!-- figures: made by `python -m tools.scenarios --write`; a test fails when they are stale -->\n",
    "<!-- end -->\n",
)

Row = dict[str, Any]
"""The `figure` and what was `found` with each seed. If something is required of it, also `required`, and how many seeds
`missed` it."""


def play_seed(name: str, seed: int) -> dict[str, Any]:
    return figures(play(read(str(FOLDER / f"{name}.toml"), seed)))


def rows(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the figures to pin: required ones, then those of each stream. `runs`: all figures of each seed."""
    scenario = read_scenario(str(FOLDER / f"{name}.toml"))
    made = [_required(seeds) for seeds in zip(*(check(scenario.require, run) for run in runs), strict=True)]
    known = {row["figure"] for row in made}
    for stream in runs[0]["traffic"] if len(runs[0]["traffic"]) > 1 else ("all",):
        streams = [run["all"] if stream == "all" else run["traffic"][stream] for run in runs]
        for figure in STANDARD:
            found = [_rounded(_standard(one, figure)) for one in streams]
            if f"{stream}: {figure}" not in known and (figure != "recomputed_share" or any(found)):
                made.append({"figure": f"{stream}: {figure}", "found": found})
    return made


def _required(seeds: Sequence[Checked]) -> Row:
    found = [_rounded(one.value) for one in seeds]
    missed = sum(not one.holds for one in seeds)
    return {"figure": seeds[0].name, "found": found, "required": seeds[0].limit, "missed": missed}


def _standard(stream: Mapping[str, Any], figure: str) -> float | None:
    if figure == "finished_share":
        return float(stream["finished"] / max(stream["offered"], 1))
    value: Any = stream
    for part in figure.split("."):
        value = value and value[part]
    return None if value is None else float(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def middle(row: Row) -> float | None:
    """Median of the seeds; None if one of them has measured nothing."""
    return None if None in row["found"] else median(row["found"])


def differences(name: str, pinned: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    """Compares medians of the seeds. Yields a line for each figure that has left its band."""
    old, new = ({_key(row): middle(row) for row in some} for some in (pinned, found))
    for key in old | new:
        was, now = old.get(key), new.get(key)
        if was is None or now is None:
            within = was is now
        else:
            within = abs(now - was) <= max(BAND * abs(was), LEAST_BAND)
        if not within:
            yield f"{name}, {key[0]}: {_shown(was)} is pinned, {_shown(now)} found"


def _key(row: Row) -> tuple[str, str]:
    return row["figure"], row.get("required", "")


def pinned() -> dict[str, list[Row]]:
    known: dict[str, list[Row]] = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    return known


def write(known: Mapping[str, Sequence[Row]]) -> None:
    """Writes the figures of scenarios that exist, a line for each figure, and the page."""
    kept = {name: known[name] for name in NAMES if name in known}
    parts = [
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in some) + "\n ]"
        for name, some in kept.items()
    ]
    FIGURES.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), kept), "utf-8")


def page(text: str, known: Mapping[str, Sequence[Row]]) -> str:
    """Returns the page with a table of what is required. Raises `ValueError` if it lacks one of the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    head = "| scenario | figure | required | median | range | |\n|---|---|---|---|---|---|\n"
    lines = [
        f"| [{name}]({name}.toml) | {' | '.join(_cells(row))} |\n"
        for name, some in known.items()
        for row in some
        if "required" in row
    ]
    return before + begin + "\n" + head + "".join(lines) + "\n" + end + after


def _cells(row: Row) -> tuple[str, ...]:
    found = [one for one in row["found"] if one is not None]
    extent = f"{_shown(min(found))} to {_shown(max(found))}" if found else "-"
    missed = row.get("missed", 0)
    verdict = "" if "required" not in row else f"missed by {missed} of {len(row['found'])}" if missed else "met"
    return row["figure"], row.get("required", ""), _shown(middle(row)), extent, verdict


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.scenarios", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios without .toml; by default all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="by default %(default)s")
    parser.add_argument("--write", action="store_true", help="pin the figures of the named scenarios")
    parser.add_argument("--jobs", type=int, default=1, help="processes, by default %(default)s")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.write and seeds != list(SEEDS):
        parser.error("--write pins the seeds 1, 2 and 3")
    console, known = Console(stderr=True), pinned()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(options.jobs) as pool:
        names = options.names or NAMES
        task = progress.add_task("", total=len(names) * len(seeds))
        running = {name: [pool.submit(play_seed, name, seed) for seed in seeds] for name in names}
        for name, plays in running.items():
            progress.update(task, description=name)
            for one in plays:
                one.add_done_callback(lambda _: progress.advance(task))
            found = rows(name, [one.result() for one in plays])
            _show(name, known.get(name, []), found)
            known[name] = found
            if options.write:
                write(known)
    return 0


def _show(name: str, pinned: Sequence[Row], found: Sequence[Row]) -> None:
    old = {_key(row): middle(row) for row in pinned}
    table = Table(name, "figure", words("required"), "median", words("range"), words(""), "pinned")
    for row in found:
        table.row(*_cells(row), _shown(old.get(_key(row))))
    table.show(Console())


if __name__ == "__main__":
    sys.exit(main())
