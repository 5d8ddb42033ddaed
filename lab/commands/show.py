"""The report of `crossdock tune` on the terminal."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lab.search import HEADROOM_MAX
from launcher import tables
from launcher.models.resolve import DEFAULT_MODEL_ID

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
    _map(report, console)
    _what_if(report, console)
    console.print(f"\n{apply_note(report)}", highlight=False)
    apply = report["apply"]
    for line in (apply["command"], *apply["cluster_toml"]):
        console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"[dim]{how(report)}[/dim]", highlight=False)


def apply_note(report: Mapping[str, Any]) -> str:
    """Returns the text above the command and the lines of `cluster.toml`."""
    if of_cards(report):
        return "The cluster.toml for it, with the addresses of your hosts, and the command for its first host:"
    apply = "To apply it, on one machine or in cluster.toml:"
    if (model := report["apply"]["model"]) not in ("", DEFAULT_MODEL_ID):
        apply = f"To apply it, on one machine (with --model for {model}) or in cluster.toml:"
    if report["disaggregate"] or report["settings"]["workers"] == 1:
        return apply
    return f"Workers that do both phases are better for this traffic. {apply}"


def of_cards(report: Mapping[str, Any]) -> bool:
    """Whether layouts of cards were compared, in place of ratios of workers."""
    return bool(report["settings"]["cards"] or report["settings"]["layouts"])


def headline(report: Mapping[str, Any]) -> str:
    """ "3P5D, 92 %; 4P4D −3 %": the recommendation with its probability, and how much less the next best serves, or, where
    none keeps the SLO, up to how much less of the load the next best keeps it."""
    best, others = report["recommendation"], report["ranked"][1:]
    other = next((one for one in others if one["workers"] != best["workers"]), None)
    text = f"{best['workers']}, {100 * (probability_of(report) or 0):.0f} %"
    if other is not None:
        what = "goodput_requests_per_s" if report["kept"] or not best["load_kept"] else "load_kept"
        less = other[what] / max(best[what], 1e-9) - 1
        text += f"; {other['workers']} {'is equal' if less > -0.0005 else signed(less)}"
    if not report["disaggregate"] and report["settings"]["workers"] > 1:
        text += " — do not disaggregate"
    text += f". {100 * best['attainment']:.1f} % of requests keep the SLO"
    if not report["kept"]:
        text += f"; {limit_words(best)}"
    headroom = report["headroom"]
    text += f". It keeps the SLO {headroom_words(headroom)}"
    if report["kept"] or not headroom:
        return text + cost_words(report) + "."
    needed, what = math.ceil(best["total"] / headroom), "workers"
    if of_cards(report):
        needed, what = report["cards_enough"], "cards"
    return text + f", so that about {needed} {what} would be enough" + cost_words(report) + "."


def headroom_words(headroom: float) -> str:
    """Returns up to which load the SLO is kept. Beyond `HEADROOM_MAX` none was played."""
    if not headroom:
        return "at no load"
    return f"up to {'at least ' if headroom >= HEADROOM_MAX else ''}{headroom:.2g} times the load"


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
    if one["limit_hurts"] in ("decode memory", "sequences"):
        gain += f"; more {one['limit_hurts']} would hurt: bound the batch (--seqs-max)"
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
    bounds = ("batch",) if shows_bounds(rows) else ()
    table = tables.Table(
        f"{rows[0]['simulated_requests']:,} requests; times in ms", "ratio", "step", *bounds, "best", "good/s", *costs, "%",
        "keeps load", "TTFT p50", "TTFT p90", "TPOT p90",
        "busy P/D/T", tables.words("limited by"),
    )  # fmt: skip
    for one in rows[:ROWS_MAX]:
        table.row(
            one["workers"],
            str(one["step_tokens"]),
            *(bound_words(one) for _ in bounds),
            f"{100 * one['probability']:.0f} %",
            number(one["goodput_requests_per_s"], 2),
            *(number(one["good_per_cost"], 0) for _ in costs),
            number(100 * one["attainment"]),
            load_words(one),
            number(one["ttft_ms"]["p50"], 0),
            number(one["ttft_ms"]["p90"], 0),
            number(one["tpot_ms"]["p90"]),
            f"{one['prefill_busy']:.2f}/{one['decode_busy']:.2f}/{one['link_busy']:.2f}",
            one["binds"],
        )
    table.show(console)
    console.print(f"[dim]{BUSY_NOTE}[/dim]", highlight=False)


def shows_bounds(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ratios differ in the most sequences of their batches."""
    return len({one["seqs_max"] for one in rows}) > 1


