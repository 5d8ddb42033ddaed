"""The report of `crossdock tune` on the terminal."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from launcher import tables
from launcher.models.resolve import DEFAULT_MODEL_ID

LIMITS: Final = {
    "": ("·", "green"),
    "prefill compute": ("P", "dark_orange"),
    "decode compute": ("D", "blue"),
    "decode memory": ("M", "magenta"),
    "prefill memory": ("m", "magenta"),
    "sequences": ("S", "cyan"),
    "transfer": ("T", "red"),
    "shared cores": ("C", "yellow"),
    "TTFT target": ("F", "bright_black"),
    "TPOT target": ("L", "bright_black"),
}
"""The limit of a ratio: its letter and colour in the map."""
ROWS_MAX: Final = 10  # of ratios that ran the whole trace
BUSY_NOTE: Final = (
    "Busy: share of the time in which a prefill worker (P) or a decode worker (D) computes, and a prefill worker's link (T)"
    " sends. Limited by: the resource of which twice as much would let the most requests keep the SLO, or else a target."
)


def show(report: Mapping[str, Any], console: Console) -> None:
    traffic, slo = report["traffic"], report["slo"]
    console.print(
        f"{traffic['requests']:,} requests in {traffic['seconds']:,.0f} s ({traffic['requests_per_s']:.2f}/s),"
        f" {traffic['prompt_mean']:.0f} prompt and {traffic['output_mean']:.0f} answer tokens on average;"
        f" SLO: first token {slo['ttft_ms']:g} ms, later ones {slo['tpot_ms']:g} ms,"
        f" for {100 * slo['percentile']:g} % of the requests",
        highlight=False,
    )
    console.print(Text(headline(report), style="bold green" if report["kept"] else "bold yellow"))
    for line in report["caveats"]:
        console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False, soft_wrap=True)
    _ranked(report["ranked"], console)
    _by_workers(report, console)
    _map(report["map"], console)
    _what_if(report, console)
    console.print(f"\n{apply_note(report)}", highlight=False)
    apply = report["apply"]
    for line in (apply["command"], *apply["cluster_toml"]):
        console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"[dim]{how(report)}[/dim]", highlight=False)


def apply_note(report: Mapping[str, Any]) -> str:
    """Returns the text above the command and the lines of `cluster.toml`."""
    if of_cards(report):
        return "To start it, with the addresses of your hosts in cluster.toml:"
    apply = "To apply it, on one machine or in cluster.toml:"
    if (model := report["apply"]["model"]) not in ("", DEFAULT_MODEL_ID):
        apply = f"To apply it, on one machine (with --model for {model}) or in cluster.toml:"
    return apply if report["disaggregate"] else f"Workers that do both phases are better for this traffic. {apply}"


def of_cards(report: Mapping[str, Any]) -> bool:
    """Whether layouts of cards were compared, in place of ratios of workers."""
    return bool(report["settings"]["cards"] or report["settings"]["layouts"])


def headline(report: Mapping[str, Any]) -> str:
    """ "3P5D, 92 %; 4P4D −3 %": the recommendation with its probability, and how much less the next best serves."""
    best, others = report["recommendation"], report["ranked"][1:]
    other = next((one for one in others if one["workers"] != best["workers"]), None)
    text = f"{best['workers']}, {100 * (probability_of(report) or 0):.0f} %"
    if other is not None:
        less = other["goodput_requests_per_s"] / max(best["goodput_requests_per_s"], 1e-9) - 1
        text += f"; {other['workers']} serves as much" if abs(less) < 0.0005 else f"; {other['workers']} {signed(less)}"
    if not report["disaggregate"]:
        text += " — do not disaggregate"
    kept = best["attainment"]
    text += f". {100 * kept:.1f} % of requests keep the SLO"
    if not report["kept"]:
        text += f"; {limit_words(best)}"
    times = f"{report['headroom']:.2g} times the load"
    text += f". It keeps the SLO up to {times}" if report["headroom"] else ". It keeps the SLO at no load"
    text += cost_words(report)
    fewest = report["fewest_workers"]
    if fewest and fewest != best["workers"]:
        text += f". The fewest {'cards' if of_cards(report) else 'workers'} that keep it: {fewest}"
    if not report["kept"] and report["cards_enough"]:
        text += f". About {report['cards_enough']} cards would be enough"
    return text + "."


def cost_words(report: Mapping[str, Any]) -> str:
    """Returns how many requests in time one unit of money buys, and which ratio gives most."""
    best = report["recommendation"]
    if not best["good_per_cost"]:
        return ""
    most = max(report["ranked"], key=itemgetter("good_per_cost"))
    text = f". {number(best['good_per_cost'], 0)} requests in time for each unit of money"
    if most["workers"] != best["workers"]:
        kept = f"{100 * most['attainment']:.1f} % within the SLO"
        text += f" ({most['workers']}: {number(most['good_per_cost'], 0)}, with {kept})"
    return text


def limit_words(one: Mapping[str, Any]) -> str:
    """Returns what limits a ratio that does not keep the SLO, and by how much."""
    gain = f"{100 * one['limit_gain']:.0f} points more"
    if one["binds"] in ("TTFT target", "TPOT target"):
        return f"the {one['binds']} limits it: more of any one resource helps nobody, and twice the target {gain}"
    return f"{one['binds']} limits it: with twice as much, {gain}"


def probability_of(report: Mapping[str, Any]) -> float:
    """Returns the probability that this ratio is best, added up over all step budgets."""
    name = report["recommendation"]["workers"]
    return sum(one["probability"] or 0.0 for one in report["ranked"] if one["workers"] == name)


def signed(share: float) -> str:
    """A percentage with a real minus sign."""
    return f"{100 * share:+.1f} %".replace("-", "−")


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _ranked(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    costs = ("good/money",) if rows[0]["good_per_cost"] else ()
    table = tables.Table(
        "Whole trace; times in ms", "ratio", "step", "best", "good/s", *costs, "%", "TTFT p50", "TTFT p90", "TPOT p90",
        "busy P/D/T", tables.words("limited by"),
    )  # fmt: skip
    for one in rows[:ROWS_MAX]:
        table.row(
            one["workers"],
            str(one["step_tokens"]),
            f"{100 * one['probability']:.0f} %",
            number(one["goodput_requests_per_s"], 2),
            *(number(one["good_per_cost"], 0) for _ in costs),
            number(100 * one["attainment"]),
            number(one["ttft_ms"]["p50"], 0),
            number(one["ttft_ms"]["p90"], 0),
            number(one["tpot_ms"]["p90"]),
            f"{one['prefill_busy']:.2f}/{one['decode_busy']:.2f}/{one['link_busy']:.2f}",
            one["binds"] or "nothing",
        )
    table.show(console)
    console.print(f"[dim]{BUSY_NOTE}[/dim]", highlight=False)


def _what_if(report: Mapping[str, Any], console: Console) -> None:
    table = tables.Table("What if", "load", tables.words("workers"), "good/s", "%")
    for one in report["what_if"]:
        table.row(
            f"× {one['load']:g}",
            one["workers"],
            number(one["goodput_requests_per_s"], 2),
            number(100 * one["attainment"]),
        )
    table.show(console)


def families(report: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """Returns, for each number of workers, the best ratio with separate phases and the mixed one, if they ran the whole
    trace."""
    found = []
    for total in range(1, report["settings"]["workers"] + 1):
        rows = [one for one in report["candidates"] if one["total"] == total and one["whole_trace"]]
        sides = [[one for one in rows if bool(one["mixed"]) is mixed] for mixed in (False, True)]
        apart, mixed = (max(side, key=itemgetter("attainment"), default=None) for side in sides)
        found.append((total, apart, mixed))
    return found


def _by_workers(report: Mapping[str, Any], console: Console) -> None:
    what = "cards" if of_cards(report) else "workers"
    table = tables.Table(
        f"Goodput by number of {what} (good/s, 90 % band)", what, "best ratio", "good/s", "band", "mixed", "band "
    )
    for total, apart, mixed in families(report):
        if of_cards(report) and not apart and not mixed:
            continue
        table.row(str(total), apart["workers"] if apart else "", *_interval(apart), *_interval(mixed))
    table.show(console)


def _interval(one: Mapping[str, Any] | None) -> tuple[str, str]:
    if one is None:
        return "", ""
    return number(one["goodput_requests_per_s"], 2), f"{one['goodput_low']:.2f}–{one['goodput_high']:.2f}"


def _map(cells: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not cells:
        return
    console.print(Text("What limits each ratio, on an excerpt (prefill down, decode across)", style="bold italic"))
    rows = rows_of(cells)
    text = Text("     " + "".join(f"{square['decode']:>4}" for square in rows[0]) + "\n")
    for row in rows:
        text.append(f"{row[0]['prefill']:>4} ")
        for square in row:
            letter, colour = LIMITS[square["binds"]]
            text.append(f"{letter:>4}", style=colour)
        text.append("\n")
    console.print(text, end="")
    used = sorted({square["binds"] for square in cells})
    console.print("     " + ", ".join(f"{LIMITS[name][0]} {name or 'keeps the SLO'}" for name in used), highlight=False)


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of the map: one for each number of prefill workers."""
    return [list(row) for _, row in groupby(cells, key=itemgetter("prefill"))]


def how(report: Mapping[str, Any]) -> str:
    rows = report["candidates"]
    full = sum(1 for one in rows if one["whole_trace"])
    none = sum(1 for one in rows if not one["simulated_requests"])
    part = len(rows) - full - none
    return (
        f"{len(rows)} candidates in {report['seconds']} s: {full} ran the whole trace, {part} excerpts of it,"
        f" {none} were discarded by their bound."
    )
