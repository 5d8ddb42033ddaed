"""`crossdock bench compare`: two runs of `bench serve` side by side.

A block bootstrap (Künsch 1989) shows whether a difference is more than chance: runs of consecutive requests are drawn with
replacement from each of the two runs, and the figure is computed again. Consecutive requests met the same queues, so single
requests would not be independent draws.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from rich.console import Console

from launcher import reports, tables
from launcher.load import plot, records
from launcher.load.figures import METRICS, LoadSlo, values
from launcher.load.records import CANCELLED, INTERRUPTED, RequestRecord, RunFile
from launcher.load.settings import CompareSettings
from launcher.load.show import number

SHOWN: Final = ("mean", "p50", "p90", "p95", "p99")
SEED: Final = 0
RESAMPLES: Final = 1000
_SAMPLES_MAX: Final = 20_000_000  # sorted for one figure, over all draws; long runs get fewer draws


def run(settings: CompareSettings) -> int:
    plot.check(settings.plot)
    first, second = records.read(settings.first), records.read(settings.second)
    console = reports.console_for(settings)
    differs = differences(first.settings, second.settings)
    rows = compared(first, second, SEED, RESAMPLES)
    show(differs, rows, console)
    if settings.as_json:
        sys.stdout.write(json.dumps({"settings": differs, "figures": rows}, indent=1) + "\n")
    if settings.plot:
        plot.draw(settings.plot, [("A", first), ("B", second)])
    return 0


def differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (first.get(name, "–"), second.get(name, "–"))
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    }


def compared(first: RunFile, second: RunFile, seed: int, resamples: int) -> list[dict[str, Any]]:
    """Returns one row for each figure: both values, the ratio B/A, its 95 % interval, and whether the interval excludes 1."""
    source = np.random.default_rng(seed)
    rows = []
    for metric, name in METRICS.items():
        sides = [_by_request(run, metric) for run in (first, second)]
        if all(sum(map(len, side)) for side in sides):
            drawn = [_drawn(side, source, resamples) for side in sides]
            for what in SHOWN:
                rows.append(_row(f"{name} {what}, ms", sides, drawn, _figure(what)))
    good = [_goodness(first), _goodness(second, first.settings)]
    if all(good):
        drawn = [_drawn(side, source, resamples) for side in good]
        rows.append(_row("within the limits of A, share", good, drawn, np.mean))
    return rows


def _by_request(run: RunFile, metric: str) -> list[np.ndarray]:
    counted = sorted((one for one in run.requests if one.counted), key=lambda one: one.due_s)
    return [np.array(values([record], metric)) for record in counted]


def _goodness(run: RunFile, settings: dict[str, Any] | None = None) -> list[np.ndarray]:
    """Returns whether each request kept the limits. Both runs are judged by the same limits, so that their shares can be
    compared."""
    slo = LoadSlo.of(settings or run.settings)

    def judged(record: RequestRecord) -> bool:
        return record.counted and record.outcome not in (CANCELLED, INTERRUPTED)

    return [np.array([float(not slo.missed(record))]) for record in run.requests if judged(record)]


def _drawn(side: Sequence[np.ndarray], source: np.random.Generator, resamples: int) -> list[np.ndarray]:
    """Draws resamples that are each as long as the run, in blocks of about the cube root of the number of requests."""
    count = len(side)
    block = max(1, round(count ** (1 / 3)))
    most = max(100, min(resamples, _SAMPLES_MAX // max(1, sum(map(len, side)))))
    doubled = [*side, *side[:block]]  # the beginning follows the end, so that each request is drawn equally often
    found = []
    for _ in range(most):
        starts = source.integers(count, size=-(-count // block)).tolist()
        found.append(np.concatenate([one for start in starts for one in doubled[start : start + block]]))
    return found


def _figure(what: str) -> Callable[[np.ndarray], float]:
    if what == "mean":
        return lambda found: float(np.mean(found))
    rank = float(what.removeprefix("p"))
    return lambda found: float(np.percentile(found, rank, method="inverted_cdf"))


def _row(
    name: str,
    sides: Sequence[Sequence[np.ndarray]],
    drawn: Sequence[Sequence[np.ndarray]],
    figure: Callable[[np.ndarray], Any],
) -> dict[str, Any]:
    one, other = (float(figure(np.concatenate(side))) for side in sides)
    pairs = [
        (float(figure(a)), float(figure(b))) for a, b in zip(drawn[0], drawn[1], strict=False) if len(a) and len(b)
    ]
    ratios = [b / a for a, b in pairs if a > 0]
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist() if ratios else (0.0, float("inf"))
    return {
        "figure": name,
        "a": one,
        "b": other,
        "ratio": other / one if one > 0 else None,
        "low": low,
        "high": high,
        "means_something": low > 1 or high < 1,
    }


def show(differs: dict[str, tuple[Any, Any]], rows: Sequence[dict[str, Any]], console: Console) -> None:
    if differs:
        settings = tables.Table("Settings that differ", "", tables.words("A"), tables.words("B"))
        for name, (one, other) in differs.items():
            settings.row(name, str(one), str(other))
        settings.show(console)
    else:
        console.print("Their settings are the same.")
    shown = tables.Table("B beside A", "", "A", "B", "B / A", "95 % of B / A", tables.words(""))
    for row in rows:
        interval = f"{number(row['low'], 3)} to {number(row['high'], 3)}"
        digits = 3 if row["a"] < 10 else 1
        shown.row(
            row["figure"],
            number(row["a"], digits),
            number(row["b"], digits),
            number(row["ratio"], 3),
            interval,
            "differs" if row["means_something"] else "noise",
            style="bold" if row["means_something"] else "dim",
        )
    shown.show(console)
    console.print("[dim]noise: the interval has 1 in it, so that chance alone explains the difference[/dim]")