def bound_words(one: Mapping[str, Any]) -> str:
    return f"≤ {one['seqs_max']}" if one["seqs_max"] else "profile's"


def load_words(one: Mapping[str, Any]) -> str:
    """Up to which multiple of the load a ratio keeps the SLO."""
    return f"{'≥ ' if one['load_kept'] >= HEADROOM_MAX else ''}× {one['load_kept']:.2f}"


def _what_if(report: Mapping[str, Any], console: Console) -> None:
    table = tables.Table(f"What if, on {report['what_if_requests']:,} requests", "load", "good/s", "%")
    for one in report["what_if"]:
        table.row(f"× {one['load']:g}", number(one["goodput_requests_per_s"], 2), number(100 * one["attainment"]))
    table.show(console)


def families(report: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """Returns, for each number of workers, the best ratio with separate phases and the mixed one, all on the same excerpt."""
    found = []
    for total in sorted({one["total"] for one in report["by_workers"]}):
        rows = [one for one in report["by_workers"] if one["total"] == total]
        sides = [[one for one in rows if bool(one["mixed"]) is mixed] for mixed in (False, True)]
        apart, mixed = (max(side, key=itemgetter("attainment"), default=None) for side in sides)
        found.append((total, apart, mixed))
    return found


def _by_workers(report: Mapping[str, Any], console: Console) -> None:
    what = "cards" if of_cards(report) else "workers"
    part = report["by_workers"][0]["simulated_requests"]
    table = tables.Table(
        f"Goodput by number of {what} (good/s, 90 % band), on {part:,} requests",
        what,
        "best ratio",
        "good/s",
        "band",
        "mixed",
        "band ",
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


def squares(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the ratios of separate workers with the recommended bounds, for the map; none of layouts of cards."""
    best = report["recommendation"]
    found = [
        one
        for one in report["by_workers"]
        if not one["mixed"] and all(one[name] == best[name] for name in ("step_tokens", "seqs_max"))
    ]
    return [] if of_cards(report) else sorted(found, key=itemgetter("prefill", "decode"))


def _map(report: Mapping[str, Any], console: Console) -> None:
    rows = rows_of(squares(report))
    if len(rows) < 2:
        return
    console.print(Text(f"{map_title(report)} (prefill down, decode across)", style="bold italic"))
    across = sorted({square["decode"] for square in squares(report)})
    text = Text("     " + "".join(f"{decode:>5}" for decode in across) + "\n")
    for row in rows:
        by_decode = {square["decode"]: square for square in row}
        text.append(f"{row[0]['prefill']:>4} ")
        for decode in across:
            square = by_decode.get(decode)
            words = square_words(square, report) if square else ""
            text.append(f"{words:>5}", style="green" if square and square["keeps"] else "")
        text.append("\n")
    console.print(text, end="")


def map_title(report: Mapping[str, Any]) -> str:
    what = "Percent of requests within the SLO" if report["kept"] else "Percent of the load up to which the SLO is kept"
    return f"{what}, on an excerpt"


def square_words(square: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    return f"{100 * square['attainment' if report['kept'] else 'load_about']:.0f}"


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of the map: one for each number of prefill workers."""
    return [list(row) for _, row in groupby(cells, key=itemgetter("prefill"))]


def how(report: Mapping[str, Any]) -> str:
    full, first = report["ranked"], report["by_workers"]
    return (
        f"{report['candidates']} candidates in {report['seconds']} s: all played {first[0]['simulated_requests']:,} requests,"
        f" and {len(full)} played {full[0]['simulated_requests']:,}."
    )
