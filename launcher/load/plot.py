"""Pictures of runs. matplotlib is an extra, and imported only when a picture is asked for."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from launcher import reports
from launcher.load.figures import values
from launcher.load.records import RunFile
from runtime.settings.options import SettingsError

FORMATS = (".svg", ".png", ".pdf")
BINS = 60


def check(path: str) -> None:
    """Checks before minutes are spent that a picture can be drawn. Raises `SettingsError`."""
    if not path:
        return
    reports.check_writable(path, "--plot")
    if Path(path).suffix not in FORMATS:
        raise SettingsError(f"--plot: {path} must end with one of {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise SettingsError(f"--plot: matplotlib is not installed; {reports.installs('matplotlib')}")


def draw(path: str, runs: Sequence[tuple[str, RunFile]]) -> None:
    """Distributions of TTFT and ITL, and output tokens over time; each run in a colour of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    ttft, itl, flow = figure.subplots(1, 3)
    for name, run in runs:
        counted = [record for record in run.requests if record.counted]
        for axes, metric in ((ttft, "ttft_ms"), (itl, "itl_ms")):
            _cumulate(axes, values(counted, metric), name)
        edges, rates = timeline(run)
        flow.step(edges, rates, where="post", label=name)
    settings = runs[0][1].settings
    for axes, what, limit in ((ttft, "TTFT", settings["slo_ttft_ms"]), (itl, "ITL", settings["slo_itl_ms"])):
        axes.set(xlabel=f"{what}, ms", ylabel="share", ylim=(0, 1), xscale="log")
        if limit:
            axes.axvline(limit, linestyle=":", color="grey")
    flow.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    for axes in (ttft, itl, flow):
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        ttft.legend()
    figure.savefig(Path(path).expanduser())


def _cumulate(axes: Any, found: Sequence[float], name: str) -> None:
    if found:
        ordered = sorted(max(value, 0.1) for value in found)
        axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=name)


def draw_isolation(path: str, result: dict[str, Any]) -> None:
    """Draw the share of gaps that were longer than each length, of the streams alone and beside long prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for key, name in (("alone", "streams alone"), ("loaded", "while long prompts are computed")):
        gaps_ms = sorted(result[key]["gaps_ms"])
        shares = [1 - index / len(gaps_ms) for index in range(len(gaps_ms))]
        axes.step(gaps_ms, shares, where="pre", label=f"{name}: p99 {result[key]['p99_ms']:.0f} ms")
    axes.set(xlabel="gap between two tokens of one stream, ms", ylabel="share of gaps that are longer", yscale="log")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(path).expanduser())


def draw_peers(path: str, results: dict[str, dict[str, Any]]) -> None:
    """A row for each server: the p99 gap of its streams alone, and while long prompts arrive."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.7 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results.values()):
        alone, loaded = result["alone"]["p99_ms"], result["loaded"]["p99_ms"]
        axes.plot([alone, loaded], [row, row], color="lightgrey", linewidth=4, zorder=1)
        axes.scatter(alone, row, color="tab:blue", zorder=2, label="streams alone" if row == 0 else None)
        axes.scatter(loaded, row, color="tab:red", zorder=2, label="while long prompts arrive" if row == 0 else None)
        axes.annotate(f"{loaded:,.0f} ms", (loaded, row), xytext=(8, -4), textcoords="offset points")
        axes.annotate(f"{alone:,.0f} ms", (alone, row), xytext=(-8, -4), textcoords="offset points", ha="right")
    axes.set(xscale="log", xlabel="p99 gap between two tokens of a stream, ms (logarithmic)")
    axes.set_yticks(range(len(results)), list(results))
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.margins(x=0.2)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(Path(path).expanduser())


def timeline(run: RunFile) -> tuple[list[float], list[float]]:
    """Returns the beginnings of equal spans of the run, and the chunks with tokens per second in each."""
    arrivals: list[float] = []
    for record in run.requests:
        if record.first_s is not None:
            arrivals += [record.first_s + gone_ms / 1000 for gone_ms in accumulate(record.gaps_ms, initial=0.0)]
    span = max(arrivals, default=1.0) / BINS or 1.0
    counts = [0] * (BINS + 1)
    for at_s in arrivals:
        counts[min(BINS, int(at_s / span))] += 1
    return [index * span for index in range(BINS)], [count / span for count in counts[:BINS]]
